"""The frozen models of a run by name, behind the protocol that term makers use."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from opd.alignment.aligner import Aligner
from opd.alignment.coverage import Coverage
from opd.clock import Clock
from opd.envs.dialogue import messages
from opd.episodes import Reply
from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.records import Array, Prompt, Rollout, ScoreRequest, Scores, SpanMap, Turn
from opd.student_side import StudentSide
from opd.students.noise import slot_seed
from opd.teachers.config import START, teacher_of
from opd.teachers.growing import AlignedScoring, OwnScoring, Scoring


class Teacher(Protocol):
    """A frozen model, here or elsewhere."""

    @property
    def head(self) -> OutputHead: ...

    @property
    def head_id(self) -> str:
        """What `Scores.head` says; teachers that share a head share its id."""
        ...

    @property
    def digest(self) -> str | None:
        """Of the weights, where a server names it."""
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Raises `opd.teachers.stream.StreamLost` for a stream it does not hold."""
        ...

    def close_stream(self, name: str) -> None:
        """The stream is over and may be forgotten. Never waits."""
        ...

    async def close(self) -> None:
        """Gives up connections."""
        ...


class TeacherPool:
    """Implements `opd.plugins.Models`.

    `routed` are the teachers that prompts are sent to; others are asked by name only, such as weak references. `aligners`
    has those that read with another tokenizer than the student; a step must align `min_byte_coverage` of its text. `read`
    gives what the student said in a turn from its sampled ids, to show it to these; single answers need none. `student` is
    for makers that ask about other prompts than the rollout's own.
    """

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        routed: Iterable[str] | None = None,
        aligners: Mapping[str, Aligner] | None = None,
        min_byte_coverage: float = 0.0,
        clock: Clock | None = None,
        read: Callable[[Array], Reply] | None = None,
        student: StudentSide | None = None,
    ) -> None:
        self.clock, self._read, self.student = clock or Clock(), read, student
        self.teachers, self.aligners, self.min_byte_coverage = teachers, aligners or {}, min_byte_coverage
        self.routed = tuple(teachers if routed is None else routed)

    def teacher_for(self, prompt: Prompt) -> str:
        """Routes by domain, see `opd.teachers.config.teacher_of`. Raises `UserError` for a domain without a teacher."""
        teacher = teacher_of(prompt.domain, self.routed)
        if teacher is None:
            known = ", ".join(sorted(self.routed))
            raise UserError(f"teachers: prompt {prompt.id} is of domain {prompt.domain!r}, but the teachers are {known}")
        return teacher

    def align(self, model: str, rollout: Rollout, turn: Turn) -> SpanMap | None:
        """See `opd.plugins.Models.align`."""
        aligner = self.aligners.get(model)
        if aligner is None:
            return None
        number = next(i for i, one in enumerate(rollout.turns) if one is turn)
        with self.clock("align"):
            return aligner.align(turn.sampled_ids, self._context_after(aligner, rollout.prompt, rollout.turns[:number]))

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        return await self.teachers[model].score(request)

    def same_bytes(self, model: str) -> Array | None:
        """See `opd.plugins.Models.same_bytes`."""
        aligner = self.aligners.get(model)
        return None if aligner is None else aligner.same_bytes

    def growing(self, model: str, prompt: Prompt, temperature: float) -> Scoring:
        """Scoring of a rollout while it grows."""
        aligner = self.aligners.get(model)
        if aligner is None:
            return OwnScoring(self.teachers[model], temperature)
        return AlignedScoring(self.teachers[model], aligner, partial(self._context_after, aligner, prompt), temperature)

    def _context_after(self, aligner: Aligner, prompt: Prompt, turns: Sequence[Turn]) -> Array:
        """[c] int32: the conversation up to the turn that follows these, as a teacher with another tokenizer sees it."""
        if not turns:
            return aligner.context(prompt)
        assert self._read is not None, "of a later turn the teacher must be shown the turns before it"
        exchanges = [(self._read(turn.sampled_ids), turn.observations) for turn in turns]
        return aligner.context(replace(prompt, messages=tuple(messages(prompt, exchanges))))

    def heads(self, device: torch.device) -> dict[str, OutputHead]:
        """Output heads of the teachers that read the student's own tokens, by the id that `Scores.head` carries.

        Each is fetched once. Not to be called while a loop runs.
        """
        own = [self.teachers[name] for name in (*self.routed, START) if name in self.teachers and name not in self.aligners]
        holders = {teacher.head_id: teacher for teacher in own}
        heads = {head_id: holder.head for head_id, holder in holders.items()}
        return {head_id: head.to(device) for head_id, head in heads.items()}

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the served teachers' weights by name: what a resumed run must find again."""
        return {name: teacher.digest for name, teacher in self.teachers.items() if teacher.digest is not None}

    def check_digests(self, before: Mapping[str, str]) -> None:
        """Raises `UserError` for a served teacher whose weights are not those of `before`."""
        for name, digest in self.digests.items():
            if before.get(name, digest) != digest:
                raise UserError(
                    f"teachers.{name}.url: the run began with weights {before[name]}, and {digest} are served now; "
                    "serve the same model again, or start another run"
                )

    async def close(self) -> None:
        """Gives up connections; they are made again when needed."""
        for teacher in self.teachers.values():
            await teacher.close()


class Tally:
    """`opd.plugins.Models` for the rollouts of one step, with a count of what was floored, aligned and written for them."""

    def __init__(self, pool: TeacherPool, seed: int = 0) -> None:
        """`seed`: of what is written in this step."""
        self.pool, self.seed = pool, seed
        self.counts: Counter[str] = Counter()  # floored log-probs, tokens written, groups dropped with their tokens
        self.noted: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # (value, weight) by the metric's name
        self.groups: dict[int, Sequence[Rollout]] = {}  # by slot, where rollouts of one prompt are compared
        self.coverage = Coverage()  # of all texts that were aligned, each once for each of the teachers' tokenizers
        self.first_failed: str | None = None  # the first of these texts of which less is aligned than must be
        self._spans: dict[tuple[int, int], tuple[Turn, SpanMap]] = {}  # the turn is kept, so that its id stays its own

    def teacher_for(self, prompt: Prompt) -> str:
        return self.pool.teacher_for(prompt)

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        scores = await self.pool.score(model, request)
        self.counts["floored_logps"] += scores.num_floored
        return scores

    def align(self, model: str, rollout: Rollout, turn: Turn) -> SpanMap | None:
        key = id(self.pool.aligners.get(model)), id(turn)
        if key not in self._spans:
            spans = self.pool.align(model, rollout, turn)
            if spans is None:
                return None
            self._spans[key] = turn, spans
            covered = Coverage.of(spans)
            self.coverage += covered
            if covered.byte_coverage < self.pool.min_byte_coverage and self.first_failed is None:
                text = self.pool.aligners[model].text_of(turn.sampled_ids)[:200]
                self.first_failed = f"prompt {rollout.prompt.id} ({covered.byte_coverage:.1%} with {model}): {text!r}"
        return self._spans[key][1]

    def same_bytes(self, model: str) -> Array | None:
        return self.pool.same_bytes(model)

    def context(self, prompt: Prompt, num_tokens: int) -> Array | None:
        """See `opd.plugins.Models.context`."""
        return self._student.context(prompt, num_tokens)

    def spell(self, token_ids: Array) -> list[bytes]:
        """See `opd.plugins.Models.spell`."""
        return self._student.spell(token_ids)

    def group(self, rollout: Rollout) -> Sequence[Rollout]:
        """See `opd.plugins.Models.group`."""
        return self.groups.get(rollout.slot, (rollout,))

    async def write(self, model: str, prompt: Prompt, number: int, max_new_tokens: int, temperature: float) -> str | None:
        """See `opd.plugins.Models.write`."""
        seed = slot_seed(self.seed, number)
        written = await self._student.write(model, prompt, seed, max_new_tokens, temperature)
        self.counts["written_tokens"] += 0 if written is None else written[1]
        return None if written is None else written[0]

    def note(self, name: str, value: float, weight: float = 1.0) -> None:
        """See `opd.plugins.Models.note`."""
        self.noted[name].append((float(value), weight))

    def drop(self, group: Sequence[Rollout]) -> None:
        """Notes that these rollouts of one prompt teach nothing, and others take their place."""
        self.counts["dropped_groups"] += 1
        self.counts["dropped_tokens"] += sum(rollout.num_tokens for rollout in group)

    @property
    def _student(self) -> StudentSide:
        assert self.pool.student is not None
        return self.pool.student
