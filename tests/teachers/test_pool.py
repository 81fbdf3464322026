"""Routing of prompts and requests to teachers."""

import asyncio

import numpy as np
import pytest
import torch

from opd.errors import UserError
from opd.models import OutputHead
from opd.records import Prompt, ScoreRequest, Scores
from opd.teachers.pool import Tally, TeacherPool


class Constant:
    """Answers with one number."""

    def __init__(self, value: float) -> None:
        self.head, self.head_id = OutputHead(torch.full((1, 1), value)), f"head {value:g}"
        self.value, self.digest, self.closed = value, f"{value:g}", False

    async def score(self, request: ScoreRequest) -> Scores:
        logps = np.full(len(request.token_ids), self.value, np.float32)
        return Scores(logps=logps, num_floored=int(self.value))

    def close_stream(self, name: str) -> None: ...

    async def close(self) -> None:
        self.closed = True


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


def test_heads_by_their_ids():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2), "more code": Constant(2)})
    assert {name: float(head.weight) for name, head in pool.heads(torch.device("cpu")).items()} == {"head 1": 1, "head 2": 2}


def test_what_was_floored_is_counted_by_step():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2)})
    request = ScoreRequest(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))
    first, second = Tally(pool), Tally(pool)

    async def ask():
        await asyncio.gather(first.score("code", request), second.score("maths", request), first.score("maths", request))

    asyncio.run(ask())
    assert (first.num_floored, second.num_floored) == (3, 1)
    assert first.teacher_for(Prompt(id="1", domain="code")) == "code"


def test_other_weights_than_before_are_refused():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2)})
    assert pool.digests == {"maths": "1", "code": "2"}
    pool.check_digests({"maths": "1"})
    with pytest.raises(UserError, match=r"teachers\.code\.url: the run began with weights 9, and 2 are served now"):
        pool.check_digests({"maths": "1", "code": "9"})


def test_all_are_closed():
    teachers = {"maths": Constant(1), "code": Constant(2)}
    asyncio.run(TeacherPool(teachers).close())
    assert all(teacher.closed for teacher in teachers.values())
