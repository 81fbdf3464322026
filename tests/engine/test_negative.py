"""Negative self-distillation in the engine: gradients of whole models, LoRA, conditions that models write, resumed runs."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from opd.assembly import Parts, assemble, make_accelerator
from opd.config import build_config
from opd.models import decoder, output_head
from opd.objective.batching import Taught, micro_batches, num_trainable
from opd.objective.head_loss import head_loss
from opd.students.noise import slot_seed
from opd.teachers.config import START
from opd.teachers.hf import HFTeacher
from opd.teachers.pool import Tally

FIXED = {"source": "fixed", "text": "zyx", "template": "{condition}{prompt}"}
WRITTEN = {
    "max_tokens": 6,
    "online_prompt": "p{problem}r{response}",
    "question_prompt": "q{problem}",
    "template": "{condition}{prompt}",
}
NO_ANCHOR = {"anchor": "none", "condition": FIXED}


@pytest.fixture
def recipe(raw_recipe):
    """`recipe(settings of the term, **sections)`: a run without a teacher."""

    def build(negative: dict[str, Any], **sections: Any) -> dict[str, Any]:
        defaults = {"teachers": {}, "terms": {"negative": {"condition": FIXED, **negative}}, "eval": {}, "steps": 3}
        return raw_recipe(**{**defaults, **sections})

    return build


@pytest.fixture
def parts_of():
    """`parts_of(raw)`: what the run consists of."""
    opened: list[Parts] = []

    def build(raw) -> Parts:
        torch.manual_seed(0)
        opened.append(assemble(build_config(raw), make_accelerator()))
        return opened[-1]

    yield build
    for parts in opened:
        parts.close()


def taught_by(parts: Parts, seed: int = 0) -> list[Taught]:
    """Eight rollouts of the first step with their terms, as the engine has them."""

    async def one(slot: int) -> Taught:
        rollout = await parts.player.play(prompts[slot // 2], slot, slot_seed(seed, 0, slot))
        assert rollout is not None
        return rollout, [term for maker in parts.makers for term in await maker.collect(rollout, tally)]

    async def all_of_them() -> list[Taught]:
        return list(await asyncio.gather(*map(one, range(8))))

    prompts, tally = parts.prompts.at(0, 0, 4), Tally(parts.teachers)
    parts.sampler.sync(parts.learner.student, 0)
    return asyncio.run(all_of_them())


async def write(parts: Parts, model: str) -> str | None:
    """The likeliest answer of a model to the first prompt."""
    return await Tally(parts.teachers).write(model, parts.prompts.at(0, 0, 1)[0], 0, 12, 0.0)


def row_gradients(parts: Parts, taught: list[Taught]) -> tuple[Tensor, Tensor]:
    """[N] the largest part of each trained token's gradient by its hidden state, and each token's gate."""
    largest, gates = [], []
    tokens, rollouts = num_trainable(taught)
    for batch in micro_batches(taught, 10**6, "token_mean", tokens, rollouts, torch.device("cpu")):
        with torch.no_grad():
            states = decoder(parts.learner.student)(input_ids=batch.input_ids).last_hidden_state
        hidden = states.reshape(-1, states.shape[-1])[batch.rows].requires_grad_()
        head = output_head(parts.learner.student)
        loss, _ = head_loss(hidden, head, batch, parts.learner.spec)
        largest.append(torch.autograd.grad(loss, hidden)[0].abs().amax(1))
        gates.append(batch.terms[0].inputs["gate"])
    return torch.cat(largest), torch.cat(gates)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("penalty", ["bounded", "unlikelihood"])
@pytest.mark.parametrize("gate", ["probability", "log"])
def test_no_gradient_where_the_condition_lowers_the_probability(recipe, parts_of, penalty, gate):
    parts = parts_of(recipe({**NO_ANCHOR, "penalty": penalty, "gate": gate}))
    gradient, gates = row_gradients(parts, taught_by(parts))
    closed = gates == 0
    assert 5 < closed.sum() < len(gates) - 5
    assert (gradient[closed] == 0).all()
    assert (gradient[~closed] > 0).all()


def test_the_whole_gradient_is_that_of_the_definition(recipe, parts_of, vocab):
    """Gate, push and anchor from whole matrices in float64, against the learner's gradient of every weight."""
    parts = parts_of(recipe({"alpha": 0.5}))
    taught, student = taught_by(parts), parts.learner.student
    tokens, rollouts = num_trainable(taught)
    for batch in micro_batches(taught, 10**6, "token_mean", tokens, rollouts, torch.device("cpu")):
        parts.learner.loss(batch, parts.learner.spec)[0].backward()
    found = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    student.double()
    total = torch.zeros((), dtype=torch.float64)
    for rollout, _ in taught:
        (turn,) = rollout.turns
        word = rollout.prompt.problem
        negative = parts.tokenizer(f"<bos><user>zyx{word}<assistant>", add_special_tokens=False)["input_ids"]
        own, other = (_logps(student, np.array(ids), turn.sampled_ids, vocab) for ids in (turn.context_ids, negative))
        reference = own.detach().clamp(min=-10.0)
        gate = (other.detach().clamp(min=-10.0).exp() - reference.exp()).clamp(min=0)
        anchor = reference.exp() * (reference - own)
        total = total + (gate * torch.sigmoid(-(1 - own.exp()).log()) + 0.5 * anchor).sum() / tokens
    total.backward()
    for name, p in student.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name].double(), p.grad, rtol=1e-3, atol=1e-6)


def _logps(model: torch.nn.Module, context_ids: np.ndarray, sampled_ids: np.ndarray, vocab: int) -> Tensor:
    ids = torch.from_numpy(np.concatenate([context_ids, sampled_ids])).long()[None]
    logp = model(ids).logits[0, len(context_ids) - 1 : -1, :vocab].log_softmax(-1)
    return logp.gather(1, torch.from_numpy(sampled_ids).long()[:, None])[:, 0]


@pytest.mark.parametrize("lora", [None, {"r": 4, "alpha": 64}])
def test_the_start_stays_what_it_was(recipe, parts_of, lora):
    """With adapters it is what is beneath them, in the student's own weights."""
    raw = recipe({}, optimizer={"lr": 0.1})
    raw["student"] = {**raw["student"], "lora": lora}
    parts = parts_of(raw)
    start = parts.teachers.teachers[START]
    assert isinstance(start, HFTeacher)
    assert (start.model.model is parts.learner.student) == (lora is not None)
    before, taught = weights(start.model.model), taught_by(parts)
    written = [asyncio.run(write(parts, name)) for name in (START, "student")]
    assert written[0] == written[1] != ""
    moved = {name for name in before if "lora_" in name}
    for _ in range(2):
        parts.learner.update(taught)
    after = weights(start.model.model)
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - moved)
    again = taught_by(parts)
    assert asyncio.run(write(parts, START)) == written[0] != asyncio.run(write(parts, "student"))
    assert any(not np.array_equal(a.turns[0].sampled_ids, b.turns[0].sampled_ids) for (a, _), (b, _) in zip(taught, again))
    scored = [asyncio.run(maker.collect(rollout, Tally(parts.teachers))) for maker in parts.makers for rollout, _ in taught]
    for (_, (was,)), (now,) in zip(taught, scored):
        np.testing.assert_allclose(now.inputs["gate"], was.inputs["gate"], atol=1e-6)
        np.testing.assert_allclose(now.inputs["reference"], was.inputs["reference"], atol=1e-5)


def test_with_adapters_the_first_step_has_the_same_gate(recipe, train):
    whole = recipe({}, steps=1)
    adapted = {**whole, "student": {**whole["student"], "lora": {"r": 4}}}
    first, second = train(whole, "whole")[0], train(adapted, "adapted")[0]
    for name in ("gate", "gate_share", "penalty", "anchor", "entropy", "loss", "sampled_tokens"):
        assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-7), name


def test_metrics_of_a_run(recipe, train):
    rows = train(recipe({}, optimizer={"lr": 1e-2}, steps=6))
    for row in rows:
        assert 0 < row["gate"] < row["gate_share"] < 1
        assert row["no_condition"] == row["answer_leaked"] == row["reflection_rate"] == 0
        assert row["loss"] == pytest.approx(row["penalty"] + 0.01 * row["anchor"], rel=1e-5)
        assert row["entropy"] > 0
    assert abs(rows[0]["anchor"]) < 1e-6
    assert abs(rows[-1]["anchor"]) > 1e-4


def test_penalised_tokens_become_rarer(recipe, parts_of):
    parts = parts_of(recipe(NO_ANCHOR, optimizer={"lr": 3e-3, "schedule": "constant"}))
    taught, gates, before, after = taught_by(parts), [], [], []
    for rows in (before, after):
        for rollout, (term,) in taught:
            (turn,) = rollout.turns
            with torch.no_grad():
                rows.append(_logps(parts.learner.student, turn.context_ids, turn.sampled_ids, parts.learner.spec.vocab))
            gates.append(torch.from_numpy(term.inputs["gate"]))
        if rows is before:
            for _ in range(10):
                parts.learner.update(taught)
    gate, change = torch.cat(gates[: len(taught)]), torch.cat(after) - torch.cat(before)
    assert (gate * change).sum() / gate.sum() < -0.5


def test_nothing_gated_and_no_anchor_is_no_loss(recipe, train):
    """The condition holds the answer, so that it is none."""
    same = {"source": "fixed", "text": "zz", "template": "{prompt}{condition}"}
    raw = recipe({"condition": same, "alpha": 0.0}, steps=2)
    path = raw["prompts"]["path"]
    raw["prompts"] = {**raw["prompts"], "columns": {"prompt": "problem", "answer": "told"}}
    with open(path) as lines:
        rows = [json.loads(line) | {"told": "zz"} for line in lines]
    told = path.replace("prompts.jsonl", "told.jsonl")
    with open(told, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    raw["prompts"]["path"] = told
    for row in train(raw):
        assert row["loss"] == row["grad_norm"] == row["gate"] == row["penalty"] == 0.0
        assert row["no_condition"] == row["answer_leaked"] == 1.0
        assert row["trained_tokens"] > 0


def test_conditions_without_room_are_told_once(recipe, train, capsys):
    """The writer's prompt is longer than the context."""
    long = {"source": "online", "online_prompt": "{problem}{response}" + "a" * 600}
    rows = train(recipe({"condition": long}))
    assert [row["no_condition"] for row in rows] == [1, 1, 1]
    lines = [line for line in capsys.readouterr().err.splitlines() if "no_condition" in line]
    assert len(lines) == 1
    assert lines[0].startswith("WARNING: step 1: terms.negative pushes nothing down, since no rollout has a condition")
    train(recipe({}, steps=1), "fixed")
    assert "no_condition" not in capsys.readouterr().err


def test_without_gate_and_anchor_the_start_is_not_loaded(recipe, parts_of):
    parts = parts_of(recipe({"gate": "none", "anchor": "none", "condition": None}))
    assert dict(parts.teachers.teachers) == {}
    assert dict(parts.learner.spec.heads) == {}


def test_the_full_anchor_costs_no_further_forward(recipe, parts_of):
    found = {}
    for anchor in ("pointwise_fkl", "full_fkl"):
        parts = parts_of(recipe({"anchor": anchor}))
        taught_by(parts)
        found[anchor] = parts.teachers.teachers[START].model.num_tokens
    assert found["full_fkl"] == found["pointwise_fkl"] > 0


def test_beneath_adapters_the_start_has_the_students_precision(recipe, parts_of):
    """Before the first update both are the same function of the tokens, rounding included."""
    raw = recipe({"anchor": "full_fkl", "alpha": 0.5}, objective={"precision": "bfloat16"})
    raw["student"] = {**raw["student"], "lora": {"r": 4}}
    parts = parts_of(raw)
    taught, loss, spec = taught_by(parts), parts.accelerator.unwrap_model(parts.learner.loss), parts.learner.spec
    tokens, rollouts = num_trainable(taught)
    reference, own, exact = [], [], []
    for batch in micro_batches(taught, 10**6, "token_mean", tokens, rollouts, torch.device("cpu")):
        reference.append(batch.terms[0].inputs["reference"])
        for precision, found in ((torch.float32, exact), (torch.bfloat16, own)):
            loss.precision = precision
            with torch.no_grad():
                found.append(loss(batch, spec, logps_only=True))
    rounding = (torch.cat(own) - torch.cat(exact)).abs().mean()
    assert (torch.cat(reference) - torch.cat(own)).abs().mean() < 0.1 * rounding
    assert abs(parts.learner.measure(taught)["forward_kl"]) < 1e-6


@pytest.mark.parametrize("anchor", ["topk_fkl", "full_fkl", "k2_reverse", "pointwise_fkl"])
def test_an_anchor_rests_at_the_start_but_for_the_pointwise_one(recipe, train, anchor):
    """With hardly a push the first step has a gradient only where the anchor itself has one."""
    rows = train(recipe({"anchor": anchor, "coef": 1e-6, "alpha": 1e6}, optimizer={"lr": 1e-2}, steps=2))
    assert (rows[0]["grad_norm"] < 1e-3) == (anchor != "pointwise_fkl")
    assert rows[1]["grad_norm"] > 1e-2
    figure = "forward_kl" if anchor in ("topk_fkl", "full_fkl") else "anchor"
    assert abs(rows[0][figure]) < 1e-5 < abs(rows[1][figure])


def test_an_anchor_holds(recipe, train):
    loose, held = (train(recipe({"anchor": "full_fkl", "alpha": alpha}, steps=8), f"{alpha}") for alpha in (1e-4, 3.0))
    assert held[-1]["forward_kl"] < 0.3 * loose[-1]["forward_kl"]


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_gradient": True, "anchor": "k1"},
        {"policy_gradient": True, "anchor": "full_fkl", "gate": "log", "condition": FIXED},
        {"gate": "none", "anchor": "none"},
        {"gate": "none", "penalty": "unlikelihood", "anchor": "k2_reverse"},
        {"clamp": 0.05, "coef": 2.0},
    ],
)
def test_other_settings_run(recipe, train, settings):
    rows = train(recipe({"condition": None, **settings} if "gate" in settings else settings, steps=2))
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert all(("penalty_clamped" in row) == ("clamp" in settings) for row in rows)


def test_with_several_updates_tokens_that_fell_are_dropped(recipe, train):
    raw = recipe({"anchor": "none"}, objective={"updates_per_batch": 4}, optimizer={"lr": 0.02}, steps=2)
    rows = train(raw)
    assert all(0 < row["trust_dropped"] < 1 for row in rows)
    one = train(recipe({"anchor": "none"}, steps=1), "one")
    assert "trust_dropped" not in one[0]


@pytest.mark.parametrize("source", ["online", "question"])
def test_conditions_that_the_start_writes(recipe, train, source):
    rows = train(recipe({"condition": {**WRITTEN, "source": source}}, optimizer={"lr": 1e-2}))
    for row in rows:
        assert 0 < row["written_tokens"] <= 8 * 6
        assert row["no_condition"] < 1
        assert row["gate"] > 0


def test_a_student_that_writes_conditions_writes_them_as_it_is_now(recipe, train):
    """At the first step it is its own start; later it is not."""
    settings = {"condition": {**WRITTEN, "source": "online"}}
    raw = recipe(settings, optimizer={"lr": 3e-2, "schedule": "constant"})
    frozen = train(raw, "frozen")
    student = train({**raw, "terms": {"negative": {**settings, "generator": "student"}}}, "student")
    for name in ("gate", "written_tokens", "loss"):
        assert student[0][name] == pytest.approx(frozen[0][name], abs=1e-6)
    assert student[1]["sampled_tokens"] == frozen[1]["sampled_tokens"]
    assert student[1]["gate"] != pytest.approx(frozen[1]["gate"], abs=1e-6)


@pytest.mark.parametrize(
    ("generator", "lookahead", "lora"), [("frozen", 0, True), ("student", 0, False), ("frozen", 1, False)]
)
def test_a_resumed_run_writes_the_same_conditions(recipe, train, tmp_path, monkeypatch, generator, lookahead, lora):
    from opd.recorder import Recorder

    settings = {"condition": {**WRITTEN, "source": "online"}, "generator": generator}
    raw = recipe(settings, steps=5, lookahead=lookahead, checkpoint={"every": 2})
    raw["student"] = {**raw["student"], "lora": {"r": 4} if lora else None}
    whole, real = train(raw, "whole"), Recorder.step

    def step(self, number, landed, metrics):
        real(self, number, landed, metrics)
        if number == 3:
            raise InterruptedError

    monkeypatch.setattr(Recorder, "step", step)
    with pytest.raises(InterruptedError):
        train(raw, "part")
    monkeypatch.undo()
    assert train(raw, "part", resume=True) == whole


def test_passages_from_a_file(recipe, train, tmp_path):
    (tmp_path / "passages.txt").write_text("zyx\n\nwv\n\nuts")
    raw = recipe(
        {"condition": {"source": "file", "path": str(tmp_path / "passages.txt"), "template": "{condition}{prompt}"}}
    )
    rows = train(raw)
    assert all(row["gate"] > 0 and row["no_condition"] == 0 for row in rows)
    assert train(raw, "again") == rows


def test_beside_a_teacher(recipe, raw_recipe, train):
    """The terms are added up; each has its own figures."""
    both = {"reverse_kl": {"form": "full"}, "negative": {"condition": FIXED, "anchor": "full_fkl"}}
    row = train(recipe({}, terms=both, teachers=raw_recipe()["teachers"], steps=1))[0]
    expected = row["reverse_kl"] + row["penalty"] + 0.01 * row["forward_kl"]
    assert row["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_two_processes_equal_one(recipe, tmp_path, metrics_of):
    """Conditions follow from the slot, whoever has it; each process writes beneath its own copy of the adapters."""
    raw = recipe({"condition": {**WRITTEN, "source": "online"}}, steps=2, optimizer={"lr": 1e-2})
    raw["student"] = {**raw["student"], "lora": {"r": 4}}
    (tmp_path / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    command = [sys.executable, "-m", "opd", "train", str(tmp_path / "recipe.yaml")]
    for count in ("1", "2"):
        done = subprocess.run(
            [*command, "--out", str(tmp_path / count), "--processes", count], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for one, two in zip(metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2"), strict=True):
        assert two["written_tokens"] == one["written_tokens"] > 0
        for name in ("loss", "grad_norm", "gate", "no_condition", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6)
