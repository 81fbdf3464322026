"""Shares of a server: counted once, given back once."""

import pytest

from opd.teachers.server.admission import Admission, Refused


def test_tokens_and_bytes_come_back():
    admission = Admission(max_tokens=10, max_bytes=100)
    with admission.share() as share:
        share.add_bytes(30)
        share.add_bytes(20)
        share.accept(4)
        assert (admission.num_tokens, admission.num_bytes, admission.num_accepted) == (4, 50, 1)
        assert not admission.idle.is_set()
        with admission.share() as other, pytest.raises(Refused, match="4 tokens are waiting already"):
            other.accept(7)
        with admission.share() as other, pytest.raises(Refused, match="50 bytes"):
            other.add_bytes(51)
        assert (admission.num_tokens, admission.num_bytes, admission.num_accepted) == (4, 50, 1)
    assert (admission.num_tokens, admission.num_bytes, admission.num_accepted) == (0, 0, 0)
    assert admission.idle.is_set()


def test_a_refusal_gives_back_too():
    admission = Admission(max_tokens=10, max_bytes=100)
    with admission.share() as share:
        share.add_bytes(100)
        with pytest.raises(Refused):
            share.accept(11)
    assert (admission.num_tokens, admission.num_bytes, admission.num_accepted) == (0, 0, 0)


def test_a_request_without_tokens_still_counts():
    admission = Admission(max_tokens=1, max_bytes=100)
    with admission.share() as share:
        share.accept(0)
        assert not admission.idle.is_set()
        with admission.share() as other, pytest.raises(Refused) as refused:
            other.accept(0)
        assert refused.value.status == 503
    assert admission.idle.is_set()


def test_statuses():
    admission = Admission(max_tokens=10, max_bytes=100)
    with admission.share() as share, pytest.raises(Refused) as refused:
        share.accept(11)
    assert refused.value.status == 413
    admission.draining = True
    with admission.share() as share, pytest.raises(Refused) as refused:
        share.accept(1)
    assert refused.value.status == 503
    assert admission.idle.is_set()
