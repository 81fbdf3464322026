"""What is read off last hidden states, against log-softmaxes in float64."""

import pytest
import torch

from opd.kernels.head import OutputHead
from opd.teachers.scoring import mark_repeats, read_states

N, H, ROWS, VOCAB = 7, 8, 23, 19


@pytest.fixture
def head():
    weight = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(0))
    return OutputHead(weight, scale=0.5)


@pytest.fixture
def states():
    return 3 * torch.randn(N, H, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def token_ids():
    return torch.tensor([0, 5, 18, 7, 7, 2, 11])


def exact(states, head, vocab, temperature):
    logits = states.double() @ head.weight[:vocab].double().T * head.scale / temperature
    return logits.log_softmax(-1)


def read(states, head, token_ids, asked=None, **settings):
    asked = torch.zeros(len(token_ids), 0, dtype=torch.long) if asked is None else asked
    usual = {"k": 0, "vocab": VOCAB, "temperature": 1.0, "logp_floor": -1000.0, "chunk_bytes": 2**20}
    return read_states(states, head, token_ids, asked, **(usual | settings))


def close(ours, theirs, atol=5e-6):
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * VOCAB * 4, 2**20])
def test_tokens_most_likely_ones_and_the_rest(states, head, token_ids, temperature, chunk_bytes):
    reading = read(states, head, token_ids, k=4, temperature=temperature, chunk_bytes=chunk_bytes)
    logp = exact(states, head, VOCAB, temperature)
    top = logp.topk(4)
    close(reading.logps, logp.gather(-1, token_ids[:, None])[:, 0])
    assert reading.ids.tolist() == top.indices.tolist()
    close(reading.topk_logps, top.values)
    close(reading.tail, 1 - top.values.exp().sum(-1))
    assert not reading.num_floored.any()


def test_chunks_change_nothing(states, head, token_ids):
    whole = read(states, head, token_ids, k=4)
    for part, chunked in zip(whole, read(states, head, token_ids, k=4, chunk_bytes=1), strict=True):
        torch.testing.assert_close(part, chunked)


def test_given_ids_come_first_and_count_once(states, head, token_ids):
    logp = exact(states, head, VOCAB, 1.0)
    best = logp.argmax(-1)
    asked = torch.stack([best, best, torch.full((N,), -1), torch.full((N,), 3)], dim=1)
    reading = read(states, head, token_ids, asked, k=2)
    assert reading.ids.shape == (N, 6)
    assert reading.ids[:, 0].tolist() == best.tolist()
    assert (reading.ids[:, 1:3] == -1).all()
    for row in range(N):
        present = [i for i in reading.ids[row].tolist() if i >= 0]
        assert len(set(present)) == len(present)
        assert set(present) == {3, *logp[row].topk(2).indices.tolist()}
        close(reading.topk_logps[row][reading.ids[row] >= 0], logp[row, present])
        close(reading.tail[row], 1 - logp[row, present].exp().sum())
    assert not reading.topk_logps[reading.ids < 0].any()


def test_low_ones_are_raised_and_counted_where_present(states, head, token_ids):
    logp = exact(states, head, VOCAB, 1.0)
    floor = float(logp.median()) + 0.01
    asked = torch.arange(VOCAB).expand(N, -1).clone()
    asked[:, -1] = 0  # a repeat is absent
    reading = read(states, head, token_ids, asked, logp_floor=floor, chunk_bytes=100)
    tokens = logp.gather(-1, token_ids[:, None])[:, 0]
    close(reading.logps, tokens.clamp(min=floor))
    close(reading.topk_logps[:, :-1], logp[:, :-1].clamp(min=floor))
    assert reading.num_floored.tolist() == ((tokens < floor).int() + (logp[:, :-1] < floor).sum(-1)).tolist()
    assert reading.num_floored.any()
    close(reading.tail, logp[:, -1].exp())  # of the probabilities as they are


def test_no_tokens_at_all(head):
    none = torch.zeros(0, dtype=torch.long)
    reading = read(torch.zeros(0, H), head, none, torch.zeros(0, 2, dtype=torch.long), k=3)
    assert [tuple(part.shape) for part in reading] == [(0,), (0, 5), (0, 5), (0,), (0,)]


def test_more_of_its_own_than_there_are(states, head, token_ids):
    reading = read(states, head, token_ids, k=1000)
    assert reading.ids.sort(-1).values.tolist() == [list(range(VOCAB))] * N
    assert (reading.tail >= 0).all()
    assert reading.tail.max() < 1e-6


def test_bfloat16_loses_no_more_than_plain_torch(states, head, token_ids):
    half = OutputHead(head.weight.bfloat16(), head.scale)
    logits = torch.mm(states.bfloat16(), half.weight[:VOCAB].t())  # type: ignore
    plain = (logits.float() * head.scale).log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    reading = read(states.bfloat16(), half, token_ids)
    assert reading.logps.dtype == torch.float32
    torch.testing.assert_close(reading.logps, plain)


def test_second_and_later_mentions_are_marked():
    ids = torch.tensor([[3, 1, 3, 3, 1], [5, 4, 3, 2, 1], [-1, 2, -1, 2, 0]])
    assert mark_repeats(ids).tolist() == [[3, 1, -1, -1, -1], [5, 4, 3, 2, 1], [-1, 2, -1, -1, 0]]
    assert mark_repeats(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
    assert mark_repeats(torch.zeros(3, 0, dtype=torch.long)).shape == (3, 0)
