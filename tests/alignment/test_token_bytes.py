"""The bytes of tokens, against the decoders of the tokenizers package."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from opd.alignment.token_bytes import TokenBytes
from opd.errors import UserError
from tests.alignment.conftest import KINDS, TEXT, encode


@pytest.fixture(scope="module")
def tables(tokenizers):
    return {kind: TokenBytes.of(tokenizers[kind].backend_tokenizer, "student") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(text=st.text(max_size=20))
@example(text=TEXT)
@example(text=" two  spaces")
def test_joins_are_what_the_decoder_writes(tables, tokenizers, kind, text):
    ids = encode(tokenizers[kind], text)
    written, ends = tables[kind].text(ids)
    assert len(ends) == len(ids)
    assert ends.tolist() == sorted(ends)
    assert len(written) == (ends[-1] if len(ends) else 0)
    decoded = tokenizers[kind].backend_tokenizer.decode(ids.tolist())
    if kind == "unigram":  # its decoder drops the first space alone, even where nothing else is left of the token
        assert written.tobytes().decode().lstrip() == decoded.lstrip()
    else:
        assert written.tobytes().decode() == decoded


def test_each_token_has_its_bytes(tables, tokenizers):
    def spelled(kind, token):
        return tables[kind][tokenizers[kind].get_vocab()[token]]

    assert spelled("byte_level", "Ġ") == b" "
    assert spelled("byte_level", "Ã") == b"\xc3"
    assert spelled("llama", "▁") == b" "
    words = [token for token in tokenizers["gemma"].get_vocab() if "▁" in token]
    assert len(words) > 20
    assert [spelled("gemma", token) for token in words] == [token.replace("▁", " ").encode() for token in words]
    assert spelled("llama", "<0xE9>") == b"\xe9"
    assert spelled("unigram", "▁") == b" "
    assert {spelled(kind, "</s>") for kind in KINDS} == {b""}
    vocab = tokenizers["wordpiece"].get_vocab()
    continued = next(token for token in vocab if token.startswith("##"))
    assert spelled("wordpiece", continued) == continued[2:].encode()
    whole = next(token for token in vocab if token.isalpha())
    assert spelled("wordpiece", whole) == f" {whole}".encode()


def test_all_byte_level_characters_map_to_their_bytes(tables, tokenizers):
    vocab = tokenizers["byte_level"].get_vocab()
    pieces = [tables["byte_level"][vocab[character]] for character in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(pieces) == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [("llama", "a fox", "a fox"), ("metaspace", "a fox", " a fox"), ("gemma", " a fox", " a fox")],
)
def test_a_prefix_space_is_dropped_where_the_tokenizer_puts_one(tables, tokenizers, kind, first, later):
    ids = np.array(tokenizers[kind].convert_tokens_to_ids(["▁", "a", "▁", "f", "o", "x"]))
    assert tables[kind].text(ids)[0].tobytes().decode() == first
    assert tables[kind].text(ids, first=False)[0].tobytes().decode() == later


def test_unknown_ids_have_no_bytes(tables):
    written, ends = tables["llama"].join(np.array([10**6, 10**9]))
    assert (len(written), ends.tolist()) == (0, [0, 0])


@pytest.mark.parametrize(
    "decoder", [decoders.CTC(), decoders.Sequence([decoders.Replace(Regex("x+"), ""), decoders.Fuse()])]
)
def test_an_unknown_decoder_is_refused(decoder):
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(UserError, match=r"^teachers\.big: the bytes of its tokens are unknown"):
        TokenBytes.of(backend, "teachers.big")


def test_without_a_decoder_words_have_spaces_between_them():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    table = TokenBytes.of(backend, "student")
    assert table.text(np.array([0, 1, 1]))[0].tobytes().decode() == backend.decode([0, 1, 1]) == "a b b"
