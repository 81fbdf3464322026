"""The student's likely tokens beside the teacher's, against float64 over the whole vocabulary."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.config import BatchConfig, RunConfig
from opd.errors import UserError
from opd.records import Sampling, Scores
from opd.registry import TERM_MAKERS
from opd.strategies.overlap import Overlap, OverlapConfig, compared
from opd.strategies.reverse_kl import ReverseKLConfig
from opd.students.config import SamplingConfig
from opd.students.drawing import student_topk
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Tally, TeacherPool

TEMPERATURE, VOCAB = 0.7, 38
CPU = torch.device("cpu")


def logits_of(model, context_ids, token_ids):
    """[n, V] float64: what predicts each of the tokens."""
    ids = torch.from_numpy(np.concatenate([context_ids, token_ids])).long()[None]
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(context_ids) - 1 : -1, :VOCAB].double()


def expected(student, teacher, rollout, k):
    """[n, 4]: the figures of each sampled token by sets and sums, from the logits of both models."""
    rows = []
    for turn in rollout.turns:
        both = [logits_of(model, turn.context_ids, turn.sampled_ids) / TEMPERATURE for model in (student, teacher)]
        for p, q in zip(*(logits.softmax(-1).numpy() for logits in both)):
            mine, theirs = (set(np.argsort(-one)[:k].tolist()) for one in (p, q))
            inside = list(mine)
            parts = [(p[v], q[v]) for v in inside] + [(1 - p[inside].sum(), 1 - q[inside].sum())]
            kl = sum(a * np.log(a / b) for a, b in parts if a > 1e-12)
            shared = sorted(mine & theirs)
            rows.append([kl, len(shared) / k, p[shared].sum(), q[shared].sum()])
    return np.array(rows)


@pytest.fixture(scope="module")
def teacher(model_folder):
    model = HFModel("teachers.default.model", str(model_folder(1)), device=CPU, chunk_bytes=2**20)
    return HFTeacher("default", model, View(vocab=VOCAB))


@pytest.fixture(scope="module")
def student(micro_model):
    return micro_model(0)


def with_topk(rollout, student, k):
    """The rollout as the sampler would have given it; of turns that are reused as a whole nobody asked for more."""
    turns = []
    for turn in rollout.turns:
        logits = logits_of(student, turn.context_ids, turn.sampled_ids)
        ids, logps = student_topk(logits, Sampling(TEMPERATURE, num_topk=k))
        known = {"topk_ids": ids.numpy().astype(np.int32), "topk_logps": logps.float().numpy()}
        turns.append(turn if turn.num_reused == len(turn.sampled_ids) else replace(turn, **known))
    return replace(rollout, turns=tuple(turns))


def noted(rollout, teacher, **settings):
    """{name: mean over tokens}, and what the maker gives."""
    run = RunConfig(sampling=SamplingConfig(temperature=TEMPERATURE), batch=BatchConfig(prompts=8))
    tally = Tally(TeacherPool({"default": teacher}))
    terms = asyncio.run(Overlap(OverlapConfig(**settings), run).collect(rollout, tally))
    figures = {}
    for name, pairs in tally.noted.items():
        values, weights = np.array(pairs).T
        figures[name] = float((values * weights).sum() / weights.sum())
    return figures, terms


@pytest.mark.parametrize("k", [1, 3, 16, 38, 50])
def test_figures_are_those_of_the_whole_distributions(random_rollout, student, teacher, k):
    """With k the whole vocabulary the overlap is 1 and the divergence exact; beyond there is no more."""
    rollout = with_topk(random_rollout(3, (4, 9)), student, k + 2)  # another term wanted more
    figures, terms = noted(rollout, teacher, k=k)
    assert terms == []
    wanted = expected(student, teacher.model.model, rollout, min(k, VOCAB)).mean(0)
    names = ["student_topk_kl", "topk_overlap", "overlap_mass", "overlap_mass_teacher"]
    assert list(figures) == names
    assert list(figures.values()) == pytest.approx(wanted.tolist(), rel=2e-5, abs=2e-6)
    assert (figures["topk_overlap"] == 1.0) == (k >= VOCAB)


@pytest.mark.parametrize("rerender", [False, True])
def test_turns_reused_tokens_and_observations(random_episode, student, teacher, rerender):
    """Means over the tokens that were sampled now, whether their turns are one sequence or several."""
    rollout = with_topk(random_episode(5, 3, (4, 2), (3, 5), (6, 0), reused=1, rerender=rerender), student, 4)
    figures, _ = noted(rollout, teacher, k=4)
    wanted = expected(student, teacher.model.model, rollout, 4)[rollout.trainable].mean(0)
    assert list(figures.values()) == pytest.approx(wanted.tolist(), rel=2e-5, abs=2e-6)
    partly = replace(rollout, turns=(replace(rollout.turns[2], num_reused=2),))
    figures, _ = noted(partly, teacher, k=4)
    wanted = expected(student, teacher.model.model, partly, 4)[2:].mean(0)
    assert list(figures.values()) == pytest.approx(wanted.tolist(), rel=2e-5, abs=2e-6)


def test_a_rollout_without_a_new_token_counts_nothing(random_episode, student, teacher):
    reused = random_episode(5, 3, (4, 0), reused=1)
    assert noted(reused, teacher) == ({}, [])


def test_the_same_model_overlaps_wholly(random_rollout, teacher):
    rollout = with_topk(random_rollout(3, (4, 9)), teacher.model.model, 5)
    figures, _ = noted(rollout, teacher, k=5)
    assert figures["student_topk_kl"] == pytest.approx(0.0, abs=1e-6)
    assert figures["topk_overlap"] == 1.0
    assert figures["overlap_mass"] == pytest.approx(figures["overlap_mass_teacher"], rel=1e-5)


def test_absent_entries_of_an_answer_are_no_tokens():
    """-1 stands for a token that was mentioned before: the teacher's own among those asked about, and any repeated one."""
    student = np.log(np.array([[0.5, 0.25], [0.6, 0.6]]))
    ids = np.array([[4, 7, 9, -1], [3, -1, -1, 8]])
    logps = np.log(np.array([[0.4, 0.1, 0.3, 1.0], [0.2, 1.0, 1.0, 0.7]]))
    found = compared(student, Scores(topk_ids=ids, topk_logps=logps), np.array([0, 1]))
    assert found["topk_overlap"].tolist() == [0.5, 0.5]
    assert found["overlap_mass"] == pytest.approx([0.5, 0.6])
    assert found["overlap_mass_teacher"] == pytest.approx([0.4, 0.2])
    first = 0.5 * np.log(0.5 / 0.4) + 0.25 * np.log(0.25 / 0.1) + 0.25 * np.log(0.25 / 0.5)
    assert found["student_topk_kl"] == pytest.approx([first, 0.6 * np.log(0.6 / 0.2) + 0.4 * np.log(0.4 / 0.8)])


@pytest.mark.parametrize(("num", "slots"), [(0, 8), (3, 3), (8, 8), (99, 8)])
def test_rollouts_are_spread_over_the_slots(random_rollout, student, teacher, num, slots):
    rollout = with_topk(random_rollout(3, (4, 5)), student, 4)
    looked = [slot for slot in range(8) if noted(replace(rollout, slot=slot), teacher, k=4, num_rollouts=num)[0]]
    assert len(looked) == slots
    assert num != 3 or looked == [0, 2, 5]


@pytest.mark.parametrize(
    ("settings", "others", "said"),
    [
        ({"k": 0}, True, r"terms\.overlap\.k is 0: it must be at least 1"),
        ({"num_rollouts": -1}, True, r"terms\.overlap\.num_rollouts is -1"),
        ({}, False, r"^terms: overlap only measures, so nothing would be learned; name another"),
    ],
)
def test_refusals(settings, others, said):
    terms = {"overlap": OverlapConfig(**settings), **({"reverse_kl": ReverseKLConfig()} if others else {})}
    with pytest.raises(UserError, match=said):
        TERM_MAKERS.load("overlap", "terms").check(terms["overlap"], RunConfig(terms=terms))
