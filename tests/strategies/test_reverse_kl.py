"""Plain on-policy distillation: what it asks, the terms it makes, and that student == teacher has nothing to learn."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from opd.config import RunConfig
from opd.errors import UserError
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.objective.learner import Learner
from opd.records import Hidden, Prompt, Rollout, SampleRequest, Sampling, ScoreRequest, Scores, TopK, Turn
from opd.strategies.reverse_kl import ReverseKL, ReverseKLConfig
from opd.students.config import SamplingConfig
from opd.students.hf_sampler import HFSampler
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Tally, TeacherPool

RUN = RunConfig(sampling=SamplingConfig(temperature=0.7))
CPU = torch.device("cpu")


class Recording:
    """A frozen model that notes what it is asked and answers with the token ids."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ScoreRequest]] = []

    def teacher_for(self, prompt: Prompt) -> str:
        return prompt.domain

    def align(self, model: str, rollout: Rollout, turn: Turn) -> None:
        """It reads the student's own tokens."""

    def same_bytes(self, model: str) -> None:
        """The same ones."""

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        self.requests.append((model, request))
        await asyncio.sleep(0.01 / len(self.requests))  # answers come in another order
        ids = request.token_ids.astype(np.float32)
        if request.hidden:
            return Scores(hidden=torch.from_numpy(ids)[:, None], head=model)
        if request.k or request.ids is not None:
            return Scores(ids, request.token_ids[:, None], -ids[:, None], ids / 100)
        return Scores(ids)


@pytest.fixture
def rollout(random_rollout):
    plain: Rollout = random_rollout(0, (3, 4), (9, 2), num_reused=1)
    turns = tuple(replace(t, topk_ids=np.full((len(t.sampled_ids), 2), 7, np.int32)) for t in plain.turns)
    return replace(plain, prompt=Prompt(id="0", domain="maths"), turns=turns)


def collect(rollout: Rollout, **settings):
    """(what was asked, the single term)."""
    models: Any = Recording()
    maker = ReverseKL(ReverseKLConfig(**settings), RUN)
    (term,) = asyncio.run(maker.collect(rollout, models))
    assert term.mask.tolist() == [False, True, True, True, False, True]
    assert [model for model, _ in models.requests] == ["maths"] * 2
    for turn, (_, request) in zip(rollout.turns, models.requests):  # what is reused is context
        assert request.context_ids.tolist() == [*turn.context_ids, turn.sampled_ids[0]]
        assert request.token_ids.tolist() == turn.sampled_ids[1:].tolist()
        assert request.temperature == 0.7 or request.hidden
    return [request for _, request in models.requests], term


def sampled(rollout: Rollout) -> list[int]:
    """The tokens, 0 for reused ones."""
    return (np.concatenate([turn.sampled_ids for turn in rollout.turns]) * rollout.trainable).tolist()


def test_sampled(rollout):
    requests, term = collect(rollout, form="sampled", coef=0.5, advantage_clip=5.0)
    assert all(not (r.k or r.hidden) and r.ids is None for r in requests)
    assert (term.kind, term.coef) == ("policy_gradient", 0.5)
    assert term.inputs["reward"].tolist() == sampled(rollout)
    settings = {"self_coef": 1.0, "advantage_clip": 5.0, "ratio_clip": 0.2, "importance_cap": None}
    assert {name: term.inputs[name] for name in settings} == settings
    _, term = collect(rollout, form="sampled", importance="truncated", importance_cap=3.0)
    assert term.inputs["importance_cap"] == 3.0


@pytest.mark.parametrize(("source", "own", "given"), [("student", 0, True), ("teacher", 16, False), ("union", 16, True)])
def test_topk(rollout, source, own, given):
    requests, term = collect(rollout, form="topk", source=source, tail="truncate", divergence="jsd", beta=0.3)
    (narrow, _), _ = collect(rollout, form="topk", source=source, k=1)
    assert narrow.ids is None or narrow.ids.shape[1] == 1  # another term may have asked for more
    for turn, request in zip(rollout.turns, requests):
        assert request.k == own
        assert request.ids is None or (request.ids == turn.topk_ids[1:]).all()
        assert (request.ids is not None) == given
        assert not request.hidden
    target = term.inputs["target"]
    assert isinstance(target, TopK)
    assert target.ids[:, 0].tolist() == (-target.logps[:, 0]).tolist() == sampled(rollout)
    assert target.tail.tolist() == pytest.approx([token / 100 for token in sampled(rollout)])
    assert (term.kind, term.inputs["tail"], term.inputs["divergence"], term.inputs["beta"]) == (
        *("divergence", "truncate", "jsd"),
        0.3,
    )
    maker = ReverseKL(ReverseKLConfig(form="topk", source=source, k=5), RUN)
    assert maker.num_student_topk == (5 if given else 0)


def test_full(rollout):
    requests, term = collect(rollout)
    assert all(request.hidden and not request.k and request.ids is None for request in requests)
    target = term.inputs["target"]
    assert isinstance(target, Hidden)
    assert target.head == "maths"
    assert torch.cat(target.states)[:, 0].tolist() == np.array(sampled(rollout))[rollout.trainable].tolist()
    assert ReverseKL(ReverseKLConfig(), RUN).num_student_topk == 0


SIZES = [(3, 2), (2, 4), (4, 0)]


def with_topk(rollout: Rollout, k: int, vocab: int) -> Rollout:
    """The student's likely tokens of each turn that is not reused."""
    rng = np.random.default_rng(rollout.slot)

    def likely(turn: Turn) -> Turn:
        ids = [rng.permutation(vocab)[:k] for _ in turn.sampled_ids]
        return replace(turn, topk_ids=np.array(ids, np.int32)) if turn.trainable.any() else turn

    return replace(rollout, turns=tuple(map(likely, rollout.turns)))


def test_an_episode_is_asked_about_once(random_episode, vocab):
    rollout = with_topk(random_episode(0, 6, *SIZES, reused=1), 5, vocab)
    models: Any = Recording()
    maker = ReverseKL(ReverseKLConfig(form="topk", k=3), RUN)
    (term,) = asyncio.run(maker.collect(rollout, models))
    ((_, request),) = models.requests
    first, second, third = rollout.turns
    assert request.context_ids.tolist() == second.context_ids.tolist()
    assert [*request.context_ids, *request.token_ids] == [*third.context_ids, *third.sampled_ids]
    assert request.ids is not None
    likely = [ids[:, :3].tolist() for ids in (second.topk_ids, third.topk_ids) if ids is not None]
    observed = [[token] * 3 for token in request.token_ids[2:6].tolist()]  # no more is asked than what is answered anyway
    assert request.ids.tolist() == [*likely[0], *observed, *likely[1]]
    assert term.inputs["target"].tail.tolist() == pytest.approx([token / 100 for token in sampled(rollout)])
    assert term.mask.tolist() == [False] * len(first.sampled_ids) + [True] * 6


@pytest.fixture(scope="module")
def exact(folders, vocab):
    """A teacher in float64."""
    model = HFModel("teachers.t.model", str(folders[1]), dtype="float64", device=CPU, chunk_bytes=2**20)
    return TeacherPool({"t": HFTeacher("t", model, View(vocab))})


@pytest.mark.parametrize("settings", [{}, {"reused": 2}, {"rerender": True}, {"rerender": True, "reused": 1}], ids=str)
@pytest.mark.parametrize("source", ["student", "teacher", "union"])
def test_the_topk_of_an_episode_is_that_of_its_turns(exact, random_episode, vocab, source, settings):
    maker = ReverseKL(ReverseKLConfig(form="topk", k=4, source=source), RUN)
    rollout = with_topk(random_episode(0, 6, *SIZES, **settings), 4, vocab)
    alone = [replace(rollout, turns=(turn,)) for turn in rollout.turns if turn.trainable.any()]
    whole, *parts = (asyncio.run(maker.collect(one, exact))[0].inputs["target"] for one in (rollout, *alone))
    for name in ("ids", "logps", "tail"):
        found, expected = getattr(whole, name), np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_allclose(found[rollout.trainable], expected, atol=1e-6)
        assert len(found) == rollout.num_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "sampled", "divergence": "jsd"}, r"divergence: jsd needs form topk or full"),
        ({"form": "full", "importance": "truncated"}, r"importance: has no effect with form full"),
        ({"form": "topk", "span_reduce": "mean"}, r"span_reduce: has no effect with form topk"),
        ({"form": "topk", "k": -1}, r"k is -1: it must be 0 \(the sampled token alone\) or more"),
        ({"form": "topk", "k": 0, "divergence": "jsd"}, r"divergence: jsd needs form topk or full"),
        ({"form": "topk", "k": 1, "tail": "renormalise"}, r"one renormalised token has divergence 0 everywhere"),
        ({"beta": 1.0}, r"beta is 1.0: it must lie between 0 and 1"),
    ],
)
def test_combinations_that_cannot_work(settings, message):
    with pytest.raises(UserError, match=rf"terms\.reverse_kl\..*{message}"):
        ReverseKL.check(ReverseKLConfig(**settings), RUN)


def test_sampled_tokens_need_the_sampling_temperature():
    other = replace(RUN, objective=ObjectiveConfig(temperature=1.0))
    with pytest.raises(UserError, match=r"needs objective\.temperature to be the sampling"):
        ReverseKL.check(ReverseKLConfig(form="sampled"), other)
    ReverseKL.check(ReverseKLConfig(form="topk"), other)
    ReverseKL.check(ReverseKLConfig(form="sampled"), RUN)


@pytest.fixture(scope="module")
def folders(model_folder):
    return model_folder(0), model_folder(1)


@pytest.fixture
def figures(folders, micro_model, vocab):
    """`figures(temperature, perturb, **settings)`: metrics of an update of the micro student by a copy of it."""

    def run(temperature: float, perturb: float = 0.0, **settings) -> dict[str, float]:
        config = replace(RUN, sampling=SamplingConfig(temperature=temperature))
        maker = ReverseKL(ReverseKLConfig(**settings), config)
        student = micro_model(0)
        model = HFModel("teachers.t.model", str(folders[0]), device=CPU, chunk_bytes=2**20)
        teacher = HFTeacher("t", model, View(vocab))
        with torch.no_grad():
            noise = torch.Generator().manual_seed(0)
            teacher.head.weight.add_(perturb * torch.randn(teacher.head.weight.shape, generator=noise))  # type: ignore
        pool = TeacherPool({"t": teacher})
        sampler = HFSampler(student, vocab, [2])
        sampling = Sampling(temperature, num_topk=maker.num_student_topk)

        async def one(seed: int):
            context = np.arange(3, 6 + 5 * seed, dtype=np.int32)
            request = SampleRequest(context, seed, 10, sampling)
            turn = Turn.of(context, [chunk async for chunk in sampler.generate(request)])
            rollout = Rollout(Prompt(id=str(seed)), seed, (turn,))
            return rollout, await maker.collect(rollout, Tally(pool))

        async def all_of_them():
            return await asyncio.gather(*(one(seed) for seed in range(6)))

        learner = Learner(
            student,
            ObjectiveConfig(max_logits_mib=1),
            OptimizerConfig(),
            accelerator=Accelerator(cpu=True),
            num_steps=1,
            heads=pool.heads(CPU),
            vocab=vocab,
            temperature=temperature,
        )
        return learner.update(asyncio.run(all_of_them()))

    return run


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(figures, temperature, divergence):
    found = figures(temperature, divergence=divergence)
    assert abs(found["loss"]) <= 1e-7
    assert found["grad_norm"] < 1e-5
    for source in ("student", "teacher", "union"):
        for tail in ("tail", "renormalise", "truncate"):
            found = figures(temperature, form="topk", k=1000, source=source, tail=tail, divergence=divergence)
            assert abs(found["loss"]) <= 1e-7
            assert found["grad_norm"] < 1e-4


def test_a_sampled_token_of_an_equal_teacher_has_no_advantage(figures):
    found = figures(0.7, form="sampled")
    assert abs(found["advantage"]) < 1e-6
    assert found["mismatch"] < 1e-5
    assert found["grad_norm"] < 1e-5


@pytest.mark.parametrize("form", ["sampled", "topk", "full"])
def test_the_gradient_depends_on_the_teacher(figures, form):
    small, large = (figures(1.0, perturb, form=form)["grad_norm"] for perturb in (0.01, 0.1))
    assert large > 3 * small > 1e-3


def test_all_student_tokens_are_the_full_divergence(figures):
    full = figures(0.7, 0.1)
    for source in ("student", "teacher", "union"):
        topk = figures(0.7, 0.1, form="topk", k=1000, source=source)
        assert topk["loss"] == pytest.approx(full["loss"], rel=1e-4)
        assert topk["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-4)


def test_the_direction_of_the_divergence(figures):
    reverse, forward = (figures(1.0, 0.3, divergence=d) for d in ("reverse_kl", "forward_kl"))
    assert abs(reverse["loss"] - forward["loss"]) > 0.05 * reverse["loss"]
    sampled = figures(1.0, 0.3, form="sampled")["reverse_kl_sampled"]
    assert abs(sampled - reverse["loss"]) < abs(sampled - forward["loss"])
