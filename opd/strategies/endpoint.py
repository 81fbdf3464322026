"""Mask `endpoint`: the middle of the reasoning stays in the context and teaches nothing directly.

Endpoint supervision (Hwang et al., arXiv 2609.07103) for on-policy distillation and group rewards. Of a rollout's reasoning
about the middle fifth has no gradient of its own; beginning and end are trained as ever, in any term:

    L = -(1/N) sum_t m_t (1 - mid_t) A_t log pi_theta(y_t | x, y_<t)

Rewards, advantages and the teacher's scores are those of the whole rollout, and nothing is sampled less: the gradient of the
last tokens still flows through the hidden states of the masked ones. For supervised traces the paper deletes the middle
instead, which changes what later tokens see: `dataset.delete_steps` of `opd sft`.

The paper states neither the region, nor where exactly the middle lies, nor the normaliser; what is used here is below.

Shape legend: n tokens of a turn; M of them are reasoning, in S steps.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from opd.errors import UserError, refuse_unused
from opd.plugins import Mask, Models
from opd.records import Array, Rollout, Turn
from opd.traces import Thinking, answer_lines, step_ends

if TYPE_CHECKING:
    from opd.config import RunConfig

STEP_FIELDS = ("delimiter", "step_budget", "no_delimiter")


@dataclass(frozen=True)
class EndpointConfig:
    """The middle of the reasoning, masked. Never masked are the final answer (what follows `</think>`; without that, the
    last line with `\\boxed{` and the last one with `####`), tokens without text such as EOS, and the unit at which a rollout
    controller stopped: a turn or, of a single answer, its last chunk of `sampler.chunk_tokens` tokens. Each turn of an
    episode is masked for itself. Metrics that are means over tokens are then means over those that are not masked."""

    fraction: float = 0.2
    """The share of the reasoning's trainable tokens that is masked, at most."""
    by: Literal["step", "token"] = "step"
    """What is masked: whole steps, the paper's better form, or exactly the share of tokens wherever it begins and ends."""
    region: Literal["think", "response"] = "think"
    """What counts as reasoning: what stands between `<think>` and `</think>` (to the end where it is not closed, the whole
    response where there is no such mark), or all of the response that may be masked. Marks that are special tokens of the
    tokenizer are not seen."""
    delimiter: str = "\n\n"
    """By step: what ends a step. The token in which it ends belongs to that step."""
    step_budget: Literal["token_mass", "step_count"] = "token_mass"
    """By step: `fraction` is of the tokens, or of the number of steps."""
    place: Literal["middle", "random", "head", "tail"] = "middle"
    """Where the mask lies. The others are controls: they mask exactly as many tokens as the middle would have."""
    normalizer: Literal["all", "live"] = "all"
    """Whether masked tokens still count in the loss's normaliser: `all` removes their terms and nothing else, `live` makes
    the others' share larger by 1 / (1 - fraction), as a higher learning rate would. A term's `baseline: mean` is the mean of
    the tokens that are not masked, which moves their advantages: it goes with `live` alone."""
    no_delimiter: Literal["none", "token"] = "none"
    """By step, where the reasoning is one single step: mask nothing, or by token."""
    mask_truncated: bool = True
    """Whether to mask turns that were cut off at their greatest length; what is kept last is then where they were cut."""
    min_tokens: int = 0
    """Turns with less reasoning, in tokens, are not masked."""


class Endpoint(Mask):
    """See the module."""

    Config = EndpointConfig

    def __init__(self, config: EndpointConfig, run: "RunConfig") -> None:
        self.config, self.seed, self.chunk = config, run.seed, run.sampler.chunk_tokens
        self.counted = config.normalizer == "all"

    @staticmethod
    def check(config: EndpointConfig, run: "RunConfig") -> None:
        if not 0 <= config.fraction < 1:
            raise UserError(f"masks.endpoint.fraction is {config.fraction}: it is a share, at least 0 and below 1")
        if not config.delimiter:
            raise UserError("masks.endpoint.delimiter is empty: name the text that ends a step, or set by: token")
        if config.min_tokens < 0:
            raise UserError(f"masks.endpoint.min_tokens is {config.min_tokens}: it must be 0 or more")
        if config.by == "token":
            refuse_unused(config, STEP_FIELDS, "masks.endpoint", "with by: token")
        for name, term in run.terms.items() if config.normalizer == "all" else ():
            if getattr(term, "baseline", "none") == "mean":
                raise UserError(
                    f"terms.{name}.baseline: the mean is taken over the tokens that masks.endpoint leaves, so that the mask "
                    f"would move their advantages; set masks.endpoint.normalizer=live, or terms.{name}.baseline=none"
                )

    def warning(self, figures: Mapping[str, float]) -> str | None:
        config = self.config
        if config.fraction == 0 or figures.get("masked_share") != 0.0:
            return None
        if config.by == "token":
            why = f"no reasoning is so long that {config.fraction} of it is a token"
            fix = "raise masks.endpoint.fraction"
        else:
            why = f"no reasoning has, between its first and its last step, one of at most {config.fraction} of it"
            fix = f"set masks.endpoint.by=token, a larger fraction, or another delimiter than {config.delimiter!r}"
        if config.min_tokens:
            why, fix = f"{why}, or none has {config.min_tokens} tokens", f"{fix}, or lower masks.endpoint.min_tokens"
        if not config.mask_truncated:
            why, fix = f"{why}, or all were cut off", f"{fix}, or set masks.endpoint.mask_truncated=true"
        return f"masks.endpoint has masked nothing (masked_share): {why}; {fix}"

    def weights(self, rollout: Rollout, models: Models) -> Array:
        """See `opd.plugins.Mask.weights`: 0 where a token is masked, else 1."""
        parts = [self._turn(rollout, number, turn, models) for number, turn in enumerate(rollout.turns)]
        return np.concatenate(parts) if parts else np.ones(0, np.float32)

    def _turn(self, rollout: Rollout, number: int, turn: Turn, models: Models) -> Array:
        """[n] float32."""
        config, single = self.config, rollout.prompt.single_turn
        weights = np.ones(len(turn.sampled_ids), np.float32)
        whole = (turn.finish == "stopped" and not single) or (turn.finish == "length" and not config.mask_truncated)
        if whole or not turn.trainable.any():
            return weights
        reasoning, step = reasoning_of(models.spell(turn.sampled_ids), config.region, config.delimiter.encode())
        reasoning &= turn.trainable
        if turn.finish in ("eos", "env"):
            reasoning[-1] = False  # an EOS that is text to the tokenizer
        if turn.finish == "stopped":  # its last chunk (`opd.units`) is what the stop was about
            reasoning[(len(weights) - 1) // self.chunk * self.chunk :] = False
        tokens = np.flatnonzero(reasoning)
        if not len(tokens) or len(tokens) < config.min_tokens:
            return weights
        sizes = np.unique(step[tokens], return_counts=True)[1]
        by_token = config.by == "token" or (len(sizes) == 1 and config.no_delimiter == "token")
        if by_token:
            start, end = middle_tokens(len(tokens), config.fraction)
        else:
            start, end = middle_steps(sizes, config.fraction, config.step_budget)
        chosen = np.arange(start, end)
        if config.place != "middle":
            order = self._order(len(tokens), None if by_token else sizes, [self.seed, _crc(rollout), rollout.slot, number])
            chosen = order[: end - start]
        assert len(chosen) < len(tokens)
        weights[tokens[chosen]] = 0.0
        return weights

    def _order(self, size: int, sizes: Array | None, seed: list[int]) -> Array:
        """[M]: places in the reasoning in the order in which a control masks them; steps of `sizes` [S] stay together."""
        places = np.arange(size)
        if self.config.place == "head":
            return places
        if self.config.place == "tail":
            return places[::-1]
        rng = np.random.default_rng(seed)
        if sizes is None:
            return rng.permutation(places)
        steps = np.split(places, np.cumsum(sizes)[:-1])
        return np.concatenate([steps[i] for i in rng.permutation(len(steps))])


def reasoning_of(spelled: list[bytes], region: Literal["think", "response"], delimiter: bytes) -> tuple[Array, Array]:
    """([n] bool, [n] int64): which tokens are reasoning, and the number of each token's step, ascending.

    `spelled` is what each token adds to the text. A token that is reasoning only in part is not.
    """
    text = b"".join(spelled)
    sizes = np.array([len(piece) for piece in spelled], np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    thinking = Thinking.of(text)
    first = thinking.start if thinking is not None and region == "think" else 0
    last = thinking.end if thinking is not None else len(text)
    inside = (sizes > 0) & (starts >= first) & (ends <= last)
    if thinking is None or not thinking.closed:
        for start, end in answer_lines(text):
            inside &= (ends <= start) | (starts >= end)
    steps = np.array(step_ends(text[first:last], delimiter), np.int64) + first
    closing = np.unique(np.searchsorted(ends, steps))  # the token that holds the last byte of each step
    return inside, np.searchsorted(closing, np.arange(len(spelled)))


def middle_tokens(size: int, fraction: float) -> tuple[int, int]:
    """[start, end) of the floor(fraction * size) tokens in the middle of `size`."""
    length = _budget(size, fraction)
    start = -((length - size) // 2)  # ceil((size - length) / 2)
    return start, start + length


def middle_steps(sizes: Array, fraction: float, budget: Literal["token_mass", "step_count"]) -> tuple[int, int]:
    """[start, end) in tokens of the block of whole steps that is masked, given their `sizes` [S] in tokens.

    Of the blocks of neighbouring steps without the first and the last, and of at most `fraction` of all tokens (or steps),
    the largest; of several the one closest to the middle, then the earlier.
    """
    masses = sizes if budget == "token_mass" else np.ones_like(sizes)
    total = int(masses.sum())
    most = _budget(total, fraction)
    before = np.concatenate([[0], np.cumsum(masses)])
    best: tuple[int, int, int, int] | None = None
    for first in range(1, len(sizes) - 1):  # from each step the longest block that fits: a shorter one has less mass
        last = min(int(np.searchsorted(before, before[first] + most, side="right")) - 1, len(sizes) - 1)
        mass = int(before[last] - before[first])
        found = (-mass, abs(int(before[first] + before[last]) - total), first, last)
        if mass > 0 and (best is None or found < best):
            best = found
    if best is None:
        return 0, 0
    tokens = np.concatenate([[0], np.cumsum(sizes)])
    return int(tokens[best[2]]), int(tokens[best[3]])


def _budget(size: int, fraction: float) -> int:
    """floor(fraction * size), where 0.29 * 100 is 29."""
    return math.floor(fraction * size + 1e-9)


def _crc(rollout: Rollout) -> int:
    return zlib.crc32(rollout.prompt.id.encode())
