"""A real checkpoint behind a real server: answers as in process, chunk by chunk as whole, and a run whose KL is zero."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import opd
from opd.records import ScoreRequest
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import TeacherConfig
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.stream import ScoreStream

FOLDER = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
TEXT = "To find the area of a triangle, multiply its base by its height and take half of it. The base is 12, so " * 3


@pytest.fixture(scope="module")
def model():
    return str(FOLDER / "smollm2")


@pytest.fixture(scope="module")
def url(model):
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", model, "--port", "0", "--dtype", "float32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split(" at ")[1].split()[0]
        server.terminate()


@pytest.fixture(scope="module")
def here(model):
    loaded = HFModel("teachers.t.model", model, dtype="float32", device=torch.device("cpu"), chunk_bytes=2**26)
    return HFTeacher("t", loaded, View(loaded.head.num_rows))


@pytest.fixture(scope="module")
def there(url, here):
    return ServedTeacher.connect("t", TeacherConfig(url=url), here.view.vocab)


def test_answers_are_those_in_process(here, there):
    ids = np.array(there.tokenizer()(TEXT)["input_ids"], np.int32)
    context, tokens = ids[:9], ids[9:]
    asked = np.stack([tokens, np.roll(tokens, 1)], axis=1)
    requests = [
        ScoreRequest(context, tokens, temperature=0.7),
        ScoreRequest(context, tokens, k=64),
        ScoreRequest(context, tokens, ids=asked, k=4),
        ScoreRequest(context, tokens, hidden=True),
    ]

    async def ask(teacher):
        answers = await asyncio.gather(*(teacher.score(request) for request in requests))
        await teacher.close()
        return answers

    for mine, other in zip(asyncio.run(ask(here)), asyncio.run(ask(there))):
        for name in ("logps", "topk_logps", "tail", "hidden"):
            one, two = getattr(mine, name), getattr(other, name)
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(torch.as_tensor(two), torch.as_tensor(one), atol=2e-4, rtol=1e-4)
    head = there.load_head()
    assert torch.equal(head.weight, here.head.weight)


def test_chunks_are_scored_as_the_whole(here, there):
    ids = np.array(there.tokenizer()(TEXT)["input_ids"], np.int32)
    whole = asyncio.run(here.score(ScoreRequest(ids[:9], ids[9:])))

    async def chunked():
        stream = ScoreStream(there, ids[:9])
        parts = [await stream.append(a, ids[a : a + 16]) for a in range(9, len(ids), 16)]
        again = await stream.append(20, ids[20:40])  # a rewind
        await there.close()
        return parts, again

    parts, again = asyncio.run(chunked())
    assert whole.logps is not None
    assert again.logps is not None
    np.testing.assert_allclose(np.concatenate([part.logps for part in parts]), whole.logps, atol=2e-4)  # type: ignore[arg-type]
    np.testing.assert_allclose(again.logps, whole.logps[11:31], atol=2e-4)


@pytest.mark.parametrize("form", ["sampled", "topk", "full"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(model, url, tmp_path, form):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"problem": "What is 7 + 8?"}) + "\n" + json.dumps({"problem": "Name a prime."}) + "\n")
    overrides = [
        "steps=1",
        f"student.model={model}",
        f"teachers.default.url={url}",
        f"prompts.path={prompts}",
        "batch.prompts=2",
        "sampling.max_new_tokens=24",
        "sampling.temperature=0.7",
        f"terms.reverse_kl.form={form}",
        "optimizer.lr=0",
        "objective.precision=float32",
        "checkpoint.every=0",
    ]
    opd.train(opd.load_config("reverse-kl", overrides), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert abs(row["reverse_kl_sampled" if form == "sampled" else "reverse_kl"]) < 1e-6
