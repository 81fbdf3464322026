"""Routing of prompts and requests to teachers."""

import asyncio

import numpy as np
import pytest
import torch

from opd.errors import UserError
from opd.models import OutputHead
from opd.records import Prompt, ScoreRequest, Scores
from opd.teachers.pool import TeacherPool


class Constant:
    """Answers with one number."""

    def __init__(self, value: float) -> None:
        self.head = OutputHead(torch.full((1, 1), value))
        self.value, self.num_floored = value, int(value)

    async def score(self, request: ScoreRequest) -> Scores:
        return Scores(logps=np.full(len(request.token_ids), self.value, np.float32))


def test_a_single_teacher_serves_every_domain():
    pool = TeacherPool({"maths": Constant(1)})
    assert pool.teacher_for(Prompt(id="1", domain="code")) == "maths"


def test_domains_choose_among_several():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2)})
    assert pool.teacher_for(Prompt(id="1", domain="code")) == "code"
    with pytest.raises(UserError, match="prompt 7 is of domain 'law', but the teachers are code, maths"):
        pool.teacher_for(Prompt(id="7", domain="law"))


def test_requests_go_to_the_teacher_named():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2)})
    request = ScoreRequest(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))
    scores = asyncio.run(pool.score("code", request))
    assert scores.logps is not None
    assert scores.logps.tolist() == [2, 2]


def test_heads_and_floors_of_all():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2)})
    assert {name: float(head.weight) for name, head in pool.heads.items()} == {"maths": 1, "code": 2}
    assert pool.num_floored == 3
