"""Alignment of every pair of tokenizer kinds: what always holds, on random text and random ids."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from opd.alignment import utf8
from opd.alignment.aligner import Aligner
from opd.alignment.coverage import Coverage
from opd.errors import UserError
from opd.records import Prompt, SpanMap
from tests.alignment.conftest import KINDS, SPECIAL, TEXT, encode, wrap

CONTEXT = np.array([1, 2, 3], np.int32)
PAIRS = list(itertools.product(KINDS, KINDS))
BYTE_LEVEL = KINDS[:3]
LOSSLESS = ["byte_level", "byte_plain", "llama", "gemma", "metaspace"]  # decode(encode(text)) == text
SNIPPETS = [
    "e\u0301",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "今天",
    "天气很好",
    "שלום",
    "مرحبا",
    "\n",
    "\n\n",
    "\t",
    "  ",
    " ",
    "\r\n",
    "\u00a0",
    "ﬁ",
    "½",
    "\x00",
]
SNIPPETS += [
    "\u200d",
    "<s>",
    "</s>",
    "<unk>",
    "▁",
    "##",
    "<0xE9>",
    "Ġ",
    "\ufffd",
    "don't",
    "12345",
    "Ça",
    "각",
    "\u1100\u1161\u11a8",
    "x" * 30,
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4), st.sampled_from(TEXT.split(" "))), max_size=14
).map("".join)
FIXED = settings(max_examples=7, deadline=None, derandomize=True, database=None)


def check_partition(spans: SpanMap, num_student: int) -> None:
    assert spans.student_sizes.sum() == num_student
    assert (spans.student_sizes > 0).all()
    assert spans.teacher_sizes.sum() == len(spans.token_ids)
    assert (spans.teacher_sizes >= 0).all()
    assert (spans.teacher_sizes[spans.aligned] > 0).all()
    assert 0 <= spans.settled <= len(spans.aligned)
    for name in ("token_ids", "student_ends", "teacher_ends", "num_bytes"):
        assert getattr(spans, name).dtype == np.int32, name
    assert spans.aligned.dtype == bool


def naive_cuts(student: list[bytes], teacher: list[bytes]) -> list[tuple[int, int]]:
    """(student tokens, teacher tokens) before each byte at which tokens of both sides end; every token has bytes."""
    return [
        (i, j)
        for i in range(1, len(student) + 1)
        for j in range(1, len(teacher) + 1)
        if sum(map(len, student[:i])) == sum(map(len, teacher[:j]))
    ]


def byte_level_pieces(tokenizer, ids) -> list[bytes]:
    """The bytes of byte-level tokens, by the table of transformers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = {character: byte for byte, character in bytes_to_unicode().items()}
    return [bytes(table[character] for character in token) for token in tokenizer.convert_ids_to_tokens(ids)]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@FIXED
@given(text=TEXTS)
@example(text=TEXT)
def test_units_partition_tokens_and_bytes_and_spell_the_same(aligner, tokenizers, student, teacher, text):
    ids = encode(tokenizers[student], text)
    pair = aligner(student, teacher)
    spans = pair.align(ids, CONTEXT)
    check_partition(spans, len(ids))
    shown = pair.text_of(ids)
    assert spans.num_bytes.sum() == len(shown.encode())
    written, byte_ends = shown.encode(), np.cumsum(spans.num_bytes)
    backend = tokenizers[teacher].backend_tokenizer
    for unit in np.flatnonzero(spans.aligned & (spans.num_bytes > 0)).tolist():
        piece = written[byte_ends[unit] - spans.num_bytes[unit] : byte_ends[unit]]
        end = spans.teacher_ends[unit]
        mine = backend.decode(spans.token_ids[end - spans.teacher_sizes[unit] : end].tolist(), skip_special_tokens=False)
        try:
            expected = piece.decode()
        except UnicodeDecodeError:  # both sides cut a character at the same bytes: decoding shows nothing then
            continue
        if teacher.startswith(
            "wordpiece"
        ):  # whose decoder keeps the mark of a first token, and puts a space before each word
            mine, expected = mine.removeprefix("##").replace(" ", ""), expected.replace(" ", "")
        assert mine.lstrip(" ") == expected.lstrip(" ")  # decoders strip the space of a first token
    if student in LOSSLESS:
        assert shown.lstrip(" ") == (text if student in BYTE_LEVEL else text.replace("▁", " ")).lstrip(" ")


@pytest.mark.parametrize("kind", KINDS)
@FIXED
@given(text=TEXTS)
@example(text=TEXT)
@example(text=" x")
@example(text="  x")
def test_identical_tokenizers_give_the_identity(aligner, tokenizers, kind, text):
    ids = encode(tokenizers[kind], text)
    if kind not in LOSSLESS and ("▁" in text or set(ids.tolist()) & set(tokenizers[kind].all_special_ids)):
        return  # what is not known or not kept apart from a space is not the same text when read again
    spans = aligner(kind, kind).align(ids, CONTEXT)
    if not aligner(kind, kind).text_of(ids):
        assert not spans.aligned.any()  # nothing, or the space that the tokenizer puts before a text
        return
    if kind.startswith("wordpiece"):  # reads its own text the same way up to the spaces of punctuation
        assert spans.aligned.all()
        return
    assert spans.token_ids.tolist() == ids.tolist()
    assert spans.aligned.all()
    assert spans.student_ends.tolist() == spans.teacher_ends.tolist() == list(range(1, len(ids) + 1))


@pytest.mark.parametrize(("student", "teacher"), [pair for pair in PAIRS if set(pair) <= {"byte_level", "byte_plain"}])
@FIXED
@given(text=TEXTS)
def test_units_are_the_finest_common_refinement(aligner, tokenizers, student, teacher, text):
    ids = encode(tokenizers[student], text)
    spans = aligner(student, teacher).align(ids, CONTEXT)
    pieces = (byte_level_pieces(tokenizers[name], of) for name, of in ((student, ids), (teacher, spans.token_ids)))
    assert list(zip(spans.student_ends, spans.teacher_ends)) == naive_cuts(*pieces)
    assert spans.aligned.all()


@pytest.mark.parametrize(("student", "teacher"), [pair for pair in PAIRS if pair[0] in BYTE_LEVEL])
@FIXED
@given(seed=st.integers(0, 10**6), size=st.integers(0, 60))
def test_random_ids_with_invalid_bytes_keep_what_is_text(aligner, tokenizers, student, teacher, seed, size):
    ids = np.random.default_rng(seed).integers(3, len(tokenizers[student]), size)
    pair = aligner(student, teacher)
    spans = pair.align(ids, CONTEXT)
    check_partition(spans, size)
    pieces = byte_level_pieces(tokenizers[student], ids)
    assert spans.num_bytes.sum() == sum(map(len, pieces))
    if teacher in BYTE_LEVEL:
        written = b"".join(pieces)
        if teacher != "byte_level_nfc" and utf8.read(written).size == len(written):
            assert spans.aligned.all()  # the teacher has a token for each byte, and only an open end is not shown to it
        theirs = byte_level_pieces(tokenizers[teacher], spans.token_ids)
        for i, j, n, m in zip(spans.student_ends, spans.teacher_ends, spans.student_sizes, spans.teacher_sizes):
            same = b"".join(pieces[i - n : i]) == b"".join(theirs[j - m : j])
            assert same == spans.aligned[np.searchsorted(spans.student_ends, i)]


@pytest.mark.parametrize("teacher", ["byte_level", "byte_plain", "llama", "gemma"])
def test_invalid_bytes_are_judged_by_the_teachers_tokens_for_bytes(aligner, tokenizers, teacher):
    student = tokenizers["byte_plain"]
    pieces = [b"5", b"\xe2", b"\x28", b"\xff", b"\x9f", b"7"]
    plain = [index for index in range(len(student)) if index not in student.all_special_ids]
    vocabulary = dict(zip(byte_level_pieces(student, plain), plain))
    ids = np.array([vocabulary[piece] for piece in pieces])
    spans = aligner("byte_plain", teacher).align(ids, CONTEXT)
    if teacher in {"byte_level", "byte_plain"}:
        assert spans.one_to_one.all()
        assert byte_level_pieces(tokenizers[teacher], spans.token_ids) == pieces
    check_partition(spans, len(ids))
    spans = aligner("byte_plain", teacher).align(ids[:2], CONTEXT)
    assert spans.aligned.tolist() == [True, False]  # it may still become a character


def check_settled(part: SpanMap, whole: SpanMap) -> None:
    """The settled units of a beginning are the whole's."""
    k = part.settled
    for name in ("student_ends", "teacher_ends", "num_bytes", "aligned"):
        np.testing.assert_array_equal(getattr(part, name)[:k], getattr(whole, name)[:k], err_msg=name)
    num_teacher = part.teacher_ends[k - 1] if k else 0
    np.testing.assert_array_equal(part.token_ids[:num_teacher], whole.token_ids[:num_teacher])


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@FIXED
@given(text=TEXTS, end=st.booleans())
def test_settled_units_of_every_beginning_are_those_of_the_whole(aligner, tokenizers, student, teacher, text, end):
    ids = encode(tokenizers[student], text)
    eos = tokenizers[student].eos_token_id
    ids = ids[ids != eos]  # Unigram reads it out of plain text, and a beginning that ends with it would be a finished turn
    if end:
        ids = np.append(ids, eos)
    pair = aligner(student, teacher)
    whole = pair.align(ids, CONTEXT)
    assert not end or whole.settled == len(whole.aligned)
    for size in range(len(ids)):
        part = pair.align(ids[:size], CONTEXT)
        check_partition(part, size)
        check_settled(part, whole)


@pytest.mark.parametrize("teacher", BYTE_LEVEL)
def test_invalid_bytes_stay_judged_whatever_follows(aligner, tokenizers, teacher):
    """Text that the teacher normalizes, far behind them, changes nothing about them."""
    student = tokenizers["byte_plain"]
    stray = student.convert_tokens_to_ids("ð")  # byte 0xF0
    ids = np.concatenate([encode(student, "So"), [stray], encode(student, " the fox. Ça va? It's 12 e\u0301, e\u0301 day")])
    pair = aligner("byte_plain", teacher)
    whole = pair.align(ids, CONTEXT)
    place = int(np.flatnonzero(ids == stray)[0])
    assert whole.per_token(whole.one_to_one)[place]
    assert whole.aligned.all() == (teacher != "byte_level_nfc")
    for size in range(place + 2, len(ids)):
        assert pair.align(ids[:size], CONTEXT).aligned[place]


def test_bytes_without_a_token_are_masked_and_the_others_judged(tokenizers):
    """A teacher that lacks the token of one byte."""
    state = json.loads(tokenizers["byte_plain"].backend_tokenizer.to_str())
    state["model"]["vocab"] = {token: index for token, index in state["model"]["vocab"].items() if token != "ð"}
    state["model"]["merges"] = [merge for merge in state["model"]["merges"] if "ð" not in "".join(merge)]
    teacher = wrap(Tokenizer.from_str(json.dumps(state)))
    student = tokenizers["byte_plain"]
    pair = Aligner(student, teacher, student_eos=[1], teacher_eos=[1])
    ids = student.convert_tokens_to_ids(["a", "ð", "b", "ÿ", "ð", "ÿ", "c"])
    spans = pair.align(np.array(ids), CONTEXT)
    assert spans.aligned.tolist() == [True, False, True, True, False, True, True]
    assert teacher.convert_ids_to_tokens(spans.token_ids[-1].item()) == "c"


@pytest.mark.parametrize("teacher", KINDS)
def test_long_text_settles_up_to_its_last_words(aligner, tokenizers, teacher):
    ids = encode(tokenizers["byte_level"], TEXT * 2)
    spans = aligner("byte_level", teacher).align(ids, CONTEXT)
    assert spans.settled
    assert spans.student_ends[spans.settled - 1] > len(ids) - 40


@pytest.mark.parametrize(
    ("student", "teacher"), [("byte_level", "llama"), ("llama", "byte_level"), ("byte_level", "byte_plain")]
)
def test_a_split_character_is_one_unit_and_text_after_it_is_aligned(aligner, tokenizers, student, teacher):
    ids = encode(tokenizers[student], "a ☃ then more text")
    pieces = tokenizers[student].convert_ids_to_tokens(ids)
    spans = aligner(student, teacher).align(ids, CONTEXT)
    assert spans.aligned.all()
    assert len(spans.aligned) > 4
    owner = np.repeat(np.arange(len(spans.aligned)), spans.student_sizes)
    snowman = {int(owner[i]) for i, token in enumerate(pieces) if any(mark in token for mark in ("âĺ", "ĥ", "<0x"))}
    if teacher == "llama" or student == "llama":  # byte tokens on both sides, cut at the same bytes or joined
        assert snowman
    for unit in snowman:
        assert spans.num_bytes[unit] <= 4


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_text_after_what_may_differ_is_aligned_again(aligner, tokenizers, student, teacher):
    """A newline, a split character, and letters that a normalizer composes, each followed by more text."""
    before, after = "a fox buys", "eggs make it lazy per morning"
    for between in ("\n", "\n\n", "☃", "é", "e\u0301", "😀", "👩‍👩‍👧‍👦", "\t", "\u00a0", " \n "):
        ids = encode(tokenizers[student], f"{before}{between}{after}")
        spans = aligner(student, teacher).align(ids, CONTEXT)
        assert spans.aligned[-1], between
        tail = np.cumsum(spans.num_bytes[::-1])[::-1] <= len(after) - len("eggs")
        assert spans.aligned[tail].all(), between
        if not {student, teacher} & {"unigram", "wordpiece", "wordpiece_lower"}:
            assert Coverage.of(spans).byte_coverage >= 0.9, between


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_eos_is_the_turn_end_only_where_it_was_sampled(aligner, tokenizers, student, teacher):
    ids = encode(tokenizers[student], "the quick")
    eos = tokenizers[student].eos_token_id
    pair = aligner(student, teacher)
    with_end, without = pair.align(np.append(ids, eos), CONTEXT), pair.align(ids, CONTEXT)
    assert with_end.token_ids.tolist() == [*without.token_ids.tolist(), tokenizers[teacher].eos_token_id]
    assert (with_end.one_to_one[-1], with_end.num_bytes[-1], with_end.settled) == (True, 0, len(with_end.aligned))
    assert tokenizers[teacher].eos_token_id not in without.token_ids
    inside = pair.align(np.concatenate([ids, [eos], ids]), CONTEXT)  # not the end of the turn
    assert inside.aligned[len(without.aligned)] == np.False_
    assert tokenizers[teacher].eos_token_id not in inside.token_ids


def test_a_turn_of_eos_alone_or_of_nothing(aligner):
    pair = aligner("byte_level", "llama")
    alone = pair.align(np.array([1]), CONTEXT)
    assert (alone.token_ids.tolist(), alone.one_to_one.tolist(), alone.settled) == ([1], [True], 1)
    nothing = pair.align(np.zeros(0, np.int32), CONTEXT)
    check_partition(nothing, 0)
    assert nothing.context_ids.tolist() == CONTEXT.tolist()
    assert Coverage.of(nothing).byte_coverage == 1.0


def test_an_unfinished_character_is_kept_from_the_teacher(aligner, tokenizers):
    pair = aligner("byte_level", "byte_level_nfc")
    ids = encode(tokenizers["byte_level"], "ok ☃!")
    cut = pair.align(ids[:-2], CONTEXT)
    assert pair.text_of(ids[:-2]) == "ok "
    assert cut.aligned.tolist()[-1] is False or cut.num_bytes[-1] == 1
    assert cut.student_ends[-1] == len(ids) - 2
    assert not cut.aligned[-1]
    assert cut.settled < len(cut.aligned)
    assert pair.align(ids, CONTEXT).aligned.all()


def test_beyond_the_teachers_context_nothing_is_aligned(tokenizers):
    student, teacher = tokenizers["byte_level"], tokenizers["byte_plain"]
    ids = np.append(encode(student, "the quick brown fox jumps"), 1)
    pair = Aligner(student, teacher, student_eos=[1], teacher_eos=[1])
    whole = pair.align(ids, CONTEXT)
    for room in (0, 1, 3, len(whole.token_ids), 99):
        short = Aligner(student, teacher, student_eos=[1], teacher_eos=[1], max_context=len(CONTEXT) + room)
        spans = short.align(ids, CONTEXT)
        check_partition(spans, len(ids))
        assert spans.token_ids.tolist() == whole.token_ids[:room].tolist()
        np.testing.assert_array_equal(spans.aligned, whole.aligned & (whole.teacher_ends <= room))
    assert not short.align(ids, np.zeros(200, np.int32)).aligned.any()


def test_same_bytes_finds_the_teachers_token(aligner, tokenizers):
    pair, student, teacher = aligner("byte_level", "llama"), tokenizers["byte_level"], tokenizers["llama"]
    same = pair.same_bytes
    assert (same.dtype, same.shape) == (np.int32, (len(student),))
    vocab = teacher.get_vocab()
    for token, index in student.get_vocab().items():
        found = teacher.convert_ids_to_tokens(int(same[index])) if same[index] >= 0 else None
        if token in SPECIAL:
            assert found == token
        elif (piece := byte_level_pieces(student, [index])[0]).isascii():
            text = piece.decode().replace(" ", "▁")
            assert found == (text if text in vocab else f"<0x{piece[0]:02X}>" if len(piece) == 1 else None), token
    identity = aligner("gemma", "gemma").same_bytes
    written = [token for token in tokenizers["gemma"].get_vocab() if not token.startswith("<0x")]
    assert all(identity[index] == index for index in tokenizers["gemma"].convert_tokens_to_ids(written))


def test_the_context_is_the_teachers_own_template(aligner, tokenizers):
    prompt = Prompt("p", ({"role": "user", "content": "the fox"},))
    expected = tokenizers["llama"]("<s>[user]the fox", add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(aligner("byte_level", "llama").context(prompt), expected)
    bare = wrap(tokenizers["llama"].backend_tokenizer, chat_template=None)
    pair = Aligner(tokenizers["gemma"], bare, student_eos=[1], teacher_eos=[1], field="teachers.default")
    with pytest.raises(UserError, match=r"^teachers\.default: its tokenizer has no chat template"):
        pair.context(prompt)
    assert len(pair.context(Prompt("p", text="the fox")))


def test_the_tokenizers_stay_as_they_were(tokenizers):
    before = [tokenizers[name].backend_tokenizer.to_str() for name in ("gemma", "llama")]
    pair = Aligner(tokenizers["gemma"], tokenizers["llama"], student_eos=[1], teacher_eos=[1])
    pair.align(encode(tokenizers["gemma"], TEXT), CONTEXT)
    assert before == [tokenizers[name].backend_tokenizer.to_str() for name in ("gemma", "llama")]


def test_slow_tokenizers_are_refused(tokenizers):
    from transformers import ByT5Tokenizer

    for student, teacher, field in (
        (ByT5Tokenizer(), tokenizers["llama"], "student.model"),
        (tokenizers["llama"], ByT5Tokenizer(), "teachers.big"),
    ):
        with pytest.raises(UserError, match=rf"^{field}: ByT5Tokenizer is a slow tokenizer"):
            Aligner(student, teacher, student_eos=[1], teacher_eos=[1], field="teachers.big")
