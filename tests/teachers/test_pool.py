"""Routing of prompts and requests to teachers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.alignment.aligner import Aligner
from opd.episodes import Reply
from opd.errors import UserError
from opd.flight import Flight
from opd.kernels.head import OutputHead
from opd.records import Prompt, Rollout, ScoreRequest, Scores, Turn
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


def test_a_single_teacher_called_default_serves_every_domain():
    pool = TeacherPool({"default": Constant(1)})
    assert {pool.teacher_for(Prompt(id="1", domain=domain)) for domain in ("default", "code")} == {"default"}


def test_a_single_teacher_of_another_name_serves_its_own_domain_and_prompts_without_one():
    pool = TeacherPool({"maths": Constant(1)})
    assert {pool.teacher_for(prompt) for prompt in (Prompt("1"), Prompt("2", domain="maths"))} == {"maths"}
    with pytest.raises(UserError, match="prompt 3 is of domain 'code', but the teachers are maths"):
        pool.teacher_for(Prompt("3", domain="code"))


def test_among_several_teachers_default_is_one_like_the_others():
    pool = TeacherPool({"default": Constant(1), "maths": Constant(2)})
    assert [pool.teacher_for(prompt) for prompt in (Prompt("1"), Prompt("2", domain="maths"))] == ["default", "maths"]
    with pytest.raises(UserError, match="'code'"):
        pool.teacher_for(Prompt("3", domain="code"))


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
    assert {name: float(head.weight) for name, head in pool.heads(torch.device("cpu")).items()} == {"head 1": 1, "head 2": 2}  # type: ignore


def test_what_was_floored_is_counted_by_step():
    pool = TeacherPool({"maths": Constant(1), "code": Constant(2)})
    request = ScoreRequest(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))
    first, second = Tally(pool), Tally(pool)

    async def ask():
        await asyncio.gather(first.score("code", request), second.score("maths", request), first.score("maths", request))

    asyncio.run(ask())
    assert (first.counts["floored_logps"], second.counts["floored_logps"]) == (3, 1)
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


@pytest.fixture
def mixed(byte_tokenizer):
    """A student's tokenizer, and a pool of one teacher that reads as it does and two, strong and weak, that do not."""
    student, other = byte_tokenizer("ab"), byte_tokenizer("bc")
    aligner = Aligner(student, other, student_eos=(student.eos_token_id,), teacher_eos=(other.eos_token_id,))
    teachers = {"own": Constant(1), "strong": Constant(2), "strong.weak_reference": Constant(3)}
    aligners = {"strong": aligner, "strong.weak_reference": aligner}
    return student, TeacherPool(teachers, ["own", "strong"], aligners, min_byte_coverage=0.9)


def rollout_of(student, text: str) -> Rollout:
    ids = np.array([*student.encode(text, add_special_tokens=False), student.eos_token_id], np.int32)
    turn = Turn(np.array([1], np.int32), ids, np.zeros(len(ids), np.float32), "eos")
    return Rollout(Prompt(id="7", messages=({"role": "user", "content": "ab"},)), 0, (turn,))


def test_weak_references_are_asked_by_name_alone(mixed):
    _, pool = mixed
    assert pool.teacher_for(Prompt(id="1", domain="strong")) == "strong"
    with pytest.raises(UserError, match="the teachers are own, strong"):
        pool.teacher_for(Prompt(id="1", domain="strong.weak_reference"))
    assert list(pool.heads(torch.device("cpu"))) == ["head 1"]  # hidden states of another vocabulary are never compared


def align(models, name: str, rollout: Rollout):
    return models.align(name, rollout, rollout.turns[0])


def test_a_text_is_aligned_and_counted_once_for_models_that_read_alike(mixed):
    student, pool = mixed
    rollout, tally = rollout_of(student, "abc"), Tally(pool)
    spans = align(tally, "strong", rollout)
    assert spans is not None
    assert align(tally, "strong.weak_reference", rollout) is spans
    assert align(tally, "own", rollout) is None
    assert (tally.coverage.num_bytes, tally.coverage.units) == (3, 2)
    assert align(tally, "strong", rollout_of(student, "abc")) is not spans
    assert tally.coverage.num_bytes == 6
    assert pool.same_bytes("own") is None
    assert tally.same_bytes("strong") is pool.aligners["strong"].same_bytes


def test_of_a_later_turn_the_teacher_is_shown_the_turns_before_it(mixed):
    student, pool = mixed
    first, second = (rollout_of(student, text).turns[0] for text in ("abc", "bcd"))
    first = replace(first, observations=({"role": "user", "content": "d"}, {"role": "user", "content": "a0"}))
    prompt = Prompt(id="7", messages=({"role": "user", "content": "ab"},))
    rollout = Rollout(prompt, 0, (first, second))
    with pytest.raises(AssertionError, match="the turns before it"):
        pool.align("strong", rollout, second)
    assert pool.align("own", rollout, second) is None

    def read(ids) -> Reply:
        return Reply(student.decode(ids, skip_special_tokens=True))

    reading, aligner = TeacherPool(pool.teachers, aligners=pool.aligners, read=read), pool.aligners["strong"]
    spans = Tally(reading).align("strong", rollout, second)
    assert spans is not None
    shown = (*prompt.messages, {"role": "assistant", "content": "abc"}, *first.observations)
    assert spans.context_ids.tolist() == aligner.context(replace(prompt, messages=shown)).tolist()
    assert spans.token_ids.tolist() == aligner.align(second.sampled_ids, spans.context_ids).token_ids.tolist()
    assert reading.align("strong", rollout, first).context_ids.tolist() == aligner.context(prompt).tolist()  # type: ignore


def test_the_first_text_that_cannot_be_aligned_is_named(mixed):
    student, pool = mixed
    tally = Tally(pool)
    align(tally, "strong", rollout_of(student, "abc"))
    assert tally.first_failed is None
    short = Aligner(student, student, student_eos=(2,), teacher_eos=(2,), max_context=6)
    pool.aligners["strong.weak_reference"] = short
    for text in ("dddddddd", "cccccccc"):
        align(tally, "strong.weak_reference", rollout_of(student, text))
    assert tally.first_failed == "prompt 7 (25.0% with strong.weak_reference): 'dddddddd'"
    assert tally.coverage.byte_coverage == pytest.approx(7 / 19)


def test_what_term_makers_note_becomes_a_mean_over_the_step():
    """Exact, so that the order does not matter."""

    async def landed():
        flight = Flight(0, [], [], tally)
        return await flight.landed()

    tally = Tally(TeacherPool({}))
    for value in (True, 1e16, -1.0, -1e16):
        tally.note("share", value)
    tally.note("score", -0.5)
    tally.note("tokens", 1.0, 3)
    tally.note("tokens", 5.0)
    assert asyncio.run(landed()).figures == {"score": -0.5, "share": 0.0, "tokens": 2.0}
