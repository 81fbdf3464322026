"""Which prompts a step gets: full batches of any pool, exact shares of domains, a pure function of the step."""

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.data_free.sampler import Order, PoolSampler

RANDOM = settings(max_examples=60, deadline=None, derandomize=True, database=None)
WEIGHTS = st.lists(st.integers(1, 5000) | st.floats(0.01, 10, allow_nan=False), min_size=1, max_size=5)


def single(size, seed=0, order: Order = "fixed"):
    return PoolSampler({"d": size}, {"d": 1.0}, seed, order)


def several(weights, sizes=None, **options):
    names = [f"d{place}" for place in range(len(weights))]
    return PoolSampler(dict(zip(names, sizes or [5] * len(names))), dict(zip(names, weights)), 3, **options)


@given(size=st.sampled_from([1, 3, 8, 64, 1000]) | st.integers(1, 100), count=st.integers(1, 70), seed=st.integers(0, 99))
@RANDOM
def test_a_pool_of_any_size_fills_batches_evenly(size, count, seed):
    total = Counter()
    for step in range(9):
        batch = single(size, seed).batch(step, 0, count)
        times = Counter(place for _, place in batch)
        assert len(batch) == count
        assert set(times) <= set(range(size))
        assert all(math.floor(count / size) <= times[place] <= math.ceil(count / size) for place in range(size))
        total += times
        assert max(total.values()) - min(total[place] for place in range(size)) <= 1


def test_fresh_permutations_are_less_even():
    """Why `fixed` is the default: the last of one epoch may be the first of the next."""
    batches = [single(5, order="reshuffle").batch(step, 0, 3) for step in range(50)]
    assert any(len(set(batch)) < 3 for batch in batches)
    drawn = [place for step in range(25) for _, place in sorted(single(5, order="reshuffle").batch(step, 0, 5))]
    assert drawn == 25 * list(range(5))
    assert len({tuple(single(5, order="reshuffle").batch(step, 0, 5)) for step in range(9)}) == 9


def test_batches_stay_what_they_were():
    """Resumed runs must get the same ones from another version."""
    assert [place for _, place in single(5, 3).batch(1, 0, 4)] == [1, 4, 2, 3]
    assert [place for _, place in single(5, 3).batch(1, 1, 4)] == [4, 3, 2, 1]
    assert several([1540, 1870, 4048]).batch(7, 0, 6) == [
        ("d0", 1),
        ("d1", 0),
        ("d2", 0),
        ("d2", 4),
        ("d1", 1),
        ("d2", 3),
    ]


@given(weights=WEIGHTS, count=st.integers(1, 40), start=st.integers(0, 10**6))
@RANDOM
def test_domains_have_their_shares(weights, count, start):
    """Of all prompts so far, and of a step's: to within what the module says."""
    sampler = several(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    shares = {f"d{place}": weight / sum(exact) for place, weight in enumerate(exact)}
    num, total = len(weights), Counter()
    for step in range(5):
        total += Counter(domain for domain, _ in sampler.batch(step, 0, count))
        for domain, share in shares.items():
            bound = Fraction(1, 2) + share * Fraction(num - 2, 2)
            assert abs(total[domain] - (step + 1) * count * share) <= bound
            assert bound < 1 or num > 3
    far = Counter(domain for domain, _ in sampler.batch(start, 0, count))
    for domain, share in shares.items():
        assert abs(far[domain] - count * share) <= 1 + share * (num - 2)


@given(weights=WEIGHTS, count=st.integers(1, 9))
@RANDOM
def test_windows_join(weights, count):
    """What a step gets is found without the steps before it, and equals what going through them finds."""
    sampler = several(weights)
    steps = 60 // count
    whole = Counter(sampler.batch(0, 0, steps * count))
    assert sum((Counter(sampler.batch(step, 0, count)) for step in range(steps)), Counter()) == whole


@pytest.mark.parametrize("order", ["fixed", "reshuffle", "iid"])
def test_another_attempt_keeps_the_domain_of_each_place(order):
    sampler = several([1, 3], [400, 400], order=order)
    for step in range(4):
        first, again = sampler.batch(step, 0, 16), sampler.batch(step, 1, 16)
        assert [domain for domain, _ in first] == [domain for domain, _ in again]
        assert sum(one != other for one, other in zip(first, again)) > 12


def test_within_each_domain_prompts_are_even_too():
    sampler, total = several([1, 2.5], [3, 7]), Counter()
    for step in range(40):
        total += Counter(sampler.batch(step, 0, 5))
        for domain, size in sampler.sizes.items():
            counts = [total[domain, place] for place in range(size)]
            assert max(counts) - min(counts) <= 1


def test_a_further_domain_leaves_the_orders_of_the_others():
    def order(sampler, domain):
        return [place for step in range(9) for name, place in sorted(sampler.batch(step, 0, 1)) if name == domain]

    alone, beside = single(8), PoolSampler({"d": 8, "e": 8}, {"d": 1, "e": 1}, 0)
    both = [place for step in range(20) for name, place in beside.batch(step, 0, 1) if name == "d"]
    assert order(alone, "d")[:8] == both[:8]


def test_independent_draws_miss_some():
    drawn = Counter(place for step in range(8) for _, place in single(64, order="iid").batch(step, 0, 64))
    assert len(drawn) == 64
    assert max(drawn.values()) > 12  # of 8 expected


def test_seeds_and_places_in_the_batch_differ():
    assert len({tuple(single(64, seed).batch(0, 0, 64)) for seed in range(5)}) == 5
    steps = [tuple(single(8).batch(step, 0, 8)) for step in range(5)]
    assert len(set(steps)) == 5  # the same prompts, shuffled within each batch
    assert {frozenset(step) for step in steps} == {frozenset(("d", place) for place in range(8))}
