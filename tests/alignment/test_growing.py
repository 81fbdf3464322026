"""A turn that grows is aligned as the whole of it would be each time, on every pair of kinds, at a linear cost."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.alignment.aligner import Aligner
from opd.alignment.growing import Growing
from opd.alignment.parts import INNER_JOINT, NO_JOINT
from tests.alignment.conftest import KINDS, TEXT, encode
from tests.alignment.test_aligner import CONTEXT, PAIRS, TEXTS, check_settled

FIELDS = ("context_ids", "token_ids", "student_ends", "teacher_ends", "num_bytes", "aligned")
FEW = settings(max_examples=4, deadline=None, derandomize=True, database=None)


class Counting:
    """A tokenizer that notes the characters it is given to encode."""

    def __init__(self, backend) -> None:
        self.backend, self.num_chars = backend, 0

    def encode(self, text, **options):
        self.num_chars += len(text)
        return self.backend.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self.backend, name)


def check_grown(pair: Aligner, ids: np.ndarray, sizes) -> None:
    """`ids` in chunks of `sizes`, again and again, are each time what `align` says."""
    whole, grown, at = pair.align(ids, CONTEXT), pair.growing(CONTEXT), 0
    while at < len(ids):
        chunk = ids[at : at + sizes[at % len(sizes)]]
        before = grown.whole()
        grown.append(chunk)
        at += len(chunk)
        expected, found = pair.align(ids[:at], CONTEXT), grown.whole()
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=f"{name} at {at}")
        assert found.settled >= expected.settled
        np.testing.assert_array_equal(found.token_ids[grown.teacher_start :], grown.tail.token_ids)
        np.testing.assert_array_equal(found.token_ids[: grown.teacher_start], before.token_ids[: grown.teacher_start])
        assert grown.student_start + grown.tail.student_sizes.sum() == grown.num_sampled == at
        if ids[at - 1] != 1:  # an EOS before the turn's end
            check_settled(expected, whole)
            check_settled(found, whole)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@FEW
@given(texts=st.lists(TEXTS, max_size=3), seed=st.integers(0, 10**6), sizes=st.lists(st.integers(1, 16), min_size=1))
def test_every_beginning_is_aligned_as_align_does(aligner, tokenizers, student, teacher, texts, seed, sizes):
    """Of texts and, between them, random ids: invalid bytes, special tokens, ids that there are not."""
    rng = np.random.default_rng(seed)
    random = [rng.integers(0, len(tokenizers[student]) + 2, rng.integers(0, 12)) for _ in range(len(texts) + 1)]
    pieces = [
        random[0],
        *(piece for text, ids in zip(texts, random[1:]) for piece in (encode(tokenizers[student], text), ids)),
    ]
    check_grown(aligner(student, teacher), np.concatenate(pieces), sizes)


@pytest.mark.parametrize("room", [0, 1, 40, 150])
def test_the_teachers_context_may_be_too_short(tokenizers, room):
    options = {"student_eos": [1], "teacher_eos": [1], "max_context": len(CONTEXT) + room}
    pair = Aligner(tokenizers["byte_level"], tokenizers["llama"], **options)
    check_grown(pair, np.append(encode(tokenizers["byte_level"], TEXT), 1), [7])


def test_where_a_joint_is_not_found_again_the_whole_is_aligned(aligner, tokenizers):
    pair, starts = aligner("byte_level", "llama"), []

    def align(ids, start=0, **options):
        starts.append(start)
        parts = pair.parts(ids, start, **options)
        for part in parts if start % 2 else ():
            part.joints[part.joints == INNER_JOINT] = NO_JOINT
        return parts

    ids = encode(tokenizers["byte_level"], TEXT)
    grown = Growing(align, [1], CONTEXT, None)
    for at in range(0, len(ids), 5):
        grown.append(ids[at : at + 5])
        expected = pair.align(ids[: at + 5], CONTEXT)
        assert grown.whole().token_ids.tolist() == expected.token_ids.tolist()
        assert grown.whole().student_ends.tolist() == expected.student_ends.tolist()
    assert any(after == 0 and before % 2 for before, after in itertools.pairwise(starts))
    assert any(after and not before % 2 for before, after in itertools.pairwise(starts))


@pytest.mark.parametrize("student", ["byte_level", "llama"])
@pytest.mark.parametrize("teacher", KINDS)
def test_the_work_is_linear(tokenizers, student, teacher):
    pair = Aligner(tokenizers[student], tokenizers[teacher], student_eos=[1], teacher_eos=[1])
    pair._backend = counting = Counting(pair._backend)
    given = []
    for repeats in (2, 4):
        ids = encode(tokenizers[student], TEXT * repeats)
        counting.num_chars, grown = 0, pair.growing(CONTEXT)
        for at in range(0, len(ids), 16):
            grown.append(ids[at : at + 16])
        given.append(counting.num_chars)
    assert given[1] < 2.2 * given[0]
    assert given[1] < 6 * (4 * len(TEXT))  # the whole each time would be some 30 times as many as there are
