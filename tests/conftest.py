"""Micro models and a micro tokenizer; no network, no cache of the user's, one thread, annotations checked."""
# ruff: noqa: E402

import atexit
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder of the process that started them
    os.environ["OPD_TEST_HOME"] = tempfile.mkdtemp(prefix="opd-tests-")
    atexit.register(shutil.rmtree, os.environ["OPD_TEST_HOME"], ignore_errors=True)
HOME = os.environ["OPD_TEST_HOME"]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{HOME}/hf", "HF_DATASETS_CACHE": f"{HOME}/datasets"}
os.environ |= {"OPD_CACHE": f"{HOME}/opd", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import jaxtyping

CHECKED = ["opd.kernels", "opd.objective", "opd.models", "opd.students.drawing", "opd.teachers.hf", "opd.teachers.scoring"]
CHECKED += ["opd.teachers.adapters", "opd.teachers.kv_streams"]
hook = jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from opd.records import Prompt, Rollout, Turn

torch.set_num_threads(1)

WORDS = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", *"abcdefghijklmnopqrstuvwxyz0123456"]
VOCAB, ROWS = len(WORDS), 45  # tokens, and rows of the output heads: the last ones are padding
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t['name'] }}{% endfor %}{% for m in messages %}"
    "{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}{{ '<assistant>' + (suffix or '') }}"
)

BYTE_MARKS = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
BYTE_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + (eos_token if m['role'] == 'assistant' "
    "else '') }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def connect_locally(self: socket.socket, address: object, _connect=socket.socket.connect) -> None:
    host = address[0] if isinstance(address, tuple) else "localhost"
    assert host in {"localhost", "127.0.0.1", "::1"}, f"a test tried to reach {address}"
    _connect(self, address)


socket.socket.connect = connect_locally  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="session")
def vocab():
    """Tokens of the micro tokenizer; the micro models' heads have more rows."""
    return VOCAB


@pytest.fixture(scope="session")
def micro_model():
    """`micro_model(seed, **config)`: a Llama of two layers with random weights, in eval mode."""

    def build(seed: int = 0, **config) -> LlamaForCausalLM:
        settings = {
            "vocab_size": ROWS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LlamaForCausalLM(LlamaConfig(**(settings | config))).eval()

    return build


@pytest.fixture(scope="session")
def micro_tokenizer():
    """One token a character, with a chat template that writes its own BOS."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    words.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def model_folder(micro_model, micro_tokenizer, tmp_path_factory):
    """`model_folder(seed, **config)`: such a model and the tokenizer on disk."""

    def save(seed: int = 0, **config) -> Path:
        folder = tmp_path_factory.mktemp("model")
        micro_model(seed, **config).save_pretrained(folder)
        micro_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(name, code, group=ENTRY)`: a package of a third party, of one module, with entry points of opd."""

    def install(name: str, code: str, **groups: str) -> None:
        folder = tmp_path / "site"
        (folder / f"{name}-0.1.dist-info").mkdir(parents=True)
        (folder / f"{name}.py").write_text(code)
        (folder / f"{name}-0.1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        points = "".join(f"[opd.{group}]\n{entry}\n" for group, entry in groups.items())
        (folder / f"{name}-0.1.dist-info" / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return install


@pytest.fixture(scope="session")
def random_rollout():
    """`random_rollout(seed, (context, sampled), ...)`: a rollout with turns of these lengths, the ids arbitrary."""

    def build(seed: int, *lengths: tuple[int, int], num_reused: int = 0) -> Rollout:
        rng = np.random.default_rng(seed)

        def ids(size: int) -> np.ndarray:
            return rng.integers(3, VOCAB, size).astype(np.int32)

        turns = (
            Turn(ids(c), ids(n), -rng.exponential(size=n).astype(np.float32), "eos", num_reused=num_reused)
            for c, n in lengths
        )
        return Rollout(Prompt(id=str(seed)), seed, tuple(turns))

    return build


@pytest.fixture(scope="session")
def random_episode():
    """`random_episode(seed, context, (sampled, observed), ..., reused=0, rerender=False)`: a rollout of several turns.

    After each turn of `sampled` tokens come `observed` tokens that the student did not sample; the first `reused` turns are
    those of an earlier rollout. With `rerender` later contexts have the first one in common and are otherwise arbitrary.
    """

    def build(seed: int, context: int, *sizes: tuple[int, int], reused: int = 0, rerender: bool = False) -> Rollout:
        rng = np.random.default_rng(seed)

        def ids(size: int) -> np.ndarray:
            return rng.integers(3, VOCAB, size).astype(np.int32)

        opening = context_ids = ids(context)
        turns = []
        for number, (sampled, observed) in enumerate(sizes):
            logps = -rng.exponential(size=sampled).astype(np.float32)
            turn = Turn(context_ids, ids(sampled), logps, "eos", num_reused=sampled if number < reused else 0)
            before = np.append(opening, ids(sampled)) if rerender else np.append(context_ids, turn.sampled_ids)
            context_ids = np.append(before, ids(observed))
            turns.append(turn)
        return Rollout(Prompt(id=str(seed)), seed, tuple(turns))

    return build


@pytest.fixture(scope="session")
def byte_tokenizer():
    """`byte_tokenizer(merges, characters)`: byte-level BPE over a few characters, all the text that a model can write."""

    def build(merges: str = "", characters: str = "abcd0") -> PreTrainedTokenizerFast:
        pairs = [(word[: len(word) // 2], word[len(word) // 2 :]) for word in merges.split()]
        tokens = [*BYTE_MARKS, *characters, *(left + right for left, right in pairs)]
        bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
        bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        names = {f"{mark[1:-1]}_token": mark for mark in BYTE_MARKS[:3]}
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe, **names, extra_special_tokens=BYTE_MARKS[3:], chat_template=BYTE_TEMPLATE
        )

    return build


@pytest.fixture(scope="session")
def byte_model(micro_model, byte_tokenizer, tmp_path_factory):
    """`byte_model(seed, merges)`: a micro model that reads such tokens, as a folder."""

    def save(seed: int, merges: str = "", **config):
        folder = tmp_path_factory.mktemp("model")
        tokenizer = byte_tokenizer(merges)
        micro_model(seed, vocab_size=len(tokenizer) + 3, **config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save
