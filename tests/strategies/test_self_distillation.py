"""Self-distillation with the answer: what the start is asked, and that the loss is the divergence it should be."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from opd.config import RunConfig
from opd.contexts import Contexts
from opd.envs.config import EnvironmentConfig
from opd.errors import UserError
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.objective.learner import Learner
from opd.records import Array, Hidden, Prompt, Rollout, ScoreRequest, Scores, TopK, Turn
from opd.strategies.self_distillation import SelfDistillation, SelfDistillationConfig
from opd.student_side import StudentSide
from opd.students.config import SamplingConfig
from opd.teachers.config import START
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Tally, TeacherPool

TEMPERATURE = 0.7
RUN = RunConfig(sampling=SamplingConfig(temperature=TEMPERATURE), prompts={"type": "dataset"})
CPU = torch.device("cpu")
TEMPLATE = "{prompt}z{problem}z{answer}"
PROMPT = Prompt(
    id="3",
    messages=({"role": "user", "content": "abbox"},),
    problem="ab",
    answer="6",
)


class Recording:
    """A start that notes what it is asked; a prompt's context is its last message, a character a token."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.requests: list[tuple[str, ScoreRequest]] = []

    def context(self, prompt: Prompt, num_tokens: int) -> Array | None:
        ids = np.frombuffer(str(prompt.messages[-1]["content"]).encode(), np.uint8).astype(np.int32)
        return ids if len(ids) + num_tokens <= self.room else None

    def align(self, model: str, rollout: Rollout, turn: Turn) -> None:
        """It reads the student's own tokens."""

    def note(self, name: str, value: float) -> None:
        """Metrics are the engine's."""

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        self.requests.append((model, request))
        ids = request.token_ids.astype(np.float32)
        if request.hidden:
            return Scores(hidden=torch.from_numpy(ids)[:, None], head=model)
        if request.k or request.ids is not None:
            return Scores(ids, request.token_ids[:, None], -ids[:, None], ids / 100)
        return Scores(ids)


@pytest.fixture
def rollout(random_rollout) -> Rollout:
    plain: Rollout = random_rollout(0, (3, 6), num_reused=2)
    (turn,) = plain.turns
    likely = np.arange(6 * 5).reshape(6, 5).astype(np.int32)
    return replace(plain, prompt=PROMPT, turns=(replace(turn, topk_ids=likely),))


def collect(rollout: Rollout, room: int = 100, **settings):
    """(what was asked, the terms)."""
    models: Any = Recording(room)
    maker = SelfDistillation(SelfDistillationConfig(template=TEMPLATE, **settings), RUN)
    return models.requests, asyncio.run(maker.collect(rollout, models))


FORMS = [
    {"form": "sampled", "divergence": "reverse_kl"},
    {"form": "topk", "source": "student", "k": 5},
    {"form": "topk", "source": "union", "k": 5},
    {},
]


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_the_start_is_shown_the_answer_and_the_students_own_tokens(rollout, settings):
    ((model, request),), (term,) = collect(rollout, coef=0.5, **settings)
    assert model == START
    (turn,) = rollout.turns
    assert bytes(request.context_ids[:-2].tolist()) == b"abboxzabz6"
    assert request.context_ids[-2:].tolist() == turn.sampled_ids[:2].tolist()  # what is reused is context
    assert request.token_ids.tolist() == turn.sampled_ids[2:].tolist()
    assert term.mask.tolist() == [False] * 2 + [True] * 4
    assert term.coef == 0.5
    assert (request.hidden, request.k) == (not settings, 5 if settings.get("source") == "union" else 0)
    if settings.get("form") == "topk":
        assert request.ids is not None
        assert request.ids.tolist() == turn.topk_ids[2:].tolist()
        assert isinstance(term.inputs["target"], TopK)
        assert term.inputs["divergence"] == "jsd"
    elif settings:
        assert term.inputs["reward"].tolist() == [0.0, 0.0, *turn.sampled_ids[2:].tolist()]
        assert (term.kind, term.inputs["self_coef"]) == ("policy_gradient", 1.0)
    else:
        target = term.inputs["target"]
        assert isinstance(target, Hidden)
        assert (target.head, term.inputs["divergence"], term.inputs["beta"]) == (START, "jsd", 0.5)


def test_of_several_answers_the_first_is_shown(rollout):
    several = replace(rollout, prompt=replace(PROMPT, answer=("5", "6")))
    ((_, request),), _ = collect(several)
    assert bytes(request.context_ids[:-2].tolist()) == b"abboxzabz5"


def test_a_prompt_without_an_answer_is_refused_by_name(rollout):
    with pytest.raises(UserError, match=r"^prompts\.columns\.answer: prompt 3 has no answer for terms\.self_dis"):
        collect(replace(rollout, prompt=replace(PROMPT, answer=None)))


def test_where_the_answer_leaves_no_room_there_is_no_term(rollout):
    assert collect(rollout, room=16)[1]
    assert collect(rollout, room=15) == ([], [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "sampled"}, r"divergence: jsd needs form topk or full"),
        ({"form": "topk", "k": -1}, r"k is -1: it must be 0 "),
        ({"beta": 0.0}, r"beta is 0.0: it must lie between 0 and 1"),
        ({"importance": "truncated"}, r"importance: has no effect with form full"),
        ({"form": "sampled", "divergence": "reverse_kl", "coverage": "strict_1to1"}, r"coverage: has no effect"),
        ({"template": "{prompt}"}, r"template: it must contain \{answer\}"),
        ({"template": "{prompt} {anwser} {answer}"}, r"template: \{anwser\} stands for nothing; allowed is \{prompt\}, "),
        ({"template": "{answer}"}, r"template: it must contain \{prompt\} or \{problem\}"),
    ],
)
def test_combinations_that_cannot_work(settings, message):
    with pytest.raises(UserError, match=rf"terms\.self_distillation\.{message}"):
        SelfDistillation.check(SelfDistillationConfig(**settings), RUN)


def test_the_defaults_work_and_episodes_of_several_turns_do_not():
    SelfDistillation.check(SelfDistillationConfig(), RUN)
    single, several = (
        replace(RUN, prompts={"type": "environment", "config": EnvironmentConfig(name)})
        for name in ("reasoning_gym", "calculator")
    )
    SelfDistillation.check(SelfDistillationConfig(), single)
    SelfDistillation.check(SelfDistillationConfig(template=r"{prompt} {answer} \boxed{x} \frac{1}{2}"), RUN)
    with pytest.raises(UserError, match=r"terms\.self_distillation: prompts open episodes of several turns"):
        SelfDistillation.check(SelfDistillationConfig(), several)


class Exact:
    """The divergences of a student from its start that knows the answer, token by token in float64, by autograd."""

    def __init__(self, start: Any, student: Any, told: list[int], rollout: Rollout, vocab: int) -> None:
        (turn,) = rollout.turns
        self.student, self.ids = student, turn.sampled_ids.tolist()
        with torch.no_grad():
            self.log_p = self._logps(start, told, vocab)
        self.log_q = self._logps(student, turn.context_ids.tolist(), vocab)

    def _logps(self, model: Any, context: list[int], vocab: int) -> Tensor:
        """[n, V] at the sampled tokens."""
        logits = model(torch.tensor([[*context, *self.ids]])).logits[0, len(context) - 1 : -1, :vocab]
        return (logits / TEMPERATURE).log_softmax(-1)

    def loss(self, divergence: str) -> Tensor:
        p, q = self.log_p.exp(), self.log_q.exp()
        if divergence == "reverse_kl":
            rows = (q * (self.log_q - self.log_p)).sum(-1)
        elif divergence == "forward_kl":
            rows = (p * (self.log_p - self.log_q)).sum(-1)
        else:
            log_m = ((p + q) / 2).log()
            rows = ((p * (self.log_p - log_m)).sum(-1) + (q * (self.log_q - log_m)).sum(-1)) / 2
        return rows.mean()

    def sampled_loss(self) -> Tensor:
        """Minus the advantage times the token's log-prob, whose gradient is that of the policy gradient."""
        own, theirs = (logps[torch.arange(len(self.ids)), self.ids] for logps in (self.log_q, self.log_p))
        return -((theirs - own).detach() * own).mean()


@pytest.fixture(scope="module")
def start(model_folder):
    return model_folder(0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"divergence": "forward_kl"},
        {"divergence": "reverse_kl"},
        {"form": "topk", "source": "teacher", "k": 1000},
        {"form": "topk", "source": "student", "k": 1000, "divergence": "forward_kl"},
        {"form": "sampled", "divergence": "reverse_kl"},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_divergence_in_float64(start, micro_model, micro_tokenizer, vocab, settings):
    contexts = Contexts(micro_tokenizer, 64, 8, (2,))
    pool = TeacherPool(
        {START: HFTeacher(START, HFModel("student.model", str(start), device=CPU, chunk_bytes=2**20), View(vocab))},
        {},
        student=StudentSide(contexts, {}),
    )
    student = micro_model(3)
    context, ids = contexts(PROMPT), np.array([9, 14, 7, 30, 2], np.int32)
    assert context is not None
    likely = np.broadcast_to(np.arange(vocab, dtype=np.int32), (len(ids), vocab))
    turn = Turn(context, ids, np.zeros(len(ids), np.float32), "eos", topk_ids=likely)
    rollout = Rollout(PROMPT, 0, (turn,))
    maker = SelfDistillation(SelfDistillationConfig(template=TEMPLATE, **settings), RUN)
    terms = asyncio.run(maker.collect(rollout, Tally(pool)))
    told = contexts(replace(PROMPT, messages=({"role": "user", "content": "abboxzabz6"},)))
    assert told is not None
    exact = Exact(micro_model(0).double(), micro_model(3).double(), told.tolist(), rollout, vocab)
    loss = exact.sampled_loss() if maker.config.form == "sampled" else exact.loss(maker.config.divergence)
    loss.backward()
    loss = loss.detach()
    norm = torch.cat([p.grad.flatten() for p in exact.student.parameters()]).norm()
    learner = Learner(
        student,
        ObjectiveConfig(max_logits_mib=1),
        OptimizerConfig(max_grad_norm=0.0),
        accelerator=Accelerator(cpu=True),
        num_steps=1,
        heads=pool.heads(CPU),
        vocab=vocab,
        temperature=TEMPERATURE,
    )
    found = learner.update([(rollout, terms)])
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    if maker.config.form == "sampled":
        advantage = (exact.log_p - exact.log_q).detach()[torch.arange(len(ids)), ids.tolist()].mean()
        assert found["advantage"] == pytest.approx(float(advantage), rel=1e-4)
    else:
        assert found["loss"] == pytest.approx(float(loss), rel=1e-4)
        assert found[maker.config.divergence] == pytest.approx(float(loss), rel=1e-4)
