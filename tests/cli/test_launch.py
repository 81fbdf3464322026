"""`opd launch` from end to end on micro models."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

OPD = [sys.executable, "-m", "opd"]


@pytest.fixture
def recipe(model_folder, tmp_path):
    """A recipe file whose teacher is to be served at a free port, and that address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "prompts.jsonl").write_text('{"problem": "abc"}\n{"problem": "de"}\n')
    raw = {
        "steps": 2,
        "student": {"model": str(model_folder(0))},
        "teachers": {"default": {"model": str(model_folder(1)), "url": url}},
        "prompts": {"path": str(tmp_path / "prompts.jsonl"), "columns": {"prompt": "problem"}},
        "batch": {"prompts": 2},
        "sampling": {"max_new_tokens": 8},
        "terms": {"reverse_kl": {"form": "full"}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    return path, url


def launch(*words):
    return subprocess.run([*OPD, "launch", *map(str, words)], capture_output=True, text=True, timeout=240)


def answers(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_it_serves_trains_and_stops(recipe, tmp_path):
    path, url = recipe
    done = launch(path, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    assert "1 server ready" in done.stderr
    assert "serving" in next((tmp_path / "run-servers").iterdir()).read_text()
    assert not answers(url)


def test_it_serves_the_rollouts_as_well(recipe, tmp_path):
    path, url = recipe
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        sampler = f"http://127.0.0.1:{probe.getsockname()[1]}"
    done = launch(path, f"sampler.url={sampler}", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert f"starting sampler at {sampler}" in done.stderr
    assert "2 servers ready" in done.stderr
    log = tmp_path / "run-servers" / f"{sampler.rpartition(':')[2]}.log"
    assert "weights" in log.read_text()
    assert not answers(url)
    assert not answers(sampler)


def test_a_failed_training_stops_the_servers_and_keeps_its_exit_code(recipe, tmp_path):
    path, url = recipe
    done = launch(path, "sampling.max_context=2", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "error: sampling.max_context" in done.stderr
    assert not answers(url)


def test_the_commands_alone(recipe, tmp_path):
    path, url = recipe
    done = launch(path, "--dry-run")
    assert done.returncode == 0
    assert "opd serve teacher --model" in done.stdout
    assert not answers(url)
    assert not list(tmp_path.glob("*servers"))


def test_without_a_server_to_start_it_says_so(recipe):
    path, _ = recipe
    done = launch(path, "teachers.default.url=null")
    assert done.returncode == 2
    assert done.stderr.startswith("error: teachers: the recipe names no server; set teachers.NAME.url=")


def test_an_address_in_use_is_refused(recipe, tmp_path):
    path, url = recipe
    model = OmegaConf.load(path).teachers.default.model
    port = url.rpartition(":")[2]
    with subprocess.Popen([*OPD, "serve", "teacher", "--model", model, "--port", port], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        done = launch(path, "--out", tmp_path / "run")
        server.kill()
    assert done.returncode == 2
    assert f"{url} is served already" in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_launch_that_is_ended_leaves_nothing_behind(recipe, tmp_path, sent):
    path, url = recipe
    command = [*OPD, "launch", str(path), "steps=100000", "--out", str(tmp_path / "run")]
    launched = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() or launched.poll() is not None)
    assert len(processes_of(tmp_path / "run")) == 2  # the launch and the trainer
    launched.send_signal(sent)
    assert launched.wait(60) == (-9 if sent == signal.SIGKILL else 143)
    wait_for(lambda: not answers(url))
    wait_for(lambda: not processes_of(tmp_path / "run"), seconds=10)  # a trainer without its teacher waits for minutes


def test_a_server_that_ends_while_training_is_named(recipe, tmp_path):
    path, url = recipe
    settings = ["steps=100000", "teachers.default.timeout_s=1", "teachers.default.deadline_s=2"]
    command = [*OPD, "launch", str(path), *settings, "--out", str(tmp_path / "run")]
    launched = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)  # the server was started first
    _, said = launched.communicate(timeout=60)
    assert launched.returncode == 2
    assert f"the server at {url} ended: serving" in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "--resume" in errors[0]
    assert "Traceback" not in said
    assert "never retrieved" not in said


def wait_for(done, seconds=60.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def processes_of(out):
    """Processes that were started to write into this run's directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if str(out).encode() in words:
            found.append(process.name)
    return found
