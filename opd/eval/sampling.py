"""Sampling a model's completions to a file, so that a killed command goes on where it was."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from opd.eval.evaluate import sample_pairs
from opd.eval.models import Opened
from opd.eval.options import EvalOptions
from opd.eval.samples import Pair, Sampled, SampleFile
from opd.records import Array, Prompt


async def sample_to_file(
    opened: Opened,
    problems: Sequence[Prompt],
    ids: Mapping[int, Array],
    path: Path,
    options: EvalOptions,
    bar: Progress,
    *,
    resume: bool = False,
    overwrite: bool = False,
    digests: Mapping[str, str] | None = None,
) -> dict[Pair, Sampled]:
    """Every completion of these problems, by (problem, sample); `ids` are the prompts by the problem's place.

    Only what `path` does not hold yet is sampled. Raises `UserError` as `SampleFile` does.
    """
    header = {"model": opened.identity, **options.fixing_numbers(), "prompts": _digest(ids.values())}
    file = SampleFile(path, header, resume=resume, overwrite=overwrite, digests=digests)
    pairs = [(place, sample) for place in ids for sample in range(options.samples)]
    blocks = file.blocks(pairs, opened.block)
    task = bar.add_task(path.name.removesuffix(".samples.jsonl"), total=len(pairs), completed=len(file.done))

    def done(sampled: Sampled) -> None:
        file.add(sampled)
        bar.advance(task)

    for block in blocks:
        await sample_pairs(opened.sampler, problems, opened.contexts, options.sampling, options.seed, block, done)
    return file.done


def _digest(contexts: Iterable[Array]) -> str:
    """Of all prompts as the model sees them."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in contexts:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()
