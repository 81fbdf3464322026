"""Negative self-distillation: its gate, what it asks the student's start, the terms it makes, and what it refuses."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opd.config import build_config
from opd.contexts import Contexts
from opd.errors import UserError
from opd.passages import passages
from opd.records import Hidden, Prompt, Rollout, ScoreRequest, Scores, Term, TopK
from opd.strategies.conditions import ConditionConfig
from opd.strategies.negative import Negative, NegativeConfig, gate_of
from opd.strategies.reprompted import seen_under
from opd.student_side import StudentSide
from opd.teachers.config import START
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Tally, TeacherPool

FIXED = {"source": "fixed", "text": "zyx", "template": "{condition}{prompt}"}
PROMPT = Prompt("p", ({"role": "user", "content": "abc"},), problem="abc")
CPU = torch.device("cpu")


def raw(**negative: Any) -> dict[str, Any]:
    return {
        "student": {"model": "tiny:student"},
        "prompts": {"path": "tiny:prompts"},
        "terms": {"negative": {"condition": FIXED, **negative}},
    }


class Noting(Tally):
    """The real models of a run, and what they are asked."""

    def __init__(self, pool: TeacherPool) -> None:
        super().__init__(pool)
        self.requests: list[ScoreRequest] = []

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        assert model == START
        self.requests.append(request)
        return await super().score(model, request)


@pytest.fixture(scope="module")
def start(model_folder, vocab) -> HFTeacher:
    model = HFModel("student.model", str(model_folder(0)), device=CPU, chunk_bytes=2**20)
    return HFTeacher(START, model, View(vocab))


@pytest.fixture
def models(start, micro_tokenizer):
    """`models(max_context)`: the start behind the protocol, with the micro tokenizer."""

    def build(max_context: int = 512) -> Noting:
        side = StudentSide(Contexts(micro_tokenizer, max_context, 64, (2,)), {})
        return Noting(TeacherPool({START: start}, [], student=side))

    return build


@pytest.fixture
def rollout(random_rollout, models) -> Rollout:
    """A response of ten tokens to the word `abc`, of which none is of an earlier rollout."""
    context = models().context(PROMPT, 0)
    (turn,) = random_rollout(0, (len(context), 10)).turns
    return Rollout(PROMPT, 5, (replace(turn, context_ids=context),))


def collect(rollout: Rollout, models: Tally, **settings: Any) -> list[Term]:
    config = build_config(raw(**settings))
    return asyncio.run(Negative(config.terms["negative"], config).collect(rollout, models))


def logps(model: Any, rollout: Rollout, vocab: int, temperature: float = 1.0) -> np.ndarray:
    """[n, V] in float64, by a plain forward."""
    (turn,) = rollout.turns
    ids = torch.from_numpy(np.concatenate([turn.context_ids, turn.sampled_ids])).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.context_ids) - 1 : -1, :vocab].double()
    return (logits / temperature).log_softmax(-1).numpy()


def at(matrix: np.ndarray, rollout: Rollout) -> np.ndarray:
    return np.take_along_axis(matrix, rollout.turns[0].sampled_ids[:, None].astype(np.int64), 1)[:, 0]


def seen(rollout: Rollout, models: Tally) -> Rollout:
    """The same response after `zyxabc`."""
    under = seen_under(rollout, replace(PROMPT, messages=({"role": "user", "content": "zyxabc"},)), models)
    assert under is not None
    return under


def test_the_defaults_are_the_papers():
    config = NegativeConfig()
    published = ("probability", "bounded", "pointwise_fkl", 0.01, 0.2, None, "frozen", False)
    names = ("gate", "penalty", "anchor", "alpha", "trust", "clamp", "generator", "policy_gradient")
    assert tuple(getattr(config, name) for name in names) == published
    assert config.condition == ConditionConfig(source="online", max_tokens=256, temperature=1.0)


def test_the_gate_is_what_the_condition_adds():
    plain, negative = np.log([0.5, 0.5, 0.25, 0.1, 0.9]), np.log([0.75, 0.5, 0.1, 1e-9, 0.9])
    args = plain.astype(np.float32), negative.astype(np.float32), -10.0
    gates = {gate: gate_of(gate, *args) for gate in ("probability", "log", "none")}  # type: ignore[arg-type]
    np.testing.assert_allclose(gates["probability"], [0.25, 0, 0, 0, 0], atol=1e-7)
    np.testing.assert_allclose(gates["log"], [np.log(1.5), 0, 0, 0, 0], atol=1e-6)
    assert gates["none"].tolist() == [1.0] * 5
    assert {gate.dtype for gate in gates.values()} == {np.dtype("float32")}
    assert not gate_of("probability", args[0], args[0], -10.0).any()  # ties
    assert not gate_of("log", args[0], None, -10.0).any()
    rare, raised = np.array([-10.0, -10.0], np.float32), np.array([-30.0, -4.0], np.float32)
    np.testing.assert_allclose(gate_of("log", rare, raised, -10.0), [0.0, 6.0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gate_matches_float64(rollout, models, micro_model, vocab, temperature):
    config = build_config({**raw(), "sampling": {"temperature": temperature}})
    (term,) = asyncio.run(Negative(config.terms["negative"], config).collect(rollout, models()))
    plain, negative = (
        at(logps(micro_model(0), one, vocab, temperature), rollout) for one in (rollout, seen(rollout, models()))
    )
    gate = np.maximum(0.0, np.exp(negative) - np.exp(plain))
    assert 0 < (gate > 0).sum() < len(gate)
    np.testing.assert_allclose(term.inputs["gate"], gate, atol=1e-6)
    np.testing.assert_allclose(term.inputs["reference"], np.maximum(plain, -10.0), atol=1e-5)
    assert term.kind == "penalty"
    assert term.mask.all()
    assert {type(value) for value in term.inputs.values() if hasattr(value, "shape")} == {np.ndarray}  # carry no gradient


def test_both_scorings_are_one_batch_about_the_same_ids(rollout, models, start):
    noting, before = models(), start.model.num_batches
    collect(rollout, noting)
    assert start.model.num_batches == before + 1
    plain, negative = noting.requests
    assert plain.token_ids is negative.token_ids
    assert plain.token_ids.tolist() == rollout.turns[0].sampled_ids.tolist()
    assert negative.context_ids.tolist() == seen(rollout, noting).turns[0].context_ids.tolist()
    assert len(negative.context_ids) == len(plain.context_ids) + 3


def test_several_rollouts_are_one_batch(rollout, models, start):
    config = build_config(raw())
    maker, noting, before = Negative(config.terms["negative"], config), models(), start.model.num_batches

    async def all_of_them() -> None:
        await asyncio.gather(*(maker.collect(rollout, noting) for _ in range(4)))

    asyncio.run(all_of_them())
    assert len(noting.requests) == 8
    assert start.model.num_batches == before + 1


def test_the_same_prompt_has_no_gate(rollout, models):
    same = replace(rollout, prompt=replace(PROMPT, problem="bc"))
    (term,) = collect(same, models(), condition={**FIXED, "text": "a", "template": "{condition}{problem}"})
    assert not term.inputs["gate"].any()
    assert not term.inputs["figure_no_condition"].any()


def test_without_a_condition_there_is_no_gate_and_the_anchor_remains(rollout, models):
    noting = models()
    (term,) = collect(replace(rollout, prompt=replace(PROMPT, answer="zyx")), noting)
    assert not term.inputs["gate"].any()
    assert term.mask.all()
    assert (term.inputs["reference"] < 0).all()
    assert term.inputs["figure_no_condition"].all()
    assert term.inputs["figure_answer_leaked"].all()
    assert len(noting.requests) == 1


def test_a_condition_that_leaves_no_room_is_none(rollout, models):
    fits = len(seen(rollout, models()).turns[0].context_ids) + rollout.num_tokens
    for max_context, missing in ((fits, False), (fits - 1, True)):
        (term,) = collect(rollout, models(max_context))
        assert term.inputs["figure_no_condition"].all() == missing
        assert term.inputs["gate"].any() != missing
        assert not term.inputs["figure_answer_leaked"].any()


def test_reused_tokens_are_context_under_both_prompts(rollout, models):
    noting = models()
    (turn,), (whole,) = rollout.turns, collect(rollout, noting)
    (term,) = collect(replace(rollout, turns=(replace(turn, num_reused=4),)), noting)
    assert term.mask.tolist() == [False] * 4 + [True] * 6
    np.testing.assert_allclose(term.inputs["gate"][4:], whole.inputs["gate"][4:], atol=1e-6)
    assert noting.requests[-1].token_ids is noting.requests[-2].token_ids
    assert len(noting.requests[-1].token_ids) == 6
    assert collect(replace(rollout, turns=(replace(turn, num_reused=10),)), noting) == []


def test_without_a_gate_nobody_is_asked_for_a_condition(rollout, models):
    noting = models()
    (term,) = collect(rollout, noting, gate="none", condition={"source": "online"})
    assert (term.inputs["gate"] == 1.0).all()
    assert len(noting.requests) == 1
    assert "figure_no_condition" not in term.inputs


def test_without_gate_and_anchor_the_start_is_not_asked(rollout, models):
    for anchor in ({"anchor": "none"}, {"alpha": 0.0}):
        settings = {"gate": "none", "condition": None, **anchor}
        assert build_config(raw(**settings)).frozen == {}
        noting = models()
        (term,) = collect(rollout, noting, **settings)
        assert noting.requests == []
        assert (term.inputs["gate"] == 1.0).all()
        assert len(term.inputs["reference"]) == rollout.num_tokens
    assert list(build_config(raw(anchor="none")).frozen) == [START]


def test_the_topk_anchor_is_a_term_of_its_own(rollout, models, micro_model, vocab):
    penalty, anchor = collect(rollout, models(), anchor="topk_fkl", k=5, alpha=0.1, coef=2.0)
    assert (penalty.inputs["anchor"], penalty.coef) == ("none", 2.0)
    assert (anchor.kind, anchor.inputs["divergence"], anchor.coef) == ("divergence", "forward_kl", pytest.approx(0.2))
    target, log_p = anchor.inputs["target"], logps(micro_model(0), rollout, vocab)
    assert isinstance(target, TopK)
    np.testing.assert_allclose(np.sort(target.logps)[:, ::-1], -np.sort(-log_p)[:, :5], atol=1e-5)
    np.testing.assert_allclose(target.tail, 1 - np.exp(target.logps).sum(1), atol=1e-5)


def test_the_full_anchor_has_the_starts_hidden_states(rollout, models, start, micro_model, vocab):
    noting = models()
    penalty, anchor = collect(rollout, noting, anchor="full_fkl")
    assert len(noting.requests) == 2  # under either prompt once
    (plain,) = collect(rollout, models())
    for name in ("gate", "reference"):
        np.testing.assert_allclose(penalty.inputs[name], plain.inputs[name], atol=1e-6)
    target = anchor.inputs["target"]
    assert isinstance(target, Hidden)
    assert target.head == start.head_id
    log_p = start.head.logits(target.states[0], vocab).double().log_softmax(-1).numpy()
    np.testing.assert_allclose(log_p, logps(micro_model(0), rollout, vocab), atol=1e-5)
    assert len(target.states[0]) == len(passages(rollout)[0].at)
    (alone,) = collect(rollout, models(), anchor="full_fkl", alpha=0.0)
    assert alone.inputs["anchor"] == "none"
    np.testing.assert_array_equal(alone.inputs["gate"], penalty.inputs["gate"])


def test_reflection_phrases_are_counted_in_the_response(rollout, models, micro_tokenizer):
    ids = np.array(micro_tokenizer("abwaitcd")["input_ids"], np.int32)
    turn = replace(rollout.turns[0], sampled_ids=ids, sampler_logps=np.zeros(len(ids), np.float32))
    (term,) = collect(replace(rollout, turns=(turn,)), models())
    assert not term.inputs["figure_reflection_rate"].any()  # it is part of a longer word
    (term,) = collect(replace(rollout, turns=(replace(turn, sampled_ids=ids[2:6], sampler_logps=ids[2:6] * 0.0),)), models())
    assert term.inputs["figure_reflection_rate"].tolist() == [1, 0, 0, 0]


def test_it_needs_the_start_and_no_teacher():
    config = build_config(raw())
    assert list(config.frozen) == [START]
    maker = Negative(config.terms["negative"], config)
    assert not maker.needs_teacher
    assert not maker.needs_hidden
    assert Negative(NegativeConfig(anchor="full_fkl"), config).needs_hidden


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy_gradient": True}, "terms.negative.anchor: with policy_gradient pointwise_fkl would lead away"),
        ({"policy_gradient": True, "anchor": "is_fkl"}, "terms.negative.anchor: with policy_gradient is_fkl"),
        ({"anchor": "k1"}, "terms.negative.anchor: k1 as a loss has no expected gradient"),
        ({"coef": float("nan")}, "terms.negative.coef"),
        ({"alpha": -1.0}, "terms.negative.alpha is -1.0"),
        ({"clamp": 0.0}, "terms.negative.clamp is 0.0"),
        ({"trust": 1.0}, "terms.negative.trust is 1.0: it is a share above 0 and below 1, or null"),
        ({"logp_floor": 0.0}, "terms.negative.logp_floor is 0.0"),
        ({"k": 0, "anchor": "topk_fkl"}, "terms.negative.k is 0"),
        ({"k": 8}, "terms.negative.k: has no effect with anchor pointwise_fkl; leave it out, or set it to 32 where"),
        ({"alpha": 0.5, "anchor": "none"}, "terms.negative.alpha: has no effect with anchor none; leave it out, or set"),
        ({"gate": "none"}, "terms.negative.condition: has no effect with gate none; leave it out, or set it to null"),
        (
            {"gate": "none", "condition": None, "anchor": "full_fkl", "logp_floor": -5.0},
            "terms.negative.logp_floor: has no effect with anchor full_fkl and gate none",
        ),
        ({"importance_cap": 0.0, "anchor": "is_fkl"}, "terms.negative.importance_cap is 0.0"),
        ({"importance_cap": 2.0}, "terms.negative.importance_cap: has no effect"),
        ({"generator": "student"}, "terms.negative.generator: nobody writes conditions of source fixed"),
        ({"condition": {"source": "fixed"}}, "terms.negative.condition.text is missing"),
        ({"condition": {"sourse": "fixed"}}, "unknown key 'terms.negative.condition.sourse'"),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(UserError) as error:
        build_config(raw(**settings))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"objective": {"temperature": 0.5}}, "terms.negative: sampled tokens need objective.temperature"),
        ({"prompts": {"type": "environment", "name": "calculator"}}, "terms.negative: a condition is about one answer"),
    ],
)
def test_recipes_that_cannot_work(change, said):
    with pytest.raises(UserError) as error:
        build_config({**raw(), **change})
    assert str(error.value).startswith(said)


def test_only_a_frozen_writer_goes_with_lookahead():
    online = {"condition": {"source": "question"}}
    build_config({**raw(**online), "lookahead": 1})
    build_config(raw(**online, generator="student"))
    with pytest.raises(UserError, match=r"^terms.negative.generator: with lookahead"):
        build_config({**raw(**online, generator="student"), "lookahead": 1})


@pytest.mark.parametrize("anchor", ["k1", "topk_fkl", "full_fkl", "none"])
def test_what_the_policy_gradient_takes(anchor):
    assert build_config(raw(policy_gradient=True, anchor=anchor)).terms["negative"].anchor == anchor


def test_it_warns_where_no_rollout_has_a_condition():
    config = build_config(raw(condition={"source": "online"}))
    online = Negative(config.terms["negative"], config)
    assert online.warning({"no_condition": 0.9, "answer_leaked": 0.9}) is None
    assert online.warning({}) is None
    leaked = online.warning({"no_condition": 1.0, "answer_leaked": 1.0})
    assert leaked is not None
    assert "each held the answer of its problem" in leaked
    short = online.warning({"no_condition": 1.0, "answer_leaked": 0.5})
    assert short is not None
    assert "longer than the context, or its writer wrote nothing; lower sampling.max_new_tokens, raise" in short
    fixed = Negative(build_config(raw()).terms["negative"], config).warning({"no_condition": 1.0, "answer_leaked": 0.0})
    assert fixed is not None
    assert "writer" not in fixed
