"""What term makers and masks may know of the student: how it sees a prompt, what its tokens spell, what it would write."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property

from opd.alignment.token_bytes import TokenBytes
from opd.contexts import Contexts
from opd.errors import UserError
from opd.records import Array, Chunk, Prompt, SampleRequest, Sampling, Turn
from opd.students.sampler import Sampler


@dataclass(frozen=True)
class StudentSide:
    """`samplers` are those of the student and of its frozen start, by name; both read the student's tokens."""

    contexts: Contexts
    samplers: Mapping[str, Sampler]

    @property
    def busy(self) -> bool:
        """Whether one of them is decoding."""
        return any(sampler.busy for sampler in self.samplers.values())

    def context(self, prompt: Prompt, num_tokens: int) -> Array | None:
        """See `opd.plugins.Models.context`."""
        ids = self.contexts(prompt)
        return None if ids is None or len(ids) + num_tokens > self.contexts.max_context else ids

    def spell(self, token_ids: Array | Sequence[int]) -> list[bytes]:
        """See `opd.plugins.Models.spell`. Raises `UserError` for a tokenizer whose decoder is not understood."""
        pieces = self._bytes
        return [pieces[int(index)] for index in token_ids]

    async def write(
        self, model: str, prompt: Prompt, seed: int, max_new_tokens: int, temperature: float
    ) -> tuple[str, int] | None:
        """What `model` answers, without special tokens, and in how many tokens; None for a prompt that is too long."""
        ids = self.contexts(prompt)
        if ids is None:
            return None
        longest = min(max_new_tokens, self.contexts.max_context - len(ids))
        request = SampleRequest(ids, seed, longest, Sampling(temperature))
        chunks: list[Chunk] = []
        async with aclosing(self.samplers[model].generate(request)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
        sampled = Turn.of(ids, chunks).sampled_ids
        return str(self.contexts.tokenizer.decode(sampled, skip_special_tokens=True)), len(sampled)

    @cached_property
    def _bytes(self) -> TokenBytes:
        backend = getattr(self.contexts.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("student.model: its tokenizer is not a fast one, whose tokens alone can be spelt byte by byte")
        return TokenBytes.of(backend, "student.model")
