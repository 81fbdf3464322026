"""A recipe's teachers, wherever they are: bases are shared, facts are the same in process and over a server."""

import asyncio
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from opd.clock import Clock
from opd.errors import UserError
from opd.records import ScoreRequest
from opd.teachers.config import TeacherConfig
from opd.teachers.hf import HFTeacher
from opd.teachers.opening import connect, facts_of, open_teachers
from opd.teachers.pool import TeacherPool

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(model_folder):
    return model_folder(0)


@pytest.fixture(scope="module")
def adapters(micro_model, tmp_path_factory):
    """Folders of two random LoRA adapters over the base."""
    folders = {}
    for seed, name in enumerate(("maths", "code")):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folders[name] = str(tmp_path_factory.mktemp(name))
        with warnings.catch_warnings():  # peft asks transformers for a property that it renamed
            warnings.simplefilter("ignore")
            get_peft_model(micro_model(0), config).save_pretrained(folders[name], save_embedding_layers=False)
    return folders


@pytest.fixture(scope="module")
def with_adapters(base, adapters, load_served):
    return load_served(base, adapters=adapters)


@pytest.fixture
def url(with_adapters, live):
    """Address of a running server of the base with both adapters."""
    return f"http://127.0.0.1:{live(with_adapters).server.port}"


def pool_of(configs, vocab: int):
    served = connect(configs)
    opened = open_teachers(configs, served, dict.fromkeys(configs, vocab), CPU, 2**20, lambda: False, Clock())
    return TeacherPool(opened), served


def test_adapters_in_process_share_their_base(base, adapters, vocab):
    configs = {name: TeacherConfig(model=str(base), adapter=folder) for name, folder in adapters.items()}
    pool, _ = pool_of({**configs, "plain": TeacherConfig(model=str(base), logp_floor=-3.0)}, vocab)
    teachers: dict[str, Any] = dict(pool.teachers)
    assert all(isinstance(teacher, HFTeacher) for teacher in teachers.values())
    assert len({id(teacher.model) for teacher in teachers.values()}) == 1
    assert [teachers[name].view.logp_floor for name in ("maths", "plain")] == [-30.0, -3.0]
    other, _ = pool_of({"a": TeacherConfig(model=str(base)), "b": TeacherConfig(model=str(base), dtype="bfloat16")}, vocab)
    separate: dict[str, Any] = dict(other.teachers)
    assert separate["a"].model is not separate["b"].model


def test_adapters_behind_a_server_are_those_in_process(base, adapters, vocab, url):
    """Each teacher asks for the adapter of its name; all of them share one head."""
    here = {name: TeacherConfig(model=str(base), adapter=folder) for name, folder in adapters.items()}
    there = {name: replace(config, url=url) for name, config in here.items()} | {"plain": TeacherConfig(url=url)}
    ours, _ = pool_of({**here, "plain": TeacherConfig(model=str(base))}, vocab)
    theirs, served = pool_of(there, vocab)
    assert len(theirs.heads(CPU)) == 1
    assert len(set(theirs.digests.values())) == 3
    request = ScoreRequest(np.array([1, 5, 6], np.int32), np.array([7, 8, 2], np.int32), k=4)

    async def ask(pool):
        answers = {name: await pool.score(name, request) for name in there}
        await pool.close()
        return answers

    mine, other = asyncio.run(ask(ours)), asyncio.run(ask(theirs))
    for name in there:
        np.testing.assert_allclose(other[name].logps, mine[name].logps, atol=1e-5)
        np.testing.assert_allclose(other[name].topk_logps, mine[name].topk_logps, atol=1e-5)
    assert np.abs(mine["maths"].logps - mine["plain"].logps).max() > 1e-3
    assert served["maths"].model == "maths"


def test_the_same_facts_here_and_there(base, url):
    config = TeacherConfig(model=str(base), url=url)
    here = facts_of("t", replace(config, url=None), {})
    there = facts_of("t", config, connect({"t": config}))
    assert there.tokenizer.get_vocab() == here.tokenizer.get_vocab()
    assert there.tokenizer.chat_template == here.tokenizer.chat_template
    assert (there.eos_ids, there.max_context, there.num_rows) == (here.eos_ids, here.max_context, here.num_rows)
    assert (here.field, there.field) == ("teachers.t.model", "teachers.t.url")


def test_too_few_ids_are_refused_wherever_the_teacher_is(base, url):
    for config in (TeacherConfig(model=str(base)), TeacherConfig(url=url)):
        with pytest.raises(UserError, match=r"teachers\.t\.\w+: its output head has 45 rows for the 46 ids of the student"):
            pool_of({"t": config}, 46)
