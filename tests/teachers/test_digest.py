"""Digests depend on content and on nothing else."""

import hashlib
import string

import pytest
import torch
from torch import nn

from opd.teachers import digest
from opd.teachers.digest import files_digest, tensor_digest, tokens_digest, weights_digest


def test_tokens():
    vocab = {"a": 0, "b": 1, "\ud800": 2}
    found = tokens_digest(vocab)
    assert len(found) == 32
    assert set(found) <= set(string.hexdigits.lower())
    assert found == tokens_digest(dict(reversed(vocab.items())))
    others = [{"a": 1, "b": 0, "\ud800": 2}, {"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "\ud800": 3}, {}]
    assert len({found, *map(tokens_digest, others)}) == 6


def test_tokens_cannot_be_confused_with_their_neighbours():
    assert tokens_digest({"a": 0, "b": 1}) != tokens_digest({"a1 1 b": 0})
    assert tokens_digest({"x0 1 y": 0}) != tokens_digest({"x": 0, "y": 0})


class Net(nn.Module):
    scale: torch.Tensor

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.randn(3), persistent=False)


def test_weights():
    found = weights_digest(Net())
    assert len(found) == 32
    assert found == weights_digest(Net())  # another process would find it too: the random cache is not persistent
    others = [Net(1), Net(0, torch.bfloat16), Net(), Net(), Net()]
    with torch.no_grad():
        others[2].weight[5, 3] += 1e-6
        others[3].scale.fill_(3.0)
        others[4].weight = nn.Parameter(others[4].weight.reshape(4, 6))
    assert len({found, *map(weights_digest, others)}) == 6


def test_names_count():
    first = nn.Sequential(nn.Linear(2, 2, bias=False))
    second = nn.Module()
    second.other = first[0]
    assert weights_digest(first) != weights_digest(second)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 2**20])
def test_chunks_and_strides_do_not_count(monkeypatch, chunk_bytes):
    tensor = torch.randn(9, 5).bfloat16()
    plain = hashlib.sha256(b"torch.bfloat16 [9, 5]\n" + tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:32]
    monkeypatch.setattr(digest, "_CHUNK_BYTES", chunk_bytes)
    assert tensor_digest(tensor) == plain
    assert tensor_digest(tensor.t().contiguous().t()) == plain
    assert tensor_digest(tensor.clone().requires_grad_()) == plain


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0, 3), torch.tensor(1), torch.tensor([True]), torch.zeros(2, dtype=torch.int8)]
)
def test_unusual_tensors(tensor):
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())


def test_tied_weights_are_the_same_as_equal_ones(micro_model, model_folder):
    model = micro_model(3, tie_word_embeddings=True)
    found = weights_digest(model)
    assert found == weights_digest(micro_model(3, tie_word_embeddings=True))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert weights_digest(model) == found


def test_a_saved_model_keeps_its_digest(micro_model, model_folder):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model_folder(5))
    assert weights_digest(loaded) == weights_digest(micro_model(5))
    assert weights_digest(loaded) != weights_digest(micro_model(6))


def test_files(tmp_path):
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    found = files_digest([one, two], "bfloat16")
    assert files_digest([one, two], "bfloat16") == found
    assert len(found) == 32
    others = [files_digest([one, two], "float32"), files_digest([one], "bfloat16"), files_digest([one, two])]
    two.write_bytes(b"3")
    others.append(files_digest([one, two], "bfloat16"))
    two.write_bytes(b"2")
    two.rename(tmp_path / "c.safetensors")
    others.append(files_digest([one, tmp_path / "c.safetensors"], "bfloat16"))
    assert len({found, *others}) == 6
