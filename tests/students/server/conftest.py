"""Rollout servers on micro models behind real HTTP; `Live` is the teachers' own."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.records import SampleRequest, Sampling
from opd.students.server.app import StudentServer
from opd.students.server.model import ServedStudent
from opd.students.server.options import StudentOptions
from opd.students.weights import write_weights
from opd.teachers.server.base import Limits
from tests.teachers.conftest import Live

CONTEXT = np.array([3, 9, 7, 12], np.int32)


@pytest.fixture
def student(model_folder):
    """What the trainer has."""
    return AutoModelForCausalLM.from_pretrained(model_folder(1), dtype=torch.float32)


@pytest.fixture
def weights(student, tmp_path):
    """(path, digest) of its weights."""
    path = tmp_path / "weights.safetensors"
    digest = write_weights(student, path, torch.float32, 41)
    return path, digest


@pytest.fixture
def serve(model_folder):
    """`serve(token=None, limits..., **options)`: a running server of another model of the same kind."""
    started = []

    def start(token=None, limits=None, **options) -> Live:
        model = ServedStudent.load(StudentOptions(str(model_folder(0)), device="cpu", dtype="float32", **options))
        server: Any = StudentServer(model, token=token, limits=limits or Limits(body_bytes=2**16))
        live = Live(server)
        live.start()
        started.append(live)
        return live

    yield start
    for live in started:
        if not live.stopped:
            live.stop(grace_s=5.0)


def request(n=8, **changes) -> SampleRequest:
    return SampleRequest(**({"context_ids": CONTEXT, "seed": 7, "max_new_tokens": n, "sampling": Sampling()} | changes))
