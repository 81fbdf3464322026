"""Several adapters over one base answer as the merged models do, and the base as if there were none."""

import asyncio
import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.errors import UserError
from opd.models import decoder
from opd.records import ScoreRequest, Scores
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.stream import StreamLost

CPU = torch.device("cpu")
LAYERS, OTHER_LAYERS = ["q_proj", "v_proj", "down_proj"], ["o_proj", "q_proj", "gate_proj"]


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(3)


@pytest.fixture(scope="module")
def make_adapter(tmp_path_factory):
    """`make_adapter(base, seed, **settings)`: a folder with a random adapter, and with `merged` the merged model in it."""

    def save(base: Path, seed: int, merged: bool = False, **settings) -> Path:
        folder = tmp_path_factory.mktemp("adapter")
        torch.manual_seed(seed)
        config = {"r": 3, "lora_alpha": 5, "target_modules": LAYERS, "task_type": "CAUSAL_LM", "init_lora_weights": False}
        with warnings.catch_warnings():  # peft asks transformers for a property that it renamed
            warnings.simplefilter("ignore")
            base_model = AutoModelForCausalLM.from_pretrained(base)
            model: Any = peft.get_peft_model(base_model, peft.LoraConfig(**(config | settings)))
            model.save_pretrained(str(folder), save_embedding_layers=False)
            if merged:
                model.merge_and_unload().save_pretrained(folder / "merged")
        return folder

    return save


@pytest.fixture(scope="module")
def folders(folder, make_adapter):
    """Differing in rank, layers, scale and kind."""
    return {
        "maths.v1": make_adapter(folder, 1, merged=True),
        "values": make_adapter(folder, 2, merged=True, r=2, lora_alpha=9, target_modules=OTHER_LAYERS),
        "dora": make_adapter(folder, 4, merged=True, use_dora=True),
        "weights-only": make_adapter(folder, 3, merged=True, use_rslora=True, lora_dropout=0.5),
    }


def load(folder: Path, adapters=None, **settings) -> HFModel:
    adapters = {name: str(path) for name, path in (adapters or {}).items()}
    return HFModel("teachers.t.model", str(folder), adapters=adapters, device=CPU, chunk_bytes=2**20, **settings)


@pytest.fixture(scope="module")
def model(folder, folders):
    return load(folder, folders)


@pytest.fixture(scope="module")
def merged(folder, folders):
    """The same models without adapters, by name; None is the base."""
    return {name: load(path / "merged") for name, path in folders.items()} | {None: load(folder)}


@pytest.fixture
def request_(vocab):
    rng = np.random.default_rng(0)
    return ScoreRequest(rng.integers(0, vocab, 6).astype(np.int32), rng.integers(0, vocab, 14).astype(np.int32), k=4)


def same(ours: Scores | StreamLost, theirs: Scores | StreamLost, rows: slice = slice(None)) -> None:
    assert isinstance(ours, Scores)
    assert isinstance(theirs, Scores)
    for field in ("logps", "topk_logps", "tail", "hidden"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("hidden", [False, True])
def test_each_answers_as_its_merged_model(model, merged, request_, vocab, hidden):
    """All asked at once, the base among them, twice."""
    request = replace(request_, hidden=hidden, k=0 if hidden else 4)
    views = [View(vocab, adapter=name) for name in (*model.adapters, None)] * 2
    answers = model.score_batch([(request, view) for view in views])
    for answer, view in zip(answers, views, strict=True):
        same(answer, *merged[view.adapter].score_batch([(request, View(vocab))]))
    if not hidden:
        assert len({float(answer.logps.sum()) for answer in answers}) == 5


def test_requests_of_one_adapter_share_a_pass(model, request_, vocab):
    before = model.num_batches
    views = [View(vocab, adapter=name) for name in ("values", None, "values", "values", None)]
    model.score_batch([(request_, view) for view in views])
    assert model.num_batches - before == 2


def test_between_passes_it_is_the_base(model, merged, request_, vocab, monkeypatch):
    ids = torch.from_numpy(request_.token_ids).long()[None]
    exact = merged[None].model(ids).logits

    def now() -> torch.Tensor:
        with torch.no_grad():
            return model.model.get_base_model()(ids).logits

    torch.testing.assert_close(now(), exact)
    model.score_batch([(request_, View(vocab, adapter="values"))])
    torch.testing.assert_close(now(), exact)
    handle = decoder(model.model).register_forward_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.score_batch([(request_, View(vocab, adapter="values"))])
    handle.remove()
    torch.testing.assert_close(now(), exact)


def test_all_is_frozen_and_in_eval_mode(model, request_, vocab):
    for adapter in (None, "values", None, "maths.v1"):
        model.score_batch([(request_, View(vocab, adapter=adapter))])
        assert not any(parameter.requires_grad for parameter in model.model.parameters())
        assert not any(module.training for module in model.model.modules())


def test_streams_of_adapters(model, merged, request_, vocab):
    """Streams of two adapters and of the base grow side by side; no one reads another's keys."""
    sequence = np.concatenate([request_.context_ids, request_.token_ids])
    for start, stop in ((0, 5), (5, 6), (3, 14)):
        keep = 6 + start if start else 0
        views = [View(vocab, adapter=name) for name in ("values", None, "maths.v1")]
        asked = [
            replace(
                request_,
                context_ids=sequence[keep : 6 + start],
                token_ids=request_.token_ids[start:stop],
                stream=f"s-{view.adapter}",
                keep_tokens=keep,
            )
            for view in views
        ]
        for answer, view in zip(model.score_batch(list(zip(asked, views))), views, strict=True):
            (whole,) = merged[view.adapter].score_batch([(request_, View(vocab))])
            same(answer, whole, slice(start, stop))
    other = replace(asked[0], context_ids=request_.context_ids, keep_tokens=20)
    (answer,) = model.score_batch([(other, View(vocab))])
    assert isinstance(answer, StreamLost)
    (answer,) = model.score_batch([(replace(request_, stream="s-values"), View(vocab))])
    same(answer, *merged[None].score_batch([(request_, View(vocab))]))


def test_teachers_share_one_base(model, merged, request_, vocab):
    teachers = {name: HFTeacher(name, model, View(vocab, adapter=name)) for name in model.adapters}

    async def ask():
        return await asyncio.gather(*(teacher.score(request_) for teacher in teachers.values()))

    for answer, name in zip(asyncio.run(ask()), teachers, strict=True):
        same(answer, *merged[name].score_batch([(request_, View(vocab))]))
    assert len({id(teacher.head.weight) for teacher in teachers.values()}) == 1


def test_the_state_tells_adapters_apart_by_all_that_matters(folder, folders, model, make_adapter):
    state = model.adapter_state("values")
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    kinds = [sum(kind in name for name in state) for kind in ("lora_A", "lora_B", "scaling")]
    assert kinds == [6, 6, 6]  # three kinds of layers, two of each
    assert {float(value) for name, value in state.items() if "scaling" in name} == {4.5}
    # neither its name nor its neighbours are part of it
    alone = load(folder, {"other": folders["values"]}).adapter_state("other")
    assert alone.keys() == state.keys()
    assert all(torch.equal(state[name], alone[name]) for name in state)
    louder = make_adapter(folder, 2, r=2, lora_alpha=90, target_modules=OTHER_LAYERS)
    changed = load(folder, {"x": louder}).adapter_state("x")
    assert [name for name in state if not torch.equal(state[name], changed[name])] == [n for n in state if "scaling" in n]


def test_the_base_keeps_its_names(model, merged):
    plain = merged[None].base_state
    assert model.base_state.keys() == plain.keys() == merged[None].model.state_dict().keys()
    assert all(torch.equal(value, plain[name]) for name, value in model.base_state.items())


def test_loading_draws_nothing_from_the_generator(folder, folders):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(folder, folders)
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture
def broken(folders, tmp_path):
    """`broken(**changes)`: a copy of an adapter with another configuration."""

    def copy(**changes) -> Path:
        shutil.copytree(folders["maths.v1"], tmp_path / "copy", ignore=shutil.ignore_patterns("merged"))
        path = tmp_path / "copy" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return tmp_path / "copy"

    return copy


def refused(folder: Path, adapter: Path, message: str, **settings) -> None:
    field = settings.get("adapter_field", "teachers.{}.adapter").format("a")
    with pytest.raises(UserError, match=message) as caught:
        load(folder, {"a": adapter}, **settings)
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


def test_a_folder_without_an_adapter(folder, tmp_path):
    refused(folder, tmp_path, "holds no adapter")
    refused(folder, tmp_path / "nothing", "holds no adapter")
    refused(folder, folder, "holds no adapter", adapter_field="--adapter {}")


def test_pickled_weights(folder, broken):
    adapter = broken()
    weights = adapter / "adapter_model.safetensors"
    torch.save({}, adapter / "adapter_model.bin")
    load(folder, {"a": adapter})  # never looked at
    weights.unlink()
    refused(folder, adapter, r"no adapter_model\.safetensors, the only form of weights that is read")


def test_damaged_files(folder, broken):
    adapter = broken()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    refused(folder, adapter, "is no adapter of this base")
    (adapter / "adapter_config.json").write_text("{")
    refused(folder, adapter, "is not JSON")
    (adapter / "adapter_config.json").write_text("[]")
    refused(folder, adapter, "no LoRA adapter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "is no LoRA adapter"),
        ({"bias": "all"}, "changes the base as well .its bias"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "its layer_replication"),
        ({"alora_invocation_tokens": [3]}, "its alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "its init_lora_weights"),
        ({"target_modules": ["nothing_proj"]}, "is no adapter of this base"),
        ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, "is no adapter of this base: .* weights differ"),
        ({"r": 4}, "is no adapter of this base"),
        ({"target_modules": 7}, "is no adapter of this base"),
    ],
)
def test_other_configurations(folder, broken, changes, message):
    refused(folder, broken(**changes), message)


@pytest.mark.parametrize("changes", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}])
def test_another_base(model_folder, folder, make_adapter, changes):
    refused(folder, make_adapter(model_folder(4, **changes), 1), "is no adapter of this base")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [1, 2]},
    ],
)
def test_changes_of_head_or_embeddings(folder, make_adapter, settings):
    refused(folder, make_adapter(folder, 1, **settings), "changes the embeddings or the output head")


def test_without_peft(folder, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(folder, folders["maths.v1"], r"pip install 'opd\[lora\]'")
    load(folder)
