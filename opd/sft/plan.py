"""What a run of `opd sft` would do, from the recipe and its data alone. Imports no torch."""

from pathlib import Path

from opd.errors import UserError
from opd.sft.config import SftConfig, to_yaml
from opd.sft.examples import read_examples


def plan(config: SftConfig, out: Path) -> str:
    """The resolved recipe and the size of the run, as text. Reads the rows. Raises `UserError` as the run itself would."""
    empty = [example.is_empty for example in read_examples(config.dataset, "dataset")]
    num_rows, num_empty = len(empty), sum(empty)
    if num_empty == num_rows:
        raise UserError(f"dataset.path: {config.dataset.path} holds nothing to learn: every answer is empty")
    num_steps = config.num_steps(num_rows - num_empty)
    lines = [
        to_yaml(config).rstrip(),
        "",
        f"# run directory: {out}" + (" (holds a run)" if (out / "sft.yaml").exists() else ""),
        f"# {num_rows} row{'s' * (num_rows != 1)}, {num_empty} with an empty answer; those, and examples longer than "
        f"{config.max_tokens} tokens or with special tokens of the student's in their text, will be left out",
        f"# {'' if config.steps else 'at most '}{num_steps} update{'s' * (num_steps != 1)} of {config.batch} examples",
    ]
    return "\n".join(lines)
