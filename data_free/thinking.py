"""Where a model's thinking ends and what it says to the user begins."""

import re
from typing import TYPE_CHECKING

from opd.records import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN_THOUGHT = re.compile(r"(<[\w:|]*think[\w:|]*>|\[THINK\])\s*$")  # at the end of a prompt: the template opened it
_BEGINNING = re.compile(r"\s*(<[\w:|]*think[\w:|]*>|\[THINK\])")
_END = re.compile(r"<\|?/[\w:|]*think[\w:|]*>|\[/THINK\]")


def after_thinking(tokenizer: "PreTrainedTokenizerBase", ids: Array, *, opened: bool) -> str:
    """The text of the sampled ids [n] after the last end of thinking, or all of it where none began; stripped.

    Empty where thinking began and never ended. `opened`: it began in the prompt; else it begins with the text or not at all,
    and a mark further on is what the text is about.
    """
    whole = str(tokenizer.decode(ids))
    if not (opened or _BEGINNING.match(whole)):
        return _said(tokenizer, ids)
    if not _END.search(whole):
        return ""
    # a mark that is a special token is not in the text of what was said
    added = tokenizer.get_added_vocab()  # type: ignore[operator]
    marks = [token for text, token in added.items() if _END.fullmatch(text)]
    ends = [place for place, token in enumerate(ids.tolist(), start=1) if token in marks]
    return _END.split(_said(tokenizer, ids[ends[-1] :] if ends else ids))[-1].strip()


def _said(tokenizer: "PreTrainedTokenizerBase", ids: Array) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
