"""The file of the student's weights: what is written is what is read, and nothing else is taken."""

import copy
import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from opd.students.config import LoraConfig, StudentConfig
from opd.students.loading import load_student
from opd.students.weights import BadWeights, check_weights, layout, read_weights, write_weights


@pytest.fixture
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder(0), dtype=torch.float32)


def test_what_is_written_is_read(model, model_folder, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(model_folder(1), dtype=torch.float32)
    path = tmp_path / "weights.safetensors"
    digest = write_weights(model, path, torch.float32, 41)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    assert read_weights(path, other) == 41
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    library = load_file(path)
    assert library.keys() == dict(model.named_parameters()).keys()


def test_the_digest_goes_by_content(model, tmp_path):
    first, again = (write_weights(model, tmp_path / name, torch.bfloat16, 41) for name in ("a", "b"))
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert first == again != write_weights(model, tmp_path / "c", torch.bfloat16, 41)
    assert load_file(tmp_path / "a").popitem()[1].dtype == torch.bfloat16


def test_adapters_are_merged(model_folder, tmp_path):
    student = load_student(StudentConfig(model=str(model_folder(0)), lora=LoraConfig(r=4)))
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    plain = AutoModelForCausalLM.from_pretrained(model_folder(0), dtype=torch.float32)
    assert layout(student) == layout(plain)
    write_weights(student, tmp_path / "w", torch.float32, 41)
    read_weights(tmp_path / "w", plain)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, student(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_model_without_memory_has_the_same_layout(model):
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(model.config)
    assert layout(shape) == layout(model)


def _without(state):
    state.pop("model.norm.weight")


def _renamed(state):
    state["model.norm.bias"] = state.pop("model.norm.weight")


def _reshaped(state):
    state["model.norm.weight"] = state["model.norm.weight"][:-1].clone()


def _integers(state):
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "'model.norm.weight' is not in both the file and the model"),
        (_renamed, "'model.norm.bias' is not in both"),
        (_reshaped, r"model\.norm\.weight: F32 \[31\], but the model has \[32\]"),
        (_integers, r"model\.norm\.weight: I32"),
    ],
)
def test_other_weights_are_refused_before_anything_changes(model, tmp_path, change, message):
    path, before = tmp_path / "w", copy.deepcopy(model.state_dict())
    write_weights(model, path, torch.float32, 41)
    state = {name: tensor + 1 for name, tensor in load_file(path).items()}
    change(state)
    save_file(state, path, {"kind": "weights", "vocab": "41"})
    with pytest.raises(BadWeights, match=message):
        read_weights(path, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "not a safetensors file"), (b"\xff" * 100, "not a safetensors file")]
)
def test_what_is_no_file_of_weights(model, tmp_path, content, message):
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(BadWeights, match=message):
        check_weights(tmp_path / "w", model)
    save_file({"a": torch.zeros(1)}, tmp_path / "w")
    with pytest.raises(BadWeights, match="no weights of opd"):
        check_weights(tmp_path / "w", model)
