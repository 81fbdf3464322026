"""Prompts and conversations as the student sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from opd.envs.dialogue import Dialogue, Exchange
from opd.envs.formats import ToolFormat, read_reply, tool_format
from opd.episodes import Reply
from opd.records import Array, Prompt, Turn
from opd.tokenization import render


@dataclass(frozen=True)
class Contexts:
    """Token ids for the student. `max_context` tokens are the most that a prompt with what follows may have, of which
    `max_new_tokens` a turn; `eos_ids` end a turn."""

    tokenizer: PreTrainedTokenizerBase
    max_context: int
    max_new_tokens: int
    eos_ids: Sequence[int] = ()

    def __call__(self, prompt: Prompt) -> Array | None:
        """The prompt's ids [c] int32, or None where it leaves no room for a completion: such a prompt is skipped."""
        ids = render(self.tokenizer, prompt)
        return ids if 0 < len(ids) < self.max_context else None

    def room(self, context_ids: Array) -> int:
        """How many tokens may follow; none or less where the context is full."""
        return min(self.max_new_tokens, self.max_context - len(context_ids))

    def read(self, sampled_ids: Array) -> Reply:
        """What the student said with these tokens [n]."""
        return read_reply(self._format, self.tokenizer, sampled_ids, self.eos_ids)

    def following(self, prompt: Prompt, context_ids: Array, turn: Turn, exchanges: Sequence[Exchange]) -> Array:
        """The context [c] of the turn after `turn`, which was sampled in the context `context_ids`.

        `exchanges` are the replies so far with what the environment said to each.
        """
        assert prompt.task is not None
        if prompt.task.context == "rerender":
            return self._dialogue.rerendered(prompt, exchanges)
        return self._dialogue.appended(prompt, context_ids, turn.sampled_ids, exchanges[-1][1])

    @cached_property
    def _format(self) -> ToolFormat:
        return tool_format(self.tokenizer, tools=False)  # a run has looked at the form of calls before it began

    @cached_property
    def _dialogue(self) -> Dialogue:
        return Dialogue(self.tokenizer, self.eos_ids, "student.model")
