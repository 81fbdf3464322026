"""From a prompt to a rollout."""

from transformers import PreTrainedTokenizerBase

from opd.records import Array, Prompt, Rollout, SampleRequest, Sampling, Turn
from opd.students.sampler import Sampler
from opd.tokenization import render


class Contexts:
    """Prompts as the student sees them; those that leave no room for a completion are skipped and counted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_context: int, max_new_tokens: int) -> None:
        self.tokenizer, self.max_context, self.max_new_tokens = tokenizer, max_context, max_new_tokens
        self.num_skipped = 0

    def __call__(self, prompt: Prompt) -> Array | None:
        """The prompt's ids [c] int32, or None where it is longer than the context."""
        ids = render(self.tokenizer, prompt)
        if 0 < len(ids) < self.max_context:
            return ids
        self.num_skipped += 1
        return None

    def room(self, context_ids: Array) -> int:
        """How many tokens may follow."""
        return min(self.max_new_tokens, self.max_context - len(context_ids))


async def sample_rollout(
    sampler: Sampler, prompt: Prompt, slot: int, context_ids: Array, seed: int, room: int, sampling: Sampling
) -> Rollout:
    """One single-turn rollout."""
    request = SampleRequest(context_ids, seed, room, sampling)
    turn = Turn.of(context_ids, [chunk async for chunk in sampler.generate(request)])
    return Rollout(prompt, slot, (turn,))
