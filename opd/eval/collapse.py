"""Does the student still vary what it says? The share of distinct 4-grams of its own samples, while it trains.

A student that trains on what it says itself may come to say less and less that is new. u4 falls with the number of tokens
looked at, so it is exactly the same number at every evaluation of every run.
"""

import asyncio
import math

from accelerate.utils import gather_object

from opd.assembly import Parts
from opd.eval.config import MAX_ROUNDS
from opd.eval.ngrams import distinct_ngrams
from opd.records import Prompt
from opd.students.noise import slot_seed

NGRAM = 4


async def distinct_4grams(parts: Parts, prompts: list[Prompt], num_tokens: int, seed: int) -> float | None:
    """u4 of `num_tokens` tokens that the student samples as in training, for each prompt again and again until there are as
    many; None where `MAX_ROUNDS` answers to each do not hold them.

    Every process must call. A sampled EOS is a token, and an answer or turn of fewer than four tokens counts as none.
    """
    process, processes = parts.accelerator.process_index, parts.accelerator.num_processes

    async def one(number: int, index: int) -> tuple[int, list[list[int]]]:
        rollout = await parts.player.play(prompts[index], index, slot_seed(seed, number, index))
        return index, [] if rollout is None else [turn.sampled_ids.tolist() for turn in rollout.turns]

    said: list[list[int]] = []
    for number in range(MAX_ROUNDS):
        mine = await asyncio.gather(*(one(number, index) for index in range(process, len(prompts), processes)))
        for _, turns in sorted(gather_object(mine), key=lambda pair: pair[0]):
            said += turns
        found = distinct_ngrams(said, NGRAM, num_tokens)
        if not math.isnan(found):
            return found
    return None
