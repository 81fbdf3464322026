"""A mixture-of-experts model that is served whole and with fewer active experts, and a client of each."""

import asyncio
import json
import warnings
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.errors import UserError
from opd.records import ScoreRequest, Scores
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import TeacherConfig
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.stream import ScoreStream

NUMBERS = {"weak": 1, "half": 2, "weak-again": 1}


@pytest.fixture(scope="module")
def moe(moe_folder, load_served):
    return load_served(moe_folder, active_experts=NUMBERS)


@pytest.fixture(scope="module")
def local(moe_folder, vocab):
    """`local(number)`: the teacher with so many active experts in this process, over a model of its own."""

    def build(number: int | None = None) -> HFTeacher:
        model = HFModel("teachers.t.model", str(moe_folder), device=torch.device("cpu"), chunk_bytes=2**20)
        return HFTeacher("t", model, View(vocab, active_experts=number))

    return build


def same(ours: Scores, theirs: Scores, rows: slice = slice(None)) -> None:
    assert ours.logps is not None
    assert theirs.logps is not None
    np.testing.assert_allclose(ours.logps, theirs.logps[rows], rtol=0, atol=1e-5)


def test_digests(moe, moe_folder, load_served):
    assert list(moe.weights) == ["base", "weak", "half", "weak-again"]
    assert len({moe.weights["base"], moe.weights["weak"], moe.weights["half"]}) == 3
    assert moe.weights["weak"] == moe.weights["weak-again"]
    assert load_served(moe_folder).weights == {"base": moe.weights["base"]}


def test_clients_of_strong_and_weak_at_once(live, moe, local, ask, vocab):
    server = live(moe)
    shared = {"model": "x", "url": server.url}
    configs = {
        "default": TeacherConfig(**shared),
        "weak": TeacherConfig(**shared, active_experts=1),
        "other": TeacherConfig(url=server.url, served_as="half"),
    }
    teachers = {name: ServedTeacher.connect(name, config, vocab) for name, config in configs.items()}
    exact = {"default": local(), "weak": local(1), "other": local(2)}
    requests = [ask(i, 4, 6 + i, k=3).request for i in range(8)]

    async def at_once() -> list[list[Scores]]:
        work = [asyncio.gather(*(teachers[name].score(request) for name in teachers)) for request in requests]
        answers = await asyncio.gather(*work)
        for teacher in teachers.values():
            await teacher.close()
        return answers

    async def alone(name: str, request: ScoreRequest) -> Scores:
        return await exact[name].score(request)

    for request, answers in zip(requests, asyncio.run(at_once()), strict=True):
        for name, answer in zip(teachers, answers, strict=True):
            same(answer, asyncio.run(alone(name, request)))
        strong, weak = answers[0].logps, answers[1].logps
        assert strong is not None
        assert weak is not None
        assert np.abs(strong - weak).max() > 1e-2


def test_streams_of_strong_and_weak_side_by_side(live, moe, local, ask, vocab):
    server = live(moe)
    teachers = [
        ServedTeacher.connect("default", TeacherConfig(url=server.url), vocab),
        ServedTeacher.connect("weak", TeacherConfig(url=server.url, active_experts=1), vocab),
    ]
    whole = ask(3, 4, 12).request

    async def grow() -> None:
        exact = [await local(number).score(whole) for number in (None, 1)]
        streams = [ScoreStream(teacher, whole.context_ids) for teacher in teachers]
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            answers = await asyncio.gather(*(stream.append(4 + start, whole.token_ids[start:stop]) for stream in streams))
            for answer, scores in zip(answers, exact, strict=True):
                same(answer, scores, slice(start, stop))
        for teacher in teachers:
            await teacher.close()

    asyncio.run(grow())
    assert server.value("opd_stream_hits_total") == 4


def test_a_name_that_is_an_adapter_has_fewer_experts_under_it(moe_folder, load_served, ask, tmp_path):
    torch.manual_seed(0)
    with warnings.catch_warnings():  # peft asks transformers for a property that it renamed
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(moe_folder), config)
        model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    adapters = {"math": str(tmp_path), "weak-math": str(tmp_path)}
    both = load_served(moe_folder, adapters=adapters, active_experts={"weak-math": 1, "weak": 1})
    assert len(set(both.weights.values())) == 4
    names = ["base", "math", "weak", "weak-math"]

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(both.score(ask(0, 4, 9, model=name)) for name in names))

    assert len(set(asyncio.run(all_of_them()))) == 4
    views = {name: View(38, adapter=name if "math" in name else None) for name in ("math", "weak-math")}
    plain = both.model.score_batch([(ask(0, 4, 9).request, view) for view in views.values()])
    same(plain[0], plain[1])  # the adapters are the same


def test_what_a_server_lists_is_what_can_be_asked(live, moe):
    server = live(moe)
    models = json.loads(server.call("GET", "/v1/info").body)["models"]
    assert models == {name: {"weights": digest} for name, digest in moe.weights.items()}
    with pytest.raises(UserError, match=r"teachers\.t\.served_as: .* serves no 't', only base, half, weak, weak-again"):
        ServedTeacher.connect("t", TeacherConfig(url=server.url, active_experts=1))


def test_a_number_that_the_model_cannot_have(moe_folder, load_served):
    with pytest.raises(UserError, match=r"^--active-experts many: 4 is not between 1 and 2"):
        load_served(moe_folder, active_experts={"many": 4})
