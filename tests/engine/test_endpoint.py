"""Mask `endpoint` in the engine: which tokens have a gradient, what the gradients add up to, and what later tokens see."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opd
from opd.config import build_config
from opd.contexts import Contexts
from opd.masking import masked
from opd.models import output_head
from opd.objective.batching import Taught, micro_batches, num_trainable
from opd.objective.head_loss import LossSpec, head_loss
from opd.objective.learner import Learner
from opd.plugins import Mask
from opd.records import Rollout, Term, TopK
from opd.strategies.endpoint import Endpoint
from opd.student_side import StudentSide
from opd.teachers.pool import Tally, TeacherPool

BY_TOKEN = {"by": "token", "fraction": 0.4}


@pytest.fixture(scope="module")
def models(micro_tokenizer):
    return Tally(TeacherPool({}, student=StudentSide(Contexts(micro_tokenizer, 256, 64, [2]), {})))


class Rest(Mask):
    """Masks what another mask leaves."""

    def __init__(self, other: Mask) -> None:
        self.other = other

    def weights(self, rollout, models):
        return 1.0 - self.other.weights(rollout, models)


@pytest.fixture(scope="module")
def endpoint(raw_recipe):
    def build(**settings) -> Endpoint:
        run = build_config(raw_recipe(masks={"endpoint": {**BY_TOKEN, **settings}}))
        return Endpoint(run.masks["endpoint"], run)

    return build


def terms_of(kind: str, rollout: Rollout, vocab: int) -> list[Term]:
    rng = np.random.default_rng(1)
    n = rollout.num_tokens
    if kind == "policy_gradient":
        inputs: dict[str, Any] = {"reward": -rng.exponential(size=n).astype(np.float32), "self_coef": 1.0}
        inputs |= {"advantage_clip": None, "ratio_clip": 0.2, "importance_cap": None}
        return [Term(kind, rollout.trainable, inputs)]
    ids = np.stack([rng.permutation(vocab)[:5] for _ in range(n)]).astype(np.int32)
    probabilities = rng.dirichlet(np.ones(6), n).astype(np.float32)
    target = TopK(ids, np.log(probabilities[:, :5]), probabilities[:, 5])
    inputs = {"divergence": "reverse_kl", "beta": 0.5, "tail": "tail", "target": target}
    return [Term("divergence", rollout.trainable, inputs)]


@pytest.fixture(scope="module")
def gradients(micro_model, vocab):
    """`gradients(taught)`: the loss, and its gradient with respect to every weight, in float64."""
    model = micro_model(0).double()

    def compute(taught: list[Taught]) -> tuple[float, dict[str, Tensor]]:
        spec = LossSpec({}, vocab, 1.0, 2**20)
        tokens, rollouts = num_trainable(taught)
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for batch in micro_batches(taught, 256, "token_mean", tokens, rollouts, torch.device("cpu")):
            hidden = model.model(batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)[batch.rows]
            loss, _ = head_loss(hidden, output_head(model), batch, spec)
            total = total + loss
        total.backward()
        return float(total.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    return compute


@pytest.mark.parametrize("kind", ["policy_gradient", "divergence"])
def test_the_whole_gradient_is_that_of_the_ends_and_that_of_the_middle(
    endpoint, gradients, models, random_rollout, kind, vocab
):
    rollouts = [random_rollout(seed, (4, 12 + seed)) for seed in range(3)]
    mask = endpoint()
    parts = {
        name: gradients([(one, masked(masks, one, terms_of(kind, one, vocab), models)) for one in rollouts])
        for name, masks in {"full": {}, "ends": {"endpoint": mask}, "middle": {"rest": Rest(mask)}}.items()
    }
    assert parts["full"][0] == pytest.approx(parts["ends"][0] + parts["middle"][0], rel=1e-6)
    for name, whole in parts["full"][1].items():
        torch.testing.assert_close(parts["ends"][1][name] + parts["middle"][1][name], whole, rtol=1e-4, atol=1e-7)
    assert any(not torch.equal(a, b) for a, b in zip(parts["full"][1].values(), parts["ends"][1].values()))


@pytest.mark.parametrize("kind", ["policy_gradient", "divergence"])
@pytest.mark.parametrize("normalizer", ["all", "live"])
def test_masked_tokens_have_no_gradient_and_the_others_theirs(
    endpoint, models, micro_model, random_rollout, kind, normalizer, vocab
):
    """With respect to the logits of each position; under `live` the others' share is larger by one factor."""
    rollout, model = random_rollout(5, (4, 15)), micro_model(0)
    mask = endpoint(normalizer=normalizer)
    weights = mask.weights(rollout, models)
    spec = LossSpec({}, vocab, 1.0, 2**20)

    def of_logits(masks: dict[str, Mask]) -> Tensor:
        """[n, H]: the loss's gradient with respect to the hidden state before each sampled token."""
        taught = [(rollout, masked(masks, rollout, terms_of(kind, rollout, vocab), models))]
        (batch,) = micro_batches(taught, 256, "token_mean", *num_trainable(taught), torch.device("cpu"))
        with torch.no_grad():
            states = model.model(batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        states = states.requires_grad_()
        head_loss(states[batch.rows], output_head(model), batch, spec)[0].backward()
        assert states.grad is not None
        first = len(rollout.turns[0].context_ids) - 1
        return states.grad[first : first + rollout.num_tokens]

    full, ends = of_logits({}), of_logits({"endpoint": mask})
    hidden = torch.from_numpy(weights == 0)
    assert 3 <= hidden.sum() <= 5  # floor(0.4 * 14), where no random token is a special one
    assert (ends[hidden] == 0).all()
    assert (full[hidden].abs().sum(1) > 0).all()
    factor = 1.0 if normalizer == "all" else 15 / int((~hidden).sum())
    torch.testing.assert_close(ends[~hidden], factor * full[~hidden])


def test_masked_tokens_stay_in_the_context(endpoint, models, micro_model, random_rollout, vocab):
    """The model reads the same sequence with a mask and without; another middle changes what the end is predicted from."""
    rollout, model, mask = random_rollout(5, (4, 15)), micro_model(0), endpoint()
    weights = mask.weights(rollout, models)

    def of_end(one: Rollout, masks: dict[str, Mask]) -> Tensor:
        """[e, V]: log-probs behind the masked middle."""
        taught = [(one, masked(masks, one, terms_of("policy_gradient", one, vocab), models))]
        (batch,) = micro_batches(taught, 256, "token_mean", *num_trainable(taught), torch.device("cpu"))
        num_end = int((weights[::-1] == 0).argmax())
        rows = batch.rows[-num_end:]
        with torch.no_grad():
            states = model.model(batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)[rows]
            return model.lm_head(states).log_softmax(-1)

    plain, with_mask = of_end(rollout, {}), of_end(rollout, {"endpoint": mask})
    assert len(plain) >= 3
    assert torch.equal(plain, with_mask)
    changed = random_rollout(5, (4, 15))
    middle = int((weights == 0).argmax())
    changed.turns[0].sampled_ids[middle] = 3 + (changed.turns[0].sampled_ids[middle] - 2) % (vocab - 3)
    assert changed.turns[0].sampled_ids[middle] != rollout.turns[0].sampled_ids[middle]
    assert (of_end(changed, {"endpoint": mask}) - plain).abs().max() > 1e-3


def without(rows: list[dict[str, float]], *names: str) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def short(recipe: Callable[..., dict[str, Any]], **sections: Any) -> dict[str, Any]:
    return recipe(**{"steps": 2, "eval": {}, **sections})


FORMS = [{"form": "full"}, {"form": "topk", "k": 4}, {"form": "sampled"}]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["form"])
def test_a_share_of_0_is_no_mask_to_the_last_bit(raw_recipe, train, form):
    terms = {"reverse_kl": form}
    plain = train(short(raw_recipe, terms=terms), "plain")
    for name, settings in {"step": {}, "live": {"by": "token", "normalizer": "live"}}.items():
        rows = train(short(raw_recipe, terms=terms, masks={"endpoint": {"fraction": 0.0, **settings}}), name)
        assert all(row["masked_share"] == 0 for row in rows)
        assert without(rows, "masked_share") == plain


def test_a_mask_that_masks_nothing_says_so_once(raw_recipe, train, capsys):
    """The micro models' answers have no blank lines."""
    rows = train(short(raw_recipe, masks={"endpoint": {}}), "steps")
    assert len(rows) > 1
    assert all(row["masked_share"] == 0 for row in rows)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "masked nothing" in line]
    assert line.startswith("WARNING: step 1: masks.endpoint has masked nothing (masked_share): ")
    train(short(raw_recipe, masks={"endpoint": BY_TOKEN}), "tokens")
    assert "masked nothing" not in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["form"])
def test_every_form_trains_on_what_is_left(raw_recipe, train, form):
    """The first step samples the same rollouts: as many tokens count, and the loss is another."""
    terms = {"reverse_kl": form}
    plain = train(short(raw_recipe, terms=terms), "plain")[0]
    rows = {
        normalizer: train(
            short(raw_recipe, terms=terms, masks={"endpoint": {**BY_TOKEN, "normalizer": normalizer}}), normalizer
        )[0]
        for normalizer in ("all", "live")
    }
    assert rows["all"]["sampled_tokens"] == rows["live"]["sampled_tokens"] == plain["sampled_tokens"]
    assert rows["all"]["trained_tokens"] == plain["trained_tokens"] > rows["live"]["trained_tokens"]
    share = rows["all"]["masked_share"]
    assert 0.2 < share <= 0.4
    assert rows["live"]["trained_tokens"] == round((1 - share) * plain["trained_tokens"])
    assert rows["all"]["loss"] == pytest.approx(rows["live"]["loss"] * (1 - share), rel=1e-4)
    assert rows["all"]["loss"] != plain["loss"]


def test_steps_of_the_students_own_tokens(raw_recipe, train):
    """A letter as delimiter: models with random weights write it now and then."""
    masks = {"endpoint": {"delimiter": "a", "fraction": 0.6}}
    rows = train(short(raw_recipe, masks=masks, sampling={"max_new_tokens": 40}), "run")
    assert 0 < rows[0]["masked_share"] < 0.6


def test_what_is_random_is_the_same_in_a_resumed_run(raw_recipe, train, tmp_path, metrics_of):
    masks = {"endpoint": {**BY_TOKEN, "place": "random"}}
    whole = train(short(raw_recipe, steps=4, masks=masks), "whole")
    train(short(raw_recipe, steps=4, masks=masks), "part")
    for path in sorted((tmp_path / "part" / "checkpoints" / "step-4").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    opd.train(build_config(short(raw_recipe, steps=4, masks=masks)), tmp_path / "part", resume=True)
    assert metrics_of(tmp_path / "part") == whole


@pytest.fixture
def taught(monkeypatch):
    """What the updates are given: each rollout with its weights."""
    seen: list[tuple[Rollout, np.ndarray]] = []
    real = Learner.update

    def update(self: Learner, rows: list[Taught]):
        for rollout, (term,) in rows:
            assert term.weight is not None
            seen.append((rollout, term.weight))
        return real(self, rows)

    monkeypatch.setattr(Learner, "update", update)
    return seen


def test_with_stride_the_trigger_turn_is_trained_whole(episode_recipe, echo, train, taught):
    """Nearly everything is masked, but of stopped rollouts nothing of the last turn, and of others something."""
    stride = {"stride": {"stop_below": -6.0, "keep_above": None}}
    masks = {"endpoint": {"by": "token", "fraction": 0.9}}
    rows = train(short(episode_recipe, steps=4, rollout=stride, masks=masks), "run")
    assert sum(row["restart_units"] for row in rows) > 0
    assert all(row["trained_tokens"] == row["sampled_tokens"] for row in rows)
    ends = {True: 0, False: 0}  # masked tokens of last turns, by whether the rollout was stopped
    sizes, earlier = [], 0
    for rollout, weights in taught:
        stopped, last = rollout.finish == "stopped", len(rollout.turns[-1].sampled_ids)
        ends[stopped] += int((weights[-last:] == 0).sum())
        if stopped:
            sizes.append(last)
            earlier += int((weights[:-last] == 0).sum())
    assert ends[True] == 0 < ends[False]
    assert max(sizes) > 2  # tokens of which a turn that was not stopped would have lost one or more
    assert earlier > 0


@pytest.mark.parametrize("rollout", [{"prefix": {"tokens": 10}}, {"stride": {"stop_below": -25.0, "keep_above": None}}])
def test_of_stopped_answers_all_but_the_last_chunk_is_masked_as_usual(raw_recipe, train, taught, rollout):
    sections = {"rollout": rollout, "sampler": {"chunk_tokens": 4}, "masks": {"endpoint": {"by": "token", "fraction": 0.6}}}
    rows = train(short(raw_recipe, **sections, sampling={"max_new_tokens": 24}), "run")
    assert all(row["stopped_rate"] > 0 and row["masked_share"] > 0 for row in rows)
    num_masked = 0
    for one, weights in taught:
        if one.finish == "stopped":
            first = (len(weights) - 1) // 4 * 4
            assert (weights[first:] == 1).all()
            num_masked += int((weights[:first] == 0).sum())
    assert num_masked > 0


def test_with_compass_across_tokenizers(aligned_recipe, train):
    terms, masks = {"compass": {}}, {"endpoint": BY_TOKEN}
    rows = train(short(aligned_recipe, terms=terms, masks=masks), "run")
    assert all(0 < row["masked_share"] <= 0.4 for row in rows)
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    live = train(
        short(aligned_recipe, terms={"compass": {}}, masks={"endpoint": {**BY_TOKEN, "normalizer": "live"}}), "live"
    )
    assert live[0]["trained_tokens"] < rows[0]["trained_tokens"]


def test_beside_group_rewards_the_reward_is_of_the_whole(raw_recipe, train):
    """What a group is worth does not depend on the mask: the first step's advantages are those of a run without one."""
    sections = {
        "terms": {"group_reward": {"gate": "none"}},
        "teachers": {},
        "reward": {"outcome": "majority", "length_cost": 0.1},
        "sampling": {"max_new_tokens": 24},
    }
    plain = train(short(raw_recipe, **sections), "plain")[0]
    rows = train(short(raw_recipe, **sections, masks={"endpoint": BY_TOKEN}), "masked")[0]
    assert rows["score"] == plain["score"]
    assert rows["live_groups"] == plain["live_groups"]
    assert 0 < rows["masked_share"] <= 0.4
    assert rows["loss"] != plain["loss"]
