"""The frozen models of a run by name, behind the protocol that term makers use."""

from collections.abc import Mapping
from typing import Protocol

from opd.errors import UserError
from opd.models import OutputHead
from opd.records import Prompt, ScoreRequest, Scores


class Teacher(Protocol):
    """A frozen model, here or elsewhere."""

    head: OutputHead
    num_floored: int  # log-probs raised to the floor so far

    async def score(self, request: ScoreRequest) -> Scores: ...


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

    @property
    def heads(self) -> dict[str, OutputHead]:
        """Output heads by the name that `Scores.head` carries."""
        return {name: teacher.head for name, teacher in self.teachers.items()}

    @property
    def num_floored(self) -> int:
        return sum(teacher.num_floored for teacher in self.teachers.values())
