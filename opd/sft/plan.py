"""What a run of `opd sft` would do, from the recipe and its data alone. Imports no torch."""

from pathlib import Path

from opd.errors import UserError
from opd.sft.config import SftConfig, to_yaml
from opd.sft.examples import read_examples


def plan(config: SftConfig, out: Path) -> str:
    """The resolved recipe and the size of the run, as text. Reads the rows. Raises `UserError` as the run itself would."""
    examples = read_examples(config.dataset, "dataset")
    empty, deleted, left = zip(*((one.is_empty, one.num_deleted, one.num_characters) for one in examples))
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
    if config.dataset.delete_steps is not None:
        share = sum(deleted) / max(1, sum(deleted) + sum(left))
        num = sum(map(bool, deleted))
        lines.append(f"# dataset.delete_steps: {num} of these answers lose steps, {share:.1%} of all answers' text")
    return "\n".join(lines)
