"""A stand-in for the Python of an environment with vLLM, and a model that it serves."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

from opd.teachers.server.options import ServeOptions, VLLMOptions
from opd.teachers.vllm.model import VLLMModel
from opd.teachers.vllm.process import EngineProcess

FAKE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture(scope="session")
def table():
    """[R, R]: the engine's log-probs of the next token after each."""
    spec = importlib.util.spec_from_file_location("fake_engine", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.table()


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory):
    """Called as `python -I engine.py FD`, it runs the child around a table; see `fake_engine`."""
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {FAKE} "$3" "$2"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def engine_log(tmp_path, monkeypatch):
    """`engine_log(text)`: waits until the engine has said so."""
    path = tmp_path / "log"
    monkeypatch.setenv("OPD_FAKE_LOG", str(path))

    def wait(text: str) -> None:
        deadline = time.monotonic() + 20
        while not path.exists() or text not in path.read_text().splitlines():
            assert time.monotonic() < deadline, path.read_text() if path.exists() else "nothing was said"
            time.sleep(0.01)

    return wait


@pytest.fixture
def engine(fake_python):
    """A process that waits for `start`."""
    process = EngineProcess(fake_python)
    yield process
    process.close()


@pytest.fixture
def options(model_folder, fake_python):
    """`options(max_logprobs=20, ..., **of_the_server)`: of a server on vLLM."""
    folder = str(model_folder(0))

    def build(max_logprobs: int = 20, max_model_len: int = 64, quantization=None, **others) -> ServeOptions:
        own = VLLMOptions(fake_python, max_logprobs, max_model_len, quantization=quantization)
        return ServeOptions(folder, backend="vllm", max_batch_tokens=2048, vllm=own, **others)

    return build


@pytest.fixture
def load(options):
    """`load(...)`: such a model; it is closed afterwards."""
    loaded = []

    def run(*args, **others) -> VLLMModel:
        loaded.append(VLLMModel.load(options(*args, **others)))
        return loaded[-1]

    yield run
    for model in loaded:
        model.close()
