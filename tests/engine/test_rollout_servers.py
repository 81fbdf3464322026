"""The student on `opd serve student`: the run that it gives in process, also when servers fail."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from omegaconf import OmegaConf

import opd
from opd.config import build_config
from opd.errors import UserError
from opd.students.client.sampler import RemoteSampler
from tests.engine.test_served import serving


@contextlib.contextmanager
def sampling(model, *options, port=0):
    """A rollout server's process and its address."""
    command = [sys.executable, "-m", "opd", "serve", "student", "--model", str(model), "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, re.findall(r"http://\S+", server.stdout.readline())[0]
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url(raw_recipe):
    with sampling(raw_recipe()["student"]["model"], "--dtype", "float32") as (_, address):
        yield address


def close(mine, other):
    assert len(mine) == len(other)
    for a, b in zip(mine, other):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_same_metrics_as_in_process(raw_recipe, train, url, lookahead):
    """Weights change with each step, and with lookahead while rollouts are under way."""
    raw = raw_recipe(lookahead=lookahead, sampling={"max_new_tokens": 12, "temperature": 0.8})
    here = train(raw, "here")
    there = train({**raw, "sampler": {"url": url}}, "there")
    if lookahead:  # the sampler in process begins before the update, the server while it runs: with the same weights
        assert [row.get("staleness") for row in there] == [row.get("staleness") for row in here]
    close(here, there)


def test_adapters_travel_merged(raw_recipe, train, url):
    raw = raw_recipe(student={**raw_recipe()["student"], "lora": {"r": 4}}, steps=3, eval={})
    close(train(raw, "here"), train({**raw, "sampler": {"url": url}}, "there"))


def test_stops_and_restarts(raw_recipe, train, url):
    """A controller stops turns on the server; what depends on when the stop arrives is only what is thrown away."""
    raw = raw_recipe(steps=3, eval={}, rollout={"early_stop": {"stop_below": -2.0}}, sampler={"chunk_tokens": 2})
    here = train(raw, "here")
    there = train({**raw, "sampler": {"url": url, "chunk_tokens": 2}}, "there")
    for a, b in zip(here, there):
        for name in ("loss", "grad_norm", "sampled_tokens"):
            assert b[name] == pytest.approx(a[name], abs=1e-5, rel=1e-5)


def test_a_skipped_sync_is_found_out(raw_recipe, train, url, monkeypatch):
    send, calls = RemoteSampler.sync, []

    def skip_third(self, student, version):
        calls.append(version)
        if version == 2:
            self.version = version
            return
        send(self, student, version)

    monkeypatch.setattr(RemoteSampler, "sync", skip_third)
    raw = raw_recipe(eval={}, optimizer={"lr": 0.1}, sampler={"url": url})
    with pytest.raises(UserError, match=r"sampler\.max_mismatch: the servers' log-probs .* differ .* by \d\.\d+ nats"):
        train(raw, "run")
    assert calls[-1] == 2


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_server_that_is_killed_and_started_anew(raw_recipe, train):
    """It lost the weights, and turns in the middle: they go on from the tokens that had come."""
    raw = raw_recipe(steps=8, sampling={"max_new_tokens": 40})
    quiet = train(raw, "quiet")
    model, port = raw["student"]["model"], free_port()
    with contextlib.ExitStack() as servers:
        first, address = servers.enter_context(sampling(model, "--dtype", "float32", "--chunk-tokens", "2", port=port))

        def swap():
            time.sleep(2.0)
            first.send_signal(signal.SIGKILL)
            first.wait()
            servers.enter_context(sampling(model, "--dtype", "float32", port=port))

        swapping = threading.Thread(target=swap)
        swapping.start()
        noisy = train({**raw, "sampler": {"url": address}}, "noisy")
        swapping.join()
    close(quiet, noisy)


def test_nobody_samples(raw_recipe, tmp_path):
    """The run stops within its deadline with one line, and goes on where it was."""
    raw = raw_recipe(steps=40, eval={}, checkpoint={"every": 1})
    model = raw["student"]["model"]
    with sampling(model, "--dtype", "float32") as (server, address):
        raw["sampler"] = {"url": address, "timeout_s": 1.0, "deadline_s": 2.0}

        def kill():
            end = time.monotonic() + 30
            while not list((tmp_path / "run").glob("checkpoints/step-2")) and time.monotonic() < end:
                time.sleep(0.02)
            server.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        with pytest.raises(UserError, match=rf"sampler\.url: no .* within 2 s \({address}: .*start .*opd serve student"):
            opd.train(build_config(raw), tmp_path / "run")
        killing.join()
    with sampling(model, "--dtype", "float32") as (_, address):
        raw["sampler"]["url"], raw["steps"] = address, 40
        opd.train(build_config(raw), tmp_path / "run", resume=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 40


def test_two_processes_with_servers_equal_one(raw_recipe, tmp_path, metrics_of, url):
    raw = raw_recipe(steps=4, eval={})
    with serving(raw["teachers"]["default"]["model"]) as (_, teacher):
        raw |= {"teachers": {"default": {"url": teacher}}, "sampler": {"url": url}}
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
        for count in (1, 2):
            command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(tmp_path / str(count))]
            done = subprocess.run([*command, "--processes", str(count)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    one, two = metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2")
    assert len(one) == len(two) == 4
    for a, b in zip(one, two):
        for name in ("loss", "grad_norm", "entropy"):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6)
        assert a["sampled_tokens"] == b["sampled_tokens"]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"url": "http://127.0.0.1:1", "deadline_s": 1.0, "timeout_s": 0.5}, "no answer within 1 s"),
        ({"url": "127.0.0.1:8500"}, "must begin with http"),
        ({"url": "{}", "token_file": "/no/such/file"}, r"sampler\.token_file: .* cannot be read"),
    ],
)
def test_mistakes_are_named(raw_recipe, train, url, sampler, message):
    sampler = {**sampler, "url": sampler["url"].format(url)}
    with pytest.raises(UserError, match=message):
        train(raw_recipe(sampler=sampler), "run")


def test_another_model_is_refused(raw_recipe, aligned_recipe, train, url):
    with pytest.raises(UserError, match=r"sampler\.url: .* has .* than student\.model"):
        train({**aligned_recipe(terms={"shared_topk": {"k": 5}}), "sampler": {"url": url}}, "run")


def test_a_teacher_server_is_no_rollout_server(raw_recipe, train):
    refused = pytest.raises(UserError, match="is no rollout server: start one with opd serve student")
    with serving(raw_recipe()["student"]["model"]) as (_, teacher), refused:
        train(raw_recipe(sampler={"url": teacher}), "run")


def test_prompts_are_in_no_metric(url):
    import urllib.request

    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert "opd_weight_syncs_total" in text
    assert json.loads(urllib.request.urlopen(f"{url}/v1/info").read())["kind"] == "student"
