"""The command `opd`. Help, listing and validation import neither torch nor transformers."""

import os
import sys
import traceback
import warnings

import typer

from opd.errors import UserError


def build() -> typer.Typer:
    """The command line with all its commands."""
    from opd.cli import align, compare, evaluate, grade, launch, prompts, push, recipes, replay, serve, sft, sweep, train

    app = typer.Typer(
        name="opd",
        help="On-policy distillation: a student learns from a frozen teacher's judgement of its own rollouts.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in (train, sft, sweep, launch, align, evaluate, grade, compare, replay, prompts, push, serve, recipes):
        module.add_to(app)
    return app


def main() -> None:
    """Runs the command line. A user's mistake is one line on stderr and exit code 2.

    With OPD_TRACEBACK=1 what led to it comes before: where a plug-in of one's own failed, say.
    """
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
    try:
        build()()
    except UserError as error:
        if os.environ.get("OPD_TRACEBACK"):
            traceback.print_exception(error)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
