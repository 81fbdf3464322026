"""`python -m opd` is the command `opd`."""

from opd.cli import main

main()
