"""What crosses a seam: frozen records on numpy arrays, one for each step of the data path.

Shape legend: c context tokens, n sampled tokens (the turns of a rollout concatenated), k top-k entries, H hidden size.
Log-probs are natural logarithms in float32, token ids int32. Plug-ins see nothing but these records, and need no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from opd.episodes import EnvironmentTask

Array = np.ndarray
Finish = Literal["eos", "length", "stopped", "env"]
Restart = Literal["", "restored", "failed", "too long"]
DEFAULT_DOMAIN = "default"  # of prompts without one


@dataclass(frozen=True)
class Prompt:
    """One task.

    Example: `Prompt(id="gsm8k-0", messages=({"role": "user", "content": "2+2?"},), answer="4")`
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()  # chat messages; empty when `text` is given
    text: str | None = None  # a plain prompt, tokenised as it is
    answer: str | tuple[str, ...] | None = None  # for evaluation and verifiers; of terms few read it, and say so
    problem: str = ""  # the task as the data have it, without template and system message: what identifies it
    domain: str = DEFAULT_DOMAIN  # routes to the teacher of this name
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas handed to the chat template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"enable_thinking": False}
    meta: Mapping[str, Any] = field(default_factory=dict)  # further columns of the row
    task: EnvironmentTask | None = None  # the episode that `messages` open; None: a single answer

    @property
    def single_turn(self) -> bool:
        """Whether one answer is all: it then stops, and starts again, between its tokens."""
        return self.task is None or self.task.single_turn


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Example: `Sampling(temperature=0.7, top_p=0.95)`
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 keeps everything
    top_k: int = 0  # 0 keeps everything
    num_topk: int = 0  # how many of the student's own most likely tokens to return beside the sampled one
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the turn holds already

    @property
    def truncated(self) -> bool:
        """Whether the distribution sampled from differs from the softmax at this temperature."""
        return self.top_p < 1.0 or self.top_k > 0 or self.temperature == 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One turn to sample.

    Example: `SampleRequest(context_ids=np.array([1, 5, 9], np.int32), seed=7, max_new_tokens=64, sampling=Sampling())`
    """

    context_ids: Array  # [c] exactly what the student sees
    seed: int  # the noise of position i depends on (seed, i) alone
    max_new_tokens: int
    sampling: Sampling
    episode: bool = False  # other turns come before or after it, whose keys and values are worth keeping
    first: int = 0  # position of the first token to sample: others of the turn end the context


@dataclass(frozen=True, eq=False)
class Chunk:
    """The next tokens of an unfinished turn, as they leave the sampler.

    Example: `Chunk(sampled_ids=np.array([4, 2]), sampler_logps=np.array([-0.1, -2.3]), finish="eos", version=3)`
    """

    sampled_ids: Array  # [m] int32
    sampler_logps: Array  # [m] float32, of the distribution sampled from
    finish: Finish | None  # None while the turn goes on
    version: int  # of the policy that sampled these tokens
    topk_ids: Array | None = None  # [m, k] int32, the student's own most likely tokens
    topk_logps: Array | None = None  # [m, k] float32, untruncated and at the sampling temperature


@dataclass(frozen=True, eq=False)
class Turn:
    """What the student sampled between two observations, with the context it saw.

    Example: `Turn(context_ids=np.array([1, 5]), sampled_ids=np.array([4, 2]), sampler_logps=np.array([-0.1, -2.3]),
    finish="eos")`
    """

    context_ids: Array  # [c] int32, exactly as the student saw them
    sampled_ids: Array  # [n] int32, a sampled EOS included
    sampler_logps: Array  # [n] float32, of the distribution sampled from
    finish: Finish
    topk_ids: Array | None = None  # [n, k] int32
    topk_logps: Array | None = None  # [n, k] float32
    num_reused: int = 0  # leading sampled tokens taken from an earlier rollout: context, never trained
    num_discarded: int = 0  # tokens sampled beyond the place where a controller stopped the turn, and thrown away
    versions: tuple[tuple[int, int], ...] = ((0, 0),)  # (first token, policy version), ascending
    teacher_logps: Array | None = None  # [m <= n] float32, where controllers looked at them: see `Progress.logps`
    observations: tuple[Mapping[str, Any], ...] = ()  # the messages by which the environment answered
    state_hash: str | None = None  # of the environment after this turn
    mistake: bool | None = None  # whether the environment's verifier sees an error in this turn; None: it cannot tell

    @classmethod
    def of(cls, context_ids: Array, chunks: Sequence[Chunk]) -> "Turn":
        """The turn that these chunks make up; the last one carries its `finish`."""
        assert chunks[-1].finish is not None
        starts = np.cumsum([0, *(len(chunk.sampled_ids) for chunk in chunks[:-1])]).tolist()
        versions = [(start, chunk.version) for start, chunk in zip(starts, chunks)]
        changes = [pair for i, pair in enumerate(versions) if i == 0 or pair[1] != versions[i - 1][1]]
        topk = chunks[0].topk_ids is not None
        return cls(
            context_ids=context_ids,
            sampled_ids=np.concatenate([chunk.sampled_ids for chunk in chunks]),
            sampler_logps=np.concatenate([chunk.sampler_logps for chunk in chunks]),
            finish=chunks[-1].finish,
            topk_ids=np.concatenate([chunk.topk_ids for chunk in chunks]) if topk else None,  # type: ignore[misc]
            topk_logps=np.concatenate([chunk.topk_logps for chunk in chunks]) if topk else None,  # type: ignore[misc]
            versions=tuple(changes),
        )

    def after(self, reused: "Turn") -> "Turn":
        """The turn with the tokens of `reused` before its own; they are context, never trained."""
        num = len(reused.sampled_ids)
        wider = [None if part is None else np.pad(part, ((num, 0), (0, 0))) for part in (self.topk_ids, self.topk_logps)]
        return replace(
            self,
            sampled_ids=np.concatenate([reused.sampled_ids, self.sampled_ids]),
            sampler_logps=np.concatenate([reused.sampler_logps, self.sampler_logps]),
            topk_ids=wider[0],
            topk_logps=wider[1],
            num_reused=num,
            versions=(*reused.versions, *((start + num, version) for start, version in self.versions)),
        )

    def stopped_at(self, length: int) -> "Turn":
        """The turn as a controller stopped it after `length` tokens. One that had ended there by itself keeps its finish."""
        assert length > 0
        if length == len(self.sampled_ids):
            return self
        return replace(
            self,
            sampled_ids=self.sampled_ids[:length],
            sampler_logps=self.sampler_logps[:length],
            finish="stopped",
            topk_ids=None if self.topk_ids is None else self.topk_ids[:length],
            topk_logps=None if self.topk_logps is None else self.topk_logps[:length],
            teacher_logps=None if self.teacher_logps is None else self.teacher_logps[:length],
            num_discarded=self.num_discarded + len(self.sampled_ids) - length,
            versions=tuple(pair for pair in self.versions if pair[0] < length),
        )

    @property
    def policy_versions(self) -> Array:
        """[n] int64: the policy that sampled each token."""
        starts, versions = np.array(self.versions).T
        return versions[np.searchsorted(starts, np.arange(len(self.sampled_ids)), side="right") - 1]

    @property
    def trainable(self) -> Array:
        """[n] bool: what the student sampled now. No EOS is invented for a truncated turn."""
        return np.arange(len(self.sampled_ids)) >= self.num_reused


@dataclass(frozen=True)
class Unit:
    """What controllers decide about: a turn of an episode or, in a single answer, a chunk of `sampler.chunk_tokens` tokens.

    Example: `Unit(logp_sum=-3.5, num_judged=7, reused=False)`
    """

    logp_sum: float  # the teacher's log-probs of the unit's tokens, added up
    num_judged: int  # tokens that have one
    reused: bool = False  # taken from an earlier rollout

    @property
    def mean(self) -> float | None:
        """Nats a token; None where the teacher has judged nothing."""
        return self.logp_sum / self.num_judged if self.num_judged else None


@dataclass(frozen=True, eq=False)
class Progress:
    """A rollout that is still being sampled, as its controllers see it after each unit.

    With a teacher of another tokenizer, `logps` has the leading m <= n tokens whose scores further text cannot change, and
    NaN for tokens that have no counterpart; otherwise m = n.

    Example: `Progress(prompt, slot=0, context_ids=np.array([1, 5]), sampled_ids=np.array([4, 2]), logps=None)`
    """

    prompt: Prompt
    slot: int
    context_ids: Array  # [c] int32, of the current turn
    sampled_ids: Array  # [n] int32, of the current turn so far
    logps: Array | None  # [m] float32, the teacher's log-probs of them, where the controller needs scores; see below
    units: tuple[Unit, ...] = ()  # so far, reused ones first; empty where no controller needs scores
    num_turns: int = 1  # with the current one and reused ones


@dataclass(frozen=True)
class Start:
    """Where a rollout begins: after the first units of an earlier one of the same task.

    Example: `Start(turns=buffered.turns[:2])`
    """

    turns: tuple[Turn, ...] = ()  # whole turns, reused as they are
    tokens: Turn | None = None  # of a single answer: the turn whose tokens are reused, all of them


@dataclass(frozen=True)
class Limits:
    """The most that a rollout may have. None: as much as the recipe allows.

    Example: `Limits(turns=5)`
    """

    turns: int | None = None  # of an episode, reused ones included
    tokens: int | None = None  # of a single answer, reused ones included


@dataclass(frozen=True, eq=False)
class Rollout:
    """One attempt at a prompt.

    Example: `Rollout(prompt=prompt, slot=0, turns=(turn,))`
    """

    prompt: Prompt
    slot: int  # its index in the step: fixes the sampling seed
    turns: tuple[Turn, ...]
    outcome: float | None = None  # raw, from a verifier
    score: float | None = None  # shaped; never decides what `outcome` should
    restart: Restart = ""  # what became of the prefix that it was to begin with

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)

    @property
    def trainable(self) -> Array:
        """[n] bool over the sampled tokens of all turns."""
        return np.concatenate([turn.trainable for turn in self.turns]) if self.turns else np.zeros(0, bool)

    @property
    def finish(self) -> Finish:
        return self.turns[-1].finish


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A question to a frozen model about one turn: the log-probs of its tokens, and what else is wanted.

    Example: `ScoreRequest(context_ids=turn.context_ids, token_ids=turn.sampled_ids, k=16)`
    """

    context_ids: Array  # [c] int32
    token_ids: Array  # [n] int32
    k: int = 0  # wants the model's own k most likely tokens
    ids: Array | None = None  # [n, m] int32: wants the log-probs of these tokens
    hidden: bool = False  # wants the last hidden states alone, from which a head gives every log-prob
    logps_too: bool = False  # with `hidden`: wants the tokens' log-probs beside the states; of models in this process alone
    temperature: float = 1.0  # log-probs are those of softmax(logits / temperature)
    stream: str | None = None  # an unfinished sequence whose KV cache the model keeps; it then holds this request's tokens
    keep_tokens: int = 0  # with `stream`: `context_ids` follow its first so many tokens, the others are dropped
    keep_crc: int | None = None  # CRC-32 of those tokens as int32: a stream that holds others counts as lost

    @property
    def num_tokens(self) -> int:
        """Tokens that the request carries."""
        return len(self.context_ids) + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Scores:
    """What a frozen model answers. Nothing here is -inf: log-probs are floored where they are made, and counted.

    Example: `Scores(logps=np.array([-0.2, -1.5], np.float32))`
    """

    logps: Array | None = None  # [n] float32, of the tokens asked about; None with `hidden` alone
    topk_ids: Array | None = None  # [n, m + k] int32: the ids asked for, then the model's own; a repeated id is -1
    topk_logps: Array | None = None  # [n, m + k] float32
    tail: Array | None = None  # [n] float32: the probability outside `topk_ids`
    hidden: Any = None  # [n, H] torch tensor in the model's type, opaque to plug-ins
    head: str | None = None  # which output head turns `hidden` into logits
    num_floored: int = 0  # log-probs of this answer that were raised to the floor


@dataclass(frozen=True, eq=False)
class SpanMap:
    """A turn's sampled tokens beside a teacher's tokens of the same text.

    The u units partition both sequences in order: unit z holds student tokens `student_ends[z-1]:student_ends[z]` (at
    least one) and teacher tokens `teacher_ends[z-1]:teacher_ends[z]` (none, in some units that are not aligned).

    Example: `SpanMap(context_ids, token_ids, student_ends=np.array([2, 3]), teacher_ends=np.array([1, 2]),
    num_bytes=np.array([4, 0]), aligned=np.array([True, True]))`
    """

    context_ids: Array  # [c] int32, the conversation as the teacher sees it
    token_ids: Array  # [m] int32, the teacher's tokens of what the student sampled
    student_ends: Array  # [u] int32, strictly ascending; the last is n
    teacher_ends: Array  # [u] int32, ascending; the last is m
    num_bytes: Array  # [u] int32, of the student's text; 0 for tokens without text, such as EOS
    aligned: Array  # [u] bool: both sides spell the same bytes there, or mean the same special token
    settled: int = 0  # leading units that no further text can change

    @property
    def student_sizes(self) -> Array:
        """[u] student tokens of each unit."""
        return np.diff(self.student_ends, prepend=0)

    @property
    def teacher_sizes(self) -> Array:
        """[u] teacher tokens of each unit."""
        return np.diff(self.teacher_ends, prepend=0)

    @property
    def one_to_one(self) -> Array:
        """[u] bool: aligned, a token on either side."""
        return self.aligned & (self.student_sizes == 1) & (self.teacher_sizes == 1)

    @property
    def unit_starts(self) -> Array:
        """[n] bool: the first student token of each unit."""
        starts = np.zeros(int(self.student_ends[-1]) if len(self.student_ends) else 0, bool)
        starts[(self.student_ends - self.student_sizes)] = True
        return starts

    def per_token(self, of_units: Array) -> Array:
        """[n]: what each unit has [u], for each of its student tokens."""
        return np.repeat(of_units, self.student_sizes)

    def reduce(self, logps: Array, rule: Literal["split", "mean"]) -> Array:
        """[n] float32: the teacher's log-probs [m] of its tokens, brought to the student's tokens.

        `split` shares a unit's sum equally among its student tokens, which keeps the total; `mean` gives each the mean over
        the unit's teacher tokens (CompassOPD, arXiv 2609.10154, A.4). 0 where a unit is not aligned.
        """
        sums = np.diff(np.concatenate([[0.0], np.cumsum(logps, dtype=np.float64)])[self.teacher_ends], prepend=0.0)
        sizes = self.student_sizes if rule == "split" else self.teacher_sizes
        of_units = np.where(self.aligned, sums / np.maximum(sizes, 1), 0.0)
        return self.per_token(of_units).astype(np.float32)


@dataclass(frozen=True, eq=False)
class TopK:
    """A distribution known at k tokens of each position.

    Example: `TopK(ids=scores.topk_ids, logps=scores.topk_logps, tail=scores.tail)`
    """

    ids: Array  # [n, k] int32; -1 marks an absent entry
    logps: Array  # [n, k] float32
    tail: Array  # [n] float32, the mass outside
    unknown: Array | None = None  # [n, k] bool: tokens this side lacks; the other is compared given it drew none of them


@dataclass(frozen=True, eq=False)
class Hidden:
    """A distribution over the whole vocabulary, as the hidden state that a known head turns into logits.

    Each passage of the rollout (`opd.passages`) has a tensor of its own, since plug-ins import no torch and cannot join
    them; their rows are those of its trainable tokens.

    Example: `Hidden(states=(scores.hidden[passage.at],), head=scores.head)`
    """

    states: tuple[Any, ...]  # one torch tensor [s_i, H] a passage, in order
    head: str


@dataclass(frozen=True, eq=False)
class Term:
    """One part of the loss on one rollout, computed by the learner under the current student.

    `kind` is one of `opd.objective.terms.KINDS`; `inputs` is what that kind documents.

    Example: `Term("policy_gradient", mask=rollout.trainable, inputs={"reward": scores.logps, "self_coef": 1.0})`
    """

    kind: str
    mask: Array  # [n] bool: counts in the normaliser
    inputs: Mapping[str, Any]  # arrays [n, ...], TopK, Hidden, and scalars
    weight: Array | None = None  # [n] float32: scales a token's loss, does not count in the normaliser; None is 1
    coef: float = 1.0
