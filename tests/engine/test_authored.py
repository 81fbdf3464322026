"""Runs on pools that teachers wrote: of any size at the same cost, without other data, with a teacher for each domain."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import opd
from opd.config import build_config
from opd.data_free.pool import Row, write_pool
from opd.errors import UserError
from opd.strategies.group_reward import GroupReward
from opd.validation import check_files

BRIEF = {"eval": {}, "trackers": {"rollouts_every": 0}}
SOURCES = {"a": "abcdefgh", "b": "stuvwxyz"}  # a problem a letter


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """A pool of eight problems for each domain."""
    folder = tmp_path_factory.mktemp("pools")
    for name, letters in SOURCES.items():
        rows = [Row(f"{name}-{i}", letter, name, further={"answer": letter}) for i, letter in enumerate(letters)]
        write_pool(folder / f"{name}.jsonl", rows)
    return {name: str(folder / f"{name}.jsonl") for name in SOURCES}


@pytest.fixture(scope="module")
def folders(model_folder):
    return {seed: str(model_folder(seed)) for seed in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """A verifier to which an answer of more than ten characters is right."""
    path = tmp_path_factory.mktemp("verifier") / "verifier.py"
    path.write_text("def long(response, answer, row):\n    return len(response) > 10\n")
    return f"{path}:long"


@pytest.fixture
def recipe(raw_recipe, pools):
    """`recipe(size=8, **sections)`: one pool of this size."""

    def build(size=8, **sections):
        prompts = {"type": "authored", "path": pools["a"], "size": size}
        return raw_recipe(**{**BRIEF, "prompts": prompts, **sections})

    return build


@pytest.fixture
def two(raw_recipe, pools, folders):
    """`two(b=2, **sections)`: two domains, each with its own teacher."""

    def build(b=2, **sections):
        teachers = {"a": {"model": folders[1]}, "b": {"model": folders[b]}}
        prompts = {"type": "authored", "pools": pools}
        return raw_recipe(**{**BRIEF, "teachers": teachers, "prompts": prompts, **sections})

    return build


def same(one, other):
    """Whether two inputs of terms are equal to the last bit."""
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    return one == other


def test_a_small_pool_costs_what_a_large_one_does(recipe, train, taught):
    """Steps, prompts, rollouts and updates are those of any size; only the prompts' identity differs."""
    for size in (1, 3, 8):
        rows = train(recipe(size, steps=3), str(size))
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(row["skipped_prompts"] == row["empty_updates"] == 0 for row in rows)
        times = Counter()
        for step in taught[-3:]:
            assert [rollout.slot for rollout, _ in step] == list(range(8))
            batch = Counter(rollout.prompt.id for rollout, _ in step[::2])
            assert all(4 // size <= batch[f"a-{place}"] <= -(-4 // size) for place in range(size))
            times += batch
        assert len(times) == size
        assert sum(times.values()) == 12
    assert len(taught) == 9


def test_copies_of_a_prompt_are_sampled_apart(recipe, train, taught):
    train(recipe(1, steps=2))
    for step in taught:
        assert {rollout.prompt.id for rollout, _ in step} == {"a-0"}
        written = {rollout.turns[0].sampled_ids.tobytes() for rollout, _ in step}
        assert len(written) == 8


def test_copies_of_a_prompt_are_groups_of_their_own(recipe, train, monkeypatch, tmp_path):
    """What a rollout is compared with are those of its own copy, never all of the same text."""
    seen = {}
    real = GroupReward.collect

    async def collect(self, rollout, models):
        seen[rollout.slot] = [one.slot for one in models.group(rollout)]
        return await real(self, rollout, models)

    monkeypatch.setattr(GroupReward, "collect", collect)
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def long(response, answer, row):\n    return len(response) > 4\n")
    terms, batch = {"group_reward": {}}, {"prompts": 3, "rollouts_per_prompt": 2}
    train(recipe(1, steps=1, terms=terms, reward={"outcome": f"{verifier}:long"}, batch=batch, teachers={}))
    assert seen == {slot: [slot // 2 * 2, slot // 2 * 2 + 1] for slot in range(6)}


@pytest.mark.parametrize("form", ["full", "topk"])
def test_every_copy_teaches_what_it_would_alone(recipe, train, taught, form, vocab):
    """The loss of a tiled batch is the mean over the tokens of its rollouts, each by the teacher's view of that rollout
    itself: by both models' whole distributions in float64, nothing is shared among copies."""
    tail = {"k": vocab, "tail": "truncate"} if form == "topk" else {}  # all tokens there are
    raw = recipe(2, steps=1, terms={"reverse_kl": {"form": form, **tail}}, optimizer={"lr": 0.0})
    row = train(raw)[0]
    paths = (raw["student"]["model"], raw["teachers"]["default"]["model"])
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in paths]
    kls = []
    for rollout, _ in taught[0]:
        (turn,) = rollout.turns
        ids = torch.tensor([[*turn.context_ids.tolist(), *turn.sampled_ids.tolist()]])
        with torch.no_grad():
            q, p = (
                model(ids).logits[0, len(turn.context_ids) - 1 : -1, :vocab].double().log_softmax(-1) for model in models
            )
        kls.append((q.exp() * (q - p)).sum(-1).numpy())
    assert len({kl.sum() for kl in kls}) == len(kls)  # the copies differ
    assert row["loss"] == pytest.approx(np.concatenate(kls).mean(), rel=2e-5)
    assert row["reverse_kl"] == pytest.approx(row["loss"], rel=1e-5)


PLAIN = {"reverse_kl": {"form": "full"}}
CONDITION = {"source": "fixed", "text": "zyx", "template": "{condition}{prompt}"}
TERMS = {
    "full": PLAIN,
    "topk": {"reverse_kl": {"form": "topk", "k": 4}},
    "sampled": {"reverse_kl": {"form": "sampled"}},
    "shared_topk": {"shared_topk": {"k": 4}},
    "compass": {"compass": {}},
    "self_distillation": {**PLAIN, "self_distillation": {"template": "{prompt}{answer}"}},
    "negative": {**PLAIN, "negative": {"condition": CONDITION}},
    "group_reward": {**PLAIN, "group_reward": {}},
    "overlap": {**PLAIN, "overlap": {"k": 4, "num_rollouts": 0}},
}
STEERING = {
    "stride": {"stop_below": -25.0, "keep_above": None},
    "early_stop": {"stop_below": -25.0},
    "prefix": {"tokens": 5},
}
CASES = {
    **{name: {"terms": terms} for name, terms in TERMS.items()},
    **{name: {"rollout": {name: controller}} for name, controller in STEERING.items()},
    "endpoint": {"masks": {"endpoint": {"by": "token", "fraction": 0.4}}},
}


@pytest.mark.parametrize("name", CASES)
def test_another_teacher_leaves_the_other_domain_alone(two, train, taught, folders, verifier, name):
    """In the first step, where the student is the same: terms and figures of domain `a` are equal to the last bit."""
    reward = {"reward": {"outcome": verifier}} if name == "group_reward" else {}
    runs = []
    for b in (2, 3):
        weak = {"weak_reference": {"model": folders[4]}} if name == "compass" else {}
        teachers = {domain: {"model": folders[seed], **weak} for domain, seed in (("a", 1), ("b", b))}
        runs.append(train(two(steps=2, teachers=teachers, sampler={"chunk_tokens": 3}, **CASES[name], **reward), f"b{b}"))
    (first, second), (other, _) = runs
    assert all(np.isfinite(value) for row in (first, second) for value in row.values())
    figures = {figure.removesuffix("/a") for figure in first if figure.endswith("/a")} - {"tokens_share"}
    assert figures
    assert all(f"{figure}/{domain}" in row for row in (first, second) for figure in figures for domain in "ab")
    assert [first[f"{figure}/a"] for figure in figures] == [other[f"{figure}/a"] for figure in figures]
    assert [first[f"{figure}/b"] for figure in figures] != [other[f"{figure}/b"] for figure in figures]
    domains = Counter()
    for (mine, terms), (its, others) in zip(taught[0], taught[2], strict=True):
        domains[mine.prompt.domain] += 1
        agree = all(same(one.inputs[key], two.inputs[key]) for one, two in zip(terms, others) for key in one.inputs)
        assert agree == (mine.prompt.domain == "a")
        if agree:
            assert mine.turns[0].sampled_ids.tolist() == its.turns[0].sampled_ids.tolist()
    assert domains == {"a": 4, "b": 4}


@pytest.mark.parametrize(("controller", "settings"), [("horizon", {"start": 3}), ("curriculum", {"start": 2, "every": 1})])
def test_a_teacher_whose_domain_has_no_prompt_changes_nothing(train, echo, episode_recipe, controller, settings):
    """Episodes of one domain; the other one has a share of 0."""
    raw = episode_recipe(prompts={"type": "environment", "name": "echo", "domain": "a"})
    mine = raw["teachers"]["default"]
    runs = [
        train({**raw, **BRIEF, "steps": 2, "rollout": {controller: settings}, "teachers": {"a": mine, "b": b}}, str(number))
        for number, b in enumerate((mine, raw["student"]))
    ]
    assert runs[0] == runs[1]
    for row in runs[0]:
        assert (row["tokens_share/a"], row["tokens_share/b"], row["reverse_kl/a"]) == (1.0, 0.0, row["reverse_kl"])
        assert "reverse_kl/b" not in row


def test_figures_of_each_domain(two, train, taught):
    """Shares of the trained tokens add up; the mean over domains by these shares is the figure of all."""
    rows = train(two(steps=3))
    for row, step in zip(rows, taught):
        tokens = Counter()
        for rollout, _ in step:
            tokens[rollout.prompt.domain] += rollout.num_tokens
        shares = {domain: tokens[domain] / sum(tokens.values()) for domain in "ab"}
        assert all(row[f"tokens_share/{domain}"] == pytest.approx(share) for domain, share in shares.items())
        whole = sum(share * row[f"reverse_kl/{domain}"] for domain, share in shares.items())
        assert row["reverse_kl"] == pytest.approx(whole)


def test_a_single_teacher_has_no_figures_by_domain(two, train, folders):
    teachers = {"default": {"model": folders[1]}}
    assert not [name for row in train(two(steps=1, teachers=teachers)) for name in row if "/" in name]


def test_proportions_of_domains(two, train, taught, pools):
    prompts = {"type": "authored", "pools": pools, "proportions": {"a": 1, "b": 3}}
    train(two(steps=2, prompts=prompts))
    for step in taught:
        assert Counter(rollout.prompt.domain for rollout, _ in step) == {"a": 2, "b": 6}


def test_stride_with_two_teachers(two, train, taught, pools):
    """Each rollout is stopped by its own teacher's view; restarts are of prompts of either domain."""
    prompts = {"type": "authored", "pools": pools, "size": 2}
    stride = {"stride": {"stop_below": -25.0, "keep_above": None}}
    rows = train(two(steps=4, prompts=prompts, sampler={"chunk_tokens": 3}, rollout=stride))
    assert 0 < np.mean([row["stopped_rate"] for row in rows]) < 1
    restarted = Counter(one.prompt.domain for step in taught for one, _ in step if one.turns[0].num_reused)
    assert set(restarted) == {"a", "b"}
    assert all(0 < row["tokens_share/a"] < 1 and row["reverse_kl/a"] > 0 < row["reverse_kl/b"] for row in rows)


def test_group_rewards_with_refills_and_two_teachers(two, train, taught, verifier):
    """A dead group makes way for another prompt of its own domain."""
    terms = {"reverse_kl": {"form": "sampled"}, "group_reward": {"dead": "drop_and_refill", "max_refills": 3}}
    reward = {"outcome": verifier}
    rows = train(two(steps=4, terms=terms, reward=reward), "refilled")
    train(two(steps=4, terms={**terms, "group_reward": {}}, reward=reward), "kept")
    assert sum(row.get("dropped_groups", 0) for row in rows) > 0
    for step, before in zip(taught[:4], taught[4:], strict=True):
        assert [one.prompt.domain for one, _ in step] == [one.prompt.domain for one, _ in before]
    assert [one.prompt.id for one, _ in taught[0]] != [one.prompt.id for one, _ in taught[4]]


def test_a_resumed_run_sees_the_same_prompts(two, tmp_path, metrics_of):
    lasting = {"optimizer": {"lr": 1e-3}}
    opd.train(build_config(two(steps=6, **lasting)), tmp_path / "whole")
    opd.train(build_config(two(steps=3, **lasting)), tmp_path / "part")
    opd.train(build_config(two(steps=6, **lasting)), tmp_path / "part", resume=True)
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")


def test_a_changed_pool_is_noticed(raw_recipe, tmp_path, monkeypatch):
    path, run = tmp_path / "pool.jsonl", tmp_path / "run"
    write_pool(path, [Row(f"default-{place}", letter) for place, letter in enumerate("abcd")])
    raw = raw_recipe(**BRIEF, steps=2, prompts={"type": "authored", "path": str(path), "size": 4})
    opd.train(build_config(raw), run)
    began = json.loads((run / "env.json").read_text())["prompts"]
    write_pool(path, [Row(f"default-{place}", letter) for place, letter in enumerate("abcdef")])
    opd.train(build_config({**raw, "steps": 3}), run, resume=True)  # what is used is the same
    write_pool(path, [Row(f"default-{place}", letter) for place, letter in enumerate("abce")])
    monkeypatch.setattr("opd.assembly.load_student", None)  # nothing is loaded to find this out
    with pytest.raises(UserError, match=rf"^prompts: the run in .* began with the pool {began}, and it is \w{{32}} now;"):
        opd.train(build_config({**raw, "steps": 4}), run, resume=True)
    assert json.loads((run / "env.json").read_text())["prompts"] == began


def test_domains_without_a_teacher_are_refused_before_models_are_loaded(two, folders, tmp_path, raw_recipe):
    nowhere = {"a": {"model": "no/such"}, "c": {"model": "no/such"}}
    fix = "name teachers by the domains, or call a single one default"
    message = f"prompts: no teacher is called b: the domains are a, b and the teachers a, c; {fix}"
    with pytest.raises(UserError) as refusal:
        opd.train(build_config(two(teachers=nowhere)), tmp_path / "run")
    assert str(refusal.value) == message
    teachers = {"a": {"model": folders[1]}, "c": {"model": folders[2]}}
    with pytest.raises(UserError) as refusal:  # so does opd validate
        check_files(build_config(two(teachers=teachers)))
    assert str(refusal.value) == message
    single = {"a": {"model": "no/such"}}  # it takes prompts of its name, and those without a domain
    with pytest.raises(UserError) as refusal:
        opd.train(build_config(two(teachers=single)), tmp_path / "run")
    assert str(refusal.value) == f"prompts: no teacher is called b: the domains are a, b and the teachers a; {fix}"
    heldout = raw_recipe()["eval"]
    with pytest.raises(UserError, match=r"^eval.prompts: no teacher is called default: .* or set eval.kl_prompts=0$"):
        opd.train(build_config(two(eval=heldout)), tmp_path / "run")


def test_validation_reads_the_pool(two, pools):
    prompts = {"type": "authored", "pools": pools}
    check_files(build_config(two(prompts=prompts)))
    with pytest.raises(UserError, match=r"prompts.size is 9, but domain 'a' has 8 prompts"):
        check_files(build_config(two(prompts={**prompts, "size": 9})))
    with pytest.raises(UserError, match=r"prompts.order: reshuffle"):
        check_files(build_config(two(prompts={**prompts, "order": "reshuffle"}, batch={"prompts": 17})))


def test_validation_foresees_the_pools_of_the_tiny_family(two, pools, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    prompts = {"type": "authored", "pools": {"a": pools["a"], "addition": "tiny:addition-pool"}}
    with pytest.raises(UserError, match=r"^prompts: no teacher is called addition: the domains are a, addition and"):
        check_files(build_config(two(prompts=prompts)))
    teachers = {"a": {"model": folders[1]}, "addition": {"model": folders[2]}}
    check_files(build_config(two(prompts=prompts, teachers=teachers)))
    with pytest.raises(UserError, match=r"prompts.size is 9, but domain 'a' has 8 prompts"):
        check_files(build_config(two(prompts={**prompts, "size": 9}, teachers=teachers)))
    assert not (tmp_path / "cache").exists()


def test_a_run_reads_nothing_but_pool_and_models(two, pools, folders, tmp_path):
    """Of all files: those of Python and its packages, the machine's, the models', the pools', and the run's own; of the
    toolkit's folder, which may hold data, those that are code."""
    raw = two(steps=2)
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(json.dumps(raw))
    command = [sys.executable, str(Path(__file__).with_name("watched_run.py")), str(recipe), str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert not seen["datasets"]
    assert not seen["asked"]
    prefixes = (sys.prefix, sys.base_prefix)
    python = [*prefixes, *map(os.path.realpath, prefixes)]
    machine = ["/proc", "/sys", "/dev", "/etc", "/usr"]
    models = [raw["student"]["model"], folders[1], folders[2]]
    known = [*python, *machine, *models, *pools.values(), recipe, run, tmp_path / ".run.lock"]
    others = [Path(path) for path in seen["opened"] if not any(Path(path).is_relative_to(one) for one in known)]
    code, toolkit = (".py", ".pyc", ".jinja", ".yaml", ".css"), Path(opd.__file__).parents[1]
    assert [path for path in others if not (path.is_relative_to(toolkit) and path.suffix in code)] == []
    assert {*pools.values(), *(f"{folder}/config.json" for folder in models)} <= set(seen["opened"])


def test_no_token_is_the_sampled_one(recipe, train):
    """`k: 0` of the form `topk` is the form `sampled`, to the last bit."""
    switches = {"advantage_clip": 5.0, "baseline": "mean"}
    runs = [
        train(recipe(steps=3, terms={"reverse_kl": {**form, **switches}}), str(number))
        for number, form in enumerate(
            ({"form": "sampled"}, {"form": "topk", "k": 0}, {"form": "topk", "k": 0, "tail": "truncate"})
        )
    ]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0]["loss"] != 0


def test_accuracy_of_each_domain(two, train, tmp_path):
    """Of held-out problems of several domains; rows say which."""
    heldout = tmp_path / "heldout.jsonl"
    problems = [("b", "k"), ("a", "m"), ("a", "n")]
    rows = [{"problem": text, "domain": domain, "answer": "1"} for domain, text in problems]
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def first(response, answer, row):\n    return row['messages'][0]['content'] == 'm'\n")
    prompts = {"path": str(heldout), "columns": {"prompt": "problem"}}
    train(two(steps=1, eval={"prompts": prompts, "reward": f"{verifier}:first", "kl_prompts": 3}))
    found = json.loads((tmp_path / "run/eval/step-1.json").read_text())
    assert [row["domain"] for row in found["rows"]] == ["b", "a", "a"]
    assert (found["accuracy"], found["accuracy/a"], found["accuracy/b"]) == (pytest.approx(1 / 3), 0.5, 0.0)
    assert found["reverse_kl/a"] != found["reverse_kl/b"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())["eval"]["after"]
    assert (summary["accuracy/a"], summary["accuracy/b"]) == (0.5, 0.0)


def test_two_processes_agree_on_each_domain(two, tmp_path, metrics_of):
    """Though one of them may have micro-batches of a domain that the other lacks."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(two(steps=2, batch={"prompts": 3, "rollouts_per_prompt": 1})))
    for count in ("1", "2"):
        command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(tmp_path / count), "--processes", count]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for one, both in zip(metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2"), strict=True):
        names = [name for name in one if name.endswith(("/a", "/b"))]
        assert {"reverse_kl/a", "reverse_kl/b", "tokens_share/a"} <= set(names)
        assert {name: both[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-5, abs=1e-6)
