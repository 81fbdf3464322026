"""The frozen models of a run by name, behind the protocol that term makers use."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from opd.errors import UserError
from opd.models import OutputHead
from opd.records import Array, Prompt, ScoreRequest, Scores
from opd.teachers.stream import ScoreStream


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
    """Implements `opd.plugins.Models`."""

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self.teachers = teachers

    def teacher_for(self, prompt: Prompt) -> str:
        """Routes by domain; a single teacher serves every domain. Raises `UserError` for a domain without a teacher."""
        if len(self.teachers) == 1:
            return next(iter(self.teachers))
        if prompt.domain not in self.teachers:
            known = ", ".join(sorted(self.teachers))
            raise UserError(f"teachers: prompt {prompt.id} is of domain {prompt.domain!r}, but the teachers are {known}")
        return prompt.domain

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        return await self.teachers[model].score(request)

    def stream(self, model: str, context_ids: Array, temperature: float) -> ScoreStream:
        """Scoring of a rollout with this context [c] while it grows."""
        return ScoreStream(self.teachers[model], context_ids, temperature=temperature)

    def heads(self, device: torch.device) -> dict[str, OutputHead]:
        """Output heads by the id that `Scores.head` carries, each fetched once. Not to be called while a loop runs."""
        holders = {teacher.head_id: teacher for teacher in self.teachers.values()}
        heads = {head_id: holder.head for head_id, holder in holders.items()}
        return {head_id: replace(head, weight=head.weight.to(device)) for head_id, head in heads.items()}

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
    """`opd.plugins.Models` for the rollouts of one step, with a count of what was floored for them."""

    def __init__(self, pool: TeacherPool) -> None:
        self.pool, self.num_floored = pool, 0

    def teacher_for(self, prompt: Prompt) -> str:
        return self.pool.teacher_for(prompt)

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        scores = await self.pool.score(model, request)
        self.num_floored += scores.num_floored
        return scores
