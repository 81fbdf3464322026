"""A teacher behind `opd serve teacher` gives the run that the same teacher gives in process."""

import contextlib
import signal
import subprocess
import sys

import pytest

import opd
from opd.config import build_config
from opd.errors import UserError

FORMS = {
    "sampled": {"form": "sampled", "advantage_clip": 5.0},
    "topk-student": {"form": "topk", "k": 6, "source": "student"},
    "topk-union": {"form": "topk", "k": 4, "source": "union", "tail": "renormalise"},
    "full": {"form": "full"},
}


@contextlib.contextmanager
def serving(model, *options):
    """A server process and its address."""
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().split(" at ")[1].split()[0]
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url(raw_recipe):
    with serving(raw_recipe()["teachers"]["default"]["model"]) as (_, address):
        yield address


@pytest.fixture(scope="module")
def own_url(raw_recipe):
    with serving(raw_recipe()["student"]["model"]) as (_, address):
        yield address


def train(recipe, out, metrics_of, **options):
    opd.train(build_config(recipe), out, **options)
    return metrics_of(out)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_metrics_as_in_process(raw_recipe, tmp_path, metrics_of, url, form, temperature):
    settings = {"terms": {"reverse_kl": FORMS[form]}, "sampling": {"max_new_tokens": 12, "temperature": temperature}}
    here = train(raw_recipe(**settings), tmp_path / "here", metrics_of)
    teachers = {"default": {"url": url}}
    there = train(raw_recipe(**settings, teachers=teachers), tmp_path / "there", metrics_of)
    assert len(here) == len(there) == 6
    for mine, other in zip(here, there):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["here", "there"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    raw_recipe, tmp_path, metrics_of, own_url, form, temperature, where
):
    own = {"model": raw_recipe()["student"]["model"]} if where == "here" else {"url": own_url}
    recipe = raw_recipe(
        steps=2,
        teachers={"default": own},
        terms={"reverse_kl": FORMS[form]},
        sampling={"max_new_tokens": 12, "temperature": temperature},
        optimizer={"lr": 0.0},
        eval={},
    )
    for row in train(recipe, tmp_path / "run", metrics_of):
        kl = row["reverse_kl_sampled" if form == "sampled" else "reverse_kl"]
        assert abs(kl) < 1e-6
        assert abs(row.get("advantage", 0.0)) < 1e-6


def test_another_tokenizer_behind_servers(aligned_recipe, tmp_path, metrics_of):
    """Tokenizers come from the servers; scores of aligned text are those of models in process."""
    terms = {"compass": {"alpha": 0.5, "beta": 0.3}, "shared_topk": {"k": 5}, "reverse_kl": {"form": "sampled", "coef": 0.1}}
    settings = {"terms": terms, "sampling": {"max_new_tokens": 12, "temperature": 0.7}, "steps": 4}
    here = aligned_recipe(**settings)
    teacher = here["teachers"]["default"]
    with serving(teacher["model"]) as (_, strong), serving(teacher["weak_reference"]["model"]) as (_, weak):
        teachers = {"default": {"url": strong, "weak_reference": {"url": weak}}}
        there = train(aligned_recipe(**settings, teachers=teachers), tmp_path / "there", metrics_of)
    for mine, other in zip(train(here, tmp_path / "here", metrics_of), there, strict=True):
        assert mine.keys() == other.keys()
        assert mine["align/byte_coverage"] == 1.0
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


def test_a_run_may_be_resumed_at_another_address_but_not_with_another_teacher(
    raw_recipe, tmp_path, metrics_of, url, own_url
):
    whole = train(raw_recipe(teachers={"default": {"url": url}}), tmp_path / "whole", metrics_of)
    train(raw_recipe(teachers={"default": {"url": url}}, steps=4, optimizer={"lr": 1e-3}), tmp_path / "part", metrics_of)
    with pytest.raises(UserError, match=r"teachers\.default\.url: the run began with weights \w+, and \w+ are served now"):
        opd.train(
            build_config(raw_recipe(teachers={"default": {"url": own_url}}, optimizer={"lr": 1e-3})),
            tmp_path / "part",
            resume=True,
        )
    with serving(raw_recipe()["teachers"]["default"]["model"]) as (_, moved):
        recipe = raw_recipe(teachers={"default": {"url": moved}}, optimizer={"lr": 1e-3})
        assert len(train(recipe, tmp_path / "part", metrics_of, resume=True)) == len(whole)


def test_a_replica_that_is_killed_is_not_missed(raw_recipe, tmp_path, metrics_of, url):
    """One of two replicas is killed in the middle: the metrics are those of a quiet run."""
    quiet = train(raw_recipe(steps=8), tmp_path / "quiet", metrics_of)
    with serving(raw_recipe()["teachers"]["default"]["model"]) as (server, second):
        run = tmp_path / "run"
        kill_after_step(run, 3, server)
        recipe = raw_recipe(steps=8, teachers={"default": {"url": f"{second},{url}"}})
        rows = train(recipe, run, metrics_of)
        assert server.wait(5) == -signal.SIGKILL
    for mine, other in zip(quiet, rows, strict=True):
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


def kill_after_step(run, step, *servers):
    """Kills the servers once `step` is written down."""
    import threading
    import time

    def watch():
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            time.sleep(0.002)
        for server in servers:
            server.kill()

    threading.Thread(target=watch, daemon=True).start()


def test_all_replicas_dead_stops_the_run_which_can_be_resumed(raw_recipe, tmp_path, metrics_of):
    model = raw_recipe()["teachers"]["default"]["model"]
    quiet = train(raw_recipe(steps=8, optimizer={"lr": 1e-3}), tmp_path / "quiet", metrics_of)
    run = tmp_path / "run"
    patience = {"timeout_s": 2.0, "deadline_s": 3.0}
    with serving(model) as (one, first), serving(model) as (two, second):
        kill_after_step(run, 3, one, two)
        recipe = raw_recipe(steps=8, optimizer={"lr": 1e-3}, teachers={"default": {"url": f"{first},{second}", **patience}})
        with pytest.raises(UserError) as caught:
            opd.train(build_config(recipe), run)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("teachers.default.url", first, second, "--resume"):
        assert part in message
    with serving(model) as (_, third):
        recipe = raw_recipe(steps=8, optimizer={"lr": 1e-3}, teachers={"default": {"url": third}})
        rows = train(recipe, run, metrics_of, resume=True)
    for mine, other in zip(quiet, rows, strict=True):
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
