"""What a run of `opd sft` would do, from the recipe and its data alone. Imports no torch."""

from pathlib import Path

from opd.data import read_rows
from opd.sft.config import SftConfig, to_yaml


def plan(config: SftConfig, out: Path) -> str:
    """The resolved recipe and the size of the run, as text. Reads the rows. Raises `UserError`."""
    num_rows = sum(1 for _ in read_rows(config.dataset, "dataset"))
    num_rows = min(num_rows, config.dataset.limit or num_rows)
    lines = [
        to_yaml(config).rstrip(),
        "",
        f"# run directory: {out}" + (" (holds a run)" if (out / "sft.yaml").exists() else ""),
        f"# {num_rows} rows; those longer than {config.max_tokens} tokens will be left out",
        f"# {'' if config.steps else 'at most '}{config.num_steps(num_rows)} updates of {config.batch} examples",
    ]
    return "\n".join(lines)
