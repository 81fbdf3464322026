"""Small tokenizers of each kind, trained on one mixed text: byte-level, SentencePiece, Unigram, WordPiece."""

import json
from functools import cache

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = """The quick brown fox jumps over the lazy dog. It's 12 + 30 = 42, isn't it? She has 5 apples and buys 3 more.
Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning. How much in dollars does she make?
So the answer is $\\boxed{\\frac{1}{2}}$. #### 18
def add(a, b):
\treturn a + b

for i in range(10):
    print(f"{i}: {add(i, 2)}")  # comment
今天天气很好，我们去公园散步。答案是四十二。中文和English混合。
Привет, мир! Ça va? Où est la bibliothèque? naïve café Ünïcödé
مرحبا بالعالم שלום עולם
😀😀👍🏽👩‍👩‍👧‍👦 🎉 ok
"""
SPECIAL = ["<s>", "</s>", "<unk>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
)
KINDS = [
    "byte_level",
    "byte_level_nfc",
    "byte_plain",
    "llama",
    "gemma",
    "metaspace",
    "unigram",
    "wordpiece",
    "wordpiece_lower",
]


def _byte_level(normalizer=None, use_regex=True, vocab=500) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return backend


def _sentencepiece(normalizer, pre_tokenizer, decoder) -> Tokenizer:
    """BPE with byte fallback, as SentencePiece models are converted."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, limit_alphabet=70, show_progress=False)
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    state["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoder
    return backend


def _spaces(*, strip: bool) -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)


def _llama() -> Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(normalizer, None, _spaces(strip=True))


def _gemma() -> Tokenizer:
    spaces = pre_tokenizers.Split(" ", "merged_with_previous")  # as transformers has it: of no effect after the normalizer
    return _sentencepiece(normalizers.Replace(" ", "▁"), spaces, _spaces(strip=False))


def _metaspace() -> Tokenizer:
    return _sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), _spaces(strip=True))


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    return backend


def _wordpiece(lowercase: bool) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    return backend


def wrap(backend: Tokenizer, **options) -> PreTrainedTokenizerFast:
    """As a model's tokenizer, with BOS `<s>`, EOS `</s>` and a chat template that ends assistant turns with EOS."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **(names | options))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> np.ndarray:
    """The ids of plain text: a special token written in it is text."""
    return np.array(_plain(tokenizer).encode(text, add_special_tokens=False).ids, np.int32)


@cache
def _plain(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return backend


@pytest.fixture(scope="session")
def tokenizers():
    """The tokenizer of each of `KINDS`."""
    backends = {
        "byte_level": _byte_level(),
        "byte_level_nfc": _byte_level(normalizers.NFC(), vocab=800),
        "byte_plain": _byte_level(use_regex=False, vocab=600),
        "llama": _llama(),
        "gemma": _gemma(),
        "metaspace": _metaspace(),
        "unigram": _unigram(),
        "wordpiece": _wordpiece(lowercase=False),
        "wordpiece_lower": _wordpiece(lowercase=True),
    }
    assert list(backends) == KINDS
    return {name: wrap(backend) for name, backend in backends.items()}


@pytest.fixture(scope="session")
def aligner(tokenizers):
    """`aligner(student, teacher)`: the aligner of two of `KINDS`, made once."""
    from opd.alignment.aligner import Aligner

    made: dict[tuple[str, str], Aligner] = {}

    def get(student: str, teacher: str) -> Aligner:
        if (student, teacher) not in made:
            ends = ([tokenizers[name].eos_token_id] for name in (student, teacher))
            made[student, teacher] = Aligner(
                tokenizers[student], tokenizers[teacher], **dict(zip(("student_eos", "teacher_eos"), ends))
            )
        return made[student, teacher]

    return get
