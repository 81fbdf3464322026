"""`opd push` against a small stand-in for the hub on the loopback address, which records what it is asked."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from opd.errors import UserError
from opd.push import files_to_push, find_model, local_base, push

COMMAND = """
import sys, typer
from opd.cli import push
from opd.errors import UserError
app = typer.Typer(pretty_exceptions_enable=False)
push.add_to(app)
try:
    app()
except UserError as error:
    sys.exit(f"error: {error}")
"""


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.calls, self.refuse = [], None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        hub: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        hub.calls.append((self.path, self.headers.get("Authorization"), body))
        if hub.refuse:
            return self.answer(hub.refuse, {"error": "You have no rights here"})
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        commit = {"commitUrl": f"{hub.url}/me/model/commit/0123", "commitOid": "0123", "url": f"{hub.url}/me/model"}
        self.answer(200, commit | {"errors": [], "warnings": []})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(tmp_path):
    """A run's directory with two checkpoints, the last one not whole."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (5, 10, 20):
        (folder / f"step-{step}" / "trainer").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "trainer/optimizer.safetensors", "odd [1]*.txt"):
            (folder / f"step-{step}" / name).write_text(json.dumps({"step": step}))
        (folder / f"step-{step}" / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
        if step != 20:
            (folder / f"step-{step}" / "trainer" / "state.json").write_text("{}")
    return tmp_path / "run"


def opd_push(*arguments, **environment):
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_run_is_pushed_without_its_training_state(hub, run):
    done = opd_push(
        run, "--repo", "me/model", "--private", "--revision", "try", "--message", "Step ten", HF_ENDPOINT=hub.url
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.url}/me/model/commit/0123"
    paths = [path for path, _, _ in hub.calls]
    assert paths[0] == "/api/repos/create"
    assert json.loads(hub.calls[0][2]).items() >= {"name": "model", "organization": "me"}.items()
    assert "private" in hub.calls[0][2]
    assert "/api/models/me/model/branch/try" in paths
    assert {token for _, token, _ in hub.calls} == {"Bearer hf_test"}
    commit = next(body for path, _, body in hub.calls if path.startswith("/api/models/me/model/commit/try"))
    lines = [json.loads(line) for line in commit.splitlines()]
    assert lines[0]["value"]["summary"] == "Step ten"
    files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines[1:]}
    assert set(files) == {"README.md", "config.json", "model.safetensors", "odd [1]*.txt"}
    assert json.loads(files["config.json"]) == {"step": 10}


def test_dry_run_lists_the_files_and_asks_nobody(hub, run):
    done = opd_push(run / "checkpoints" / "step-5", "--repo", "me/model", "--dry-run", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[:3]] == ["README.md", "config.json", "model.safetensors"]
    assert "trainer" not in done.stdout
    assert not hub.calls


@pytest.mark.parametrize(("status", "message"), [(403, "no rights here"), (401, "hf auth login")])
def test_a_refusal_is_one_line(hub, run, status, message):
    hub.refuse = status
    done = opd_push(run, "--repo", "me/model", HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "error: --repo: the hub refused me/model" in done.stderr
    assert message in done.stderr


def test_an_endpoint_that_nobody_serves_is_one_line(run):
    done = opd_push(run, "--repo", "me/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert len(done.stderr.splitlines()) == 1
    assert "error: --repo: me/model could not be written to http://127.0.0.1:9" in done.stderr


def test_mistakes_that_need_no_hub(run, tmp_path):
    with pytest.raises(UserError, match="no model and no run"):
        find_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no weights"):
        files_to_push(find_model(tmp_path / "empty"))
    with pytest.raises(UserError, match="--repo: "):
        push(run / "checkpoints" / "step-5", "not/a/name")
    with pytest.raises(UserError, match="could not be written"):
        push(run / "checkpoints" / "step-5", "me/model")  # tests run with HF_HUB_OFFLINE=1


@pytest.mark.parametrize(("base", "local"), [("Qwen/Qwen2.5-0.5B", False), ("/models/qwen", True), ("qwen", True)])
def test_the_base_of_an_adapter_must_be_within_reach(tmp_path, base, local):
    assert local_base(tmp_path) is None
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert local_base(tmp_path) == (base if local else None)
