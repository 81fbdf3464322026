"""Closed forms, edges, and coverage by simulation at a few settings; `benchmarks.statistics` simulates many more."""

import math
import time

import numpy as np
import pytest

from benchmarks.statistics import difference_row, mean_row, rare_row, recovery_row, runs_row, suites_row
from opd.eval import statistics
from opd.eval.statistics import holm, interval, interval_of_suites, paired, paired_suites, recovery, sign_flip_test
from opd.eval.t_distribution import quantile


@pytest.fixture
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1500)


def error(rounds: int) -> float:
    """The standard error of a simulated coverage near 0.95, or of a rejection rate near 0.05."""
    return math.sqrt(0.05 * 0.95 / rounds)


def test_many_symmetric_values_have_students_interval():
    values = np.random.default_rng(0).normal(300, 40, 400)
    found = interval(values)
    half = quantile(0.95, 399) * values.std(ddof=1) / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15)


def test_skewed_values_have_bcas_interval(monkeypatch):
    """Its expansion for a mean (Hall 1992, section 3.10): z + (2 z^2 + 1) skewness / (6 sqrt P) standard errors."""
    monkeypatch.setattr(statistics, "RESAMPLES", 200_000)
    values = np.random.default_rng(0).exponential(1, 400)
    deviations, error = values - values.mean(), values.std(ddof=1) / 20
    lean = (deviations**3).mean() / values.std() ** 3 / (6 * 20)
    found, t = interval(values), quantile(0.95, 399)
    assert (found.high - found.value) / error == pytest.approx(t + (2 * t**2 + 1) * lean, abs=0.02)
    assert (found.low - found.value) / error == pytest.approx(-t + (2 * t**2 + 1) * lean, abs=0.02)


def test_levels_are_nested_and_seeds_repeat():
    values = np.random.default_rng(1).binomial(4, 0.3, 50) / 4
    narrow, wide = interval(values, level=0.8), interval(values, level=0.99)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert interval(values, seed=3) == interval(values, seed=3) != interval(values, seed=4)


def test_a_handful_of_problems_has_at_least_students_interval():
    found = interval([1.0, 2, 3, 4])
    assert (found.low, found.high) == pytest.approx((2.5 - 3.1824 * 0.6455, 2.5 + 3.1824 * 0.6455), abs=1e-3)


def test_limits_lean_as_the_values_do():
    low, high = interval([1.0] * 3 + [0.0] * 27), interval([1.0] * 27 + [0.0] * 3)
    assert low.high - low.value > 1.2 * (low.value - low.low)
    assert (1 - low.high, 1 - low.low) == pytest.approx((high.low, high.high), abs=0.01)
    assert low.low == pytest.approx(0.021, abs=0.02)  # Clopper and Pearson, 3 of 30: [0.021, 0.265]
    assert low.high == pytest.approx(0.265, abs=0.03)


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0.0, 1), (1.0, -1, 1.0), (0.5, -0.5, 0.5)])
def test_no_variation_gives_the_exact_bound(value, low, high):
    share = 1 - 0.025 ** (1 / 30)  # Clopper and Pearson's upper limit of 0 of 30
    found = interval([value] * 30)
    assert found.value == value
    assert found.low == pytest.approx(value if value == 0 else value - share * value)
    assert found.high == pytest.approx(value if value == 1 else value + share * (1 - value))


def test_what_no_variation_means_without_bounds():
    assert (interval([300.0] * 5).low, interval([300.0] * 5).high) == (300, 300)
    assert math.isnan(interval([300.0]).low)
    assert interval([0.5]).low == pytest.approx(0.5 * 0.025)  # one problem says next to nothing


def test_limits_of_proportions_stay_in_range_and_others_need_not():
    assert interval([[1.0, 1, 1, 1, 0], [0, 1, 0, 0, 1]]).high == 1
    assert interval([-1.0, 2, 5, -3, 0, 1]).low < -1


def test_values_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="same P > 0 problems"):
        interval([])
    with pytest.raises(ValueError, match="same P > 0 problems"):
        paired([1.0, 0], [1.0, 0, 1])
    with pytest.raises(ValueError, match="finite"):
        interval([1.0, math.nan])


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(
    ("problems", "samples", "accuracy", "shape"),
    [(30, 4, 0.1, 1.0), (30, 8, 0.5, 0.3), (30, 4, 0.9, 4.0), (100, 1, 0.3, 1.0), (100, 8, 0.7, 1.0)],
)
def test_coverage_of_a_mean(problems, samples, accuracy, shape):
    row = mean_row(problems, samples, accuracy, shape, rounds=1500)
    assert 0.93 <= row["coverage"] <= 0.97


@pytest.mark.usefixtures("fewer_resamples")
def test_one_sample_of_few_problems_is_covered_at_least():
    """Counts of 30 lie so far apart that no interval covers 0.95 of all chances; this one errs to the safe side."""
    assert mean_row(30, 1, 0.1, 1.0, rounds=1000)["coverage"] >= 0.95


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_three_seeds_are_covered_at_least(spread):
    """Student's t of two degrees of freedom is large: conservative where seeds differ little, exact where they do a lot."""
    row = runs_row(30, 4, 3, spread, rounds=800)
    assert 0.95 - error(800) <= row["coverage"] <= (0.97 + error(800) if spread == 1 else 0.99)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(("samples", "runs", "spread"), [(4, 1, 0.0), (4, 3, 1.0)])
def test_coverage_of_the_mean_of_suites(samples, runs, spread):
    row = suites_row(samples, runs, spread, rounds=500)
    assert 0.93 - error(500) <= row["coverage"] <= 0.97 + error(500)


def test_the_mean_of_suites_by_hand():
    rng = np.random.default_rng(0)
    first, second = rng.binomial(8, 0.5, 300) / 8, rng.binomial(8, 0.3, 200) / 8
    found, apart = interval_of_suites([first, second]), [interval(first), interval(second)]
    assert found.value == pytest.approx((first.mean() + second.mean()) / 2)
    for side in ("low", "high"):
        widths = [getattr(each, side) - each.value for each in apart]
        assert abs(getattr(found, side) - found.value) == pytest.approx(math.hypot(*widths) / 2)
    assert interval_of_suites([first]) == interval(first)
    assert paired_suites([(first, first)]) == paired(first, first)
    with pytest.raises(ValueError, match="at least one suite"):
        interval_of_suites([])
    with pytest.raises(ValueError, match="same runs on all suites"):
        interval_of_suites([first, [second, second]])


def test_seeds_that_are_better_on_all_suites_do_not_average_out():
    problems = np.linspace(0.2, 0.6, 400)
    runs = np.stack([problems, problems + 0.1, problems + 0.2])
    together, opposed = interval_of_suites([runs, runs]), interval_of_suites([runs, runs[::-1]])
    assert together.high - together.low > 0.9 * (interval(runs).high - interval(runs).low)
    assert opposed.high - opposed.low < 0.3 * (together.high - together.low)


def test_the_difference_of_suites_counts_all_problems():
    pairs = [(np.zeros(20), np.array([1.0] * 3 + [0] * 17)), (np.zeros(40), np.array([1.0] * 4 + [0] * 36))]
    found = paired_suites(pairs)
    assert found.value == pytest.approx((3 / 20 + 4 / 40) / 2)
    assert found.p >= 2 / 2**7  # seven problems that all gained
    assert (found.p <= 0.05) == (found.low > 0)
    assert paired_suites([pairs[0], (pairs[1][1], pairs[1][0])]).p > 0.3


def test_seeds_that_differ_widen_the_interval():
    problems = np.linspace(0, 1, 40)
    alike = interval(np.stack([problems] * 3) * 0.5)
    apart = interval(np.stack([problems * 0.5, problems * 0.6, problems * 0.4]))
    assert apart.high - apart.low > 1.5 * (alike.high - alike.low)
    assert (alike.low, alike.high) == pytest.approx((interval(problems * 0.5).low, interval(problems * 0.5).high))


def test_runs_that_agree_by_chance_are_no_narrower_than_one():
    runs = np.array([[1.0, 1, 1, 1, 0], [0, 1, 1, 1, 1]])  # equal means, all noise
    found, mean = interval(runs), interval(runs.mean(0))
    assert (found.low, found.high) == pytest.approx((mean.low, mean.high))


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(
    ("problems", "samples", "level", "runs", "spread"),
    [(30, 1, -3.0, 1, 0.0), (30, 4, -2.0, 1, 0.0), (100, 4, 0.0, 1, 0.0), (30, 4, 0.0, 3, 0.3)],
)
def test_no_difference_is_found_at_most_one_time_in_twenty(problems, samples, level, runs, spread):
    row = difference_row(problems, samples, level, 0.0, runs, spread, rounds=600)
    assert row["rejected"] <= 0.05 + error(600)
    assert row["coverage"] == pytest.approx(1 - row["rejected"])  # p and the interval agree


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize(("problems", "rate"), [(10, 0.05), (30, 0.02)])
def test_rare_successes_of_equal_models_are_no_difference(problems, rate, runs):
    assert rare_row(problems, 1, runs, rate, rounds=300)["rejected"] <= 0.03


def test_p_is_below_a_level_where_the_interval_excludes_zero(monkeypatch):
    """Small and rare, where a test and an interval of different make disagree most."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng, found = np.random.default_rng(0), []
    for _ in range(1500):
        num_problems, runs, samples = rng.integers(1, 25), rng.integers(1, 4, 2), rng.integers(1, 5)
        rates = rng.choice([0.0, 0.05, 0.5, 1.0], (2, num_problems), p=rng.dirichlet(np.full(4, 0.5)))
        a, b = (rng.binomial(samples, rate, (count, num_problems)) / samples for rate, count in zip(rates, runs))
        level = rng.choice([0.8, 0.95])
        difference = paired(a, b, level=level)
        excluded = difference.low > 0 or difference.high < 0
        assert (difference.p <= 1 - level) == excluded, (a, b, difference)
        if abs(difference.value) < 1e-12:
            assert difference.p == 1
        found.append(excluded)
    assert 0.05 < np.mean(found) < 0.95


def test_runs_listed_twice_are_no_more_significant():
    a, b = np.zeros(30), np.array([1.0] * 4 + [0] * 26)
    assert paired([a, a], [b, b]).p == paired(a, b).p == 1 / 8


@pytest.mark.parametrize("runs", [1, 2])
def test_a_difference_without_variation_is_as_certain_as_its_problems_are_many(runs):
    def of(problems: int) -> float:
        return paired(np.zeros((runs, problems)), np.ones((runs, problems))).p

    assert [of(problems) for problems in (1, 3, 6)] == pytest.approx([1, 2 / 2**3, 2 / 2**6], rel=1e-4)  # the sign test's


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(("samples", "level", "shift"), [(4, -1.0, 0.8), (1, -3.0, 0.5)])
def test_coverage_of_a_difference(samples, level, shift):
    row = difference_row(30, samples, level, shift, rounds=1000)
    assert 0.95 - error(1000) <= row["coverage"] <= 0.97 + error(1000)


def test_sign_flips_are_exact_where_few_problems_differ():
    assert sign_flip_test(np.array([1.0] * 5 + [0] * 20)) == 2 / 2**5
    assert sign_flip_test(np.array([1.0] * 8 + [-1.0])) == 2 * (1 + 9) / 2**9  # the sign test, as all are of one size
    assert sign_flip_test(np.array([3.0, 2.0, -1.0])) == 4 / 8  # sums 6 and 4 of 6 4 2 0, either sign
    assert sign_flip_test(np.zeros(10)) == 1
    assert sign_flip_test(np.array([])) == 1


def test_sampled_sign_flips_agree_with_exact_ones(monkeypatch):
    differences = np.random.default_rng(0).normal(0.4, 1, 13)
    exact = sign_flip_test(differences)
    monkeypatch.setattr(statistics, "EXACT", 5)
    assert sign_flip_test(differences, seed=1) == pytest.approx(exact, abs=0.015)
    assert sign_flip_test(differences, seed=1) == sign_flip_test(differences, seed=1)


def test_sampled_p_is_never_zero():
    assert sign_flip_test(np.ones(100)) == 1 / 10_001


def test_a_difference_allows_for_one_problem_more_either_way():
    b = np.array([1.0] * 7 + [0] * 93)
    found, alone = paired(np.zeros(100), b), interval(b)  # differences of 0 and 1
    added = 2 * (quantile(0.95, 99) / 100) ** 2
    assert (found.value - found.low) ** 2 == pytest.approx((alone.value - alone.low) ** 2 + added)
    assert (found.high - found.value) ** 2 == pytest.approx((alone.high - alone.value) ** 2 + added)


def test_a_difference_is_b_minus_a():
    rng = np.random.default_rng(0)
    a = rng.binomial(8, 0.3, 60) / 8
    b = np.minimum(1, a + rng.choice([0, 0.25], 60))
    found, back = paired(a, b), paired(b, a)
    assert found.value == pytest.approx(0.125, abs=0.03)
    assert found.p < 0.001
    assert 0 < found.low < found.value < found.high
    assert (back.value, back.p) == pytest.approx((-found.value, found.p))


def test_pairing_removes_the_difficulty_of_problems():
    rng = np.random.default_rng(0)
    hard = rng.beta(0.5, 0.5, 100)
    a, b = rng.binomial(8, hard) / 8, rng.binomial(8, hard) / 8
    found, alone = paired(a, b), interval(a)
    assert found.high - found.low < alone.high - alone.low


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_nothing_differs(runs):
    found = paired([[0.0] * 30] * runs, [[0.0] * 30] * runs)
    assert (found.value, found.p) == (0, 1)
    assert found.high == -found.low == pytest.approx(1 - 0.025 ** (1 / 30))


def test_an_insignificant_difference_never_excludes_zero():
    a, b = np.zeros(30), np.array([1.0] * 4 + [0] * 26)
    found = paired(a, b)
    assert found.p == 1 / 8
    assert found.low <= 0 < found.high


def test_seeds_that_disagree_make_a_difference_uncertain():
    problems = np.linspace(0.2, 0.6, 2000)
    single = paired(problems, problems + 0.1)
    several = paired(np.stack([problems] * 3), np.stack([problems + 0.2, problems, problems + 0.1]))
    assert several.value == pytest.approx(single.value)
    assert single.p < 0.001 < 0.05 < several.p
    # Three runs with means 0.2, 0.0, 0.1 above: t = 0.1 / (0.1 / sqrt 3), two degrees of freedom.
    assert several.p == pytest.approx(1 - math.sqrt(3) / math.sqrt(3 + 2), abs=1e-3)
    assert several.low < 0 < several.high


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_recovery_of_a_known_share():
    start, goal = np.linspace(0, 0.4, 50), np.linspace(0.5, 1, 50)
    found = recovery(start, start + 0.7 * (goal - start), goal)
    assert found.value == pytest.approx(0.7)
    assert (found.low, found.high) == pytest.approx((0.7, 0.7), abs=1e-6)
    assert recovery(start, start, goal).value == pytest.approx(0)
    assert recovery(start, goal, goal).value == pytest.approx(1)


def test_recovery_needs_a_gap():
    rng = np.random.default_rng(0)
    start, goal = rng.binomial(4, 0.4, 30) / 4, rng.binomial(4, 0.42, 30) / 4
    for found in (recovery(start, goal, goal), recovery(goal + 0.5, start, start)):
        assert math.isnan(found.value)
        assert math.isnan(found.low)
        assert "not clearly above 0" in found.note


def test_recovery_counts_the_spread_of_seeds():
    start, goal = np.full(50, 0.2), np.linspace(0.5, 1, 50)
    middle = (start + goal) / 2
    single, several = recovery(start, middle, goal), recovery(start, [middle - 0.1, middle, middle + 0.1], goal)
    assert several.value == pytest.approx(single.value)
    assert several.high - several.low > 2 * (single.high - single.low)


@pytest.mark.usefixtures("fewer_resamples")
def test_coverage_of_recovery():
    assert 0.93 - error(200) <= recovery_row(100, 4, 0.5, rounds=200)["coverage"] <= 0.97 + error(200)


def test_ten_thousand_resamples_of_gsm8k_are_quick():
    rng = np.random.default_rng(0)
    hard = rng.beta(0.5, 0.5, 1319)
    a, b = rng.binomial(4, hard) / 4, rng.binomial(4, hard) / 4
    begin_s = time.perf_counter()
    interval(a)
    paired(a, b)
    assert time.perf_counter() - begin_s < 2  # 0.15 s on an idle core
