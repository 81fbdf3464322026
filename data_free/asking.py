"""Putting prompts to a model, each several times, with the completions in a file from which a killed command goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from opd.errors import UserError
from opd.eval.evaluate import fitting
from opd.eval.models import open_model
from opd.eval.options import EvalOptions
from opd.eval.samples import Pair, Sampled
from opd.eval.sampling import sample_to_file
from opd.progress import counting_bar
from opd.records import Array, Prompt


@dataclass(frozen=True)
class Asked:
    """`samples` by (place of the prompt, sample); `ids` of the prompts that leave room for an answer, by place.

    `identity`: of the model, see `opd.eval.models.Opened`.
    """

    samples: Mapping[Pair, Sampled]
    ids: Mapping[int, Array]
    identity: str
    tokenizer: PreTrainedTokenizerBase


async def ask(
    model: str, prompts: Sequence[Prompt], samples: Path, options: EvalOptions, begin: Mapping[str, bool],
    fields: tuple[str, str],
) -> Asked:  # fmt: skip
    """Every completion, read from the file `samples` or sampled to it; `begin` has `resume` and `overwrite`.

    `fields` are what the command line calls the model and the prompts. Raises `UserError` naming one of them: a model
    without a chat template, prompts that do not fit it.
    """
    of_model, of_prompts = fields
    async with open_model(model, options, of_model) as opened:
        tokenizer = opened.contexts.tokenizer
        if not tokenizer.chat_template:
            raise UserError(f"{of_model}: its tokenizer has no chat template; name a model that has one")
        try:
            ids = fitting(prompts, opened.contexts)
        except UserError as error:  # it does not know the options of this command
            what = str(error).removeprefix("prompts: ")
            raise UserError(f"{of_prompts}: {what}; change or leave out such rows, or name another {of_model}") from None
        with counting_bar() as bar:
            changed = f"other prompts: look at {of_prompts} and at the options that say which are asked, and in which words"
            digests = {"model": f"another {of_model}", "prompts": changed}
            found = await sample_to_file(opened, prompts, ids, samples, options, bar, **begin, digests=digests)
    return Asked(found, ids, opened.identity, tokenizer)
