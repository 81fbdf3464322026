"""Which rows a filter keeps."""

import random

from opd.data_free.inspection import inspect_pools
from opd.data_free.pool import Row
from opd.data_free.selection import Dropped, select, selected

PROBLEM = "A farmer has seventeen sheep and all but nine of them run away so how many sheep does he have left now"


def pool(*texts, domain="default"):
    return [Row(f"p{n}", text, domain, provenance={"teacher": "big"}, further={"answer": n}) for n, text in enumerate(texts)]


def test_the_first_of_duplicates_stays():
    rows = pool(PROBLEM, "other", f"{PROBLEM} then", PROBLEM, " other")
    kept, dropped = select(rows, "exact", {})
    assert [row.id for row in kept] == ["p0", "p1", "p2"]
    assert dropped == [Dropped("p3", "exact duplicate", "p0"), Dropped("p4", "exact duplicate", "p1")]
    kept, dropped = select(rows, "near", {})
    assert [row.id for row in kept] == ["p0", "p1"]
    assert dropped[0] == Dropped("p2", "near duplicate", "p0")
    assert kept[0].further == {"answer": 0}  # what else is in the row stays


def test_what_overlaps_with_a_suite_goes():
    rows = pool("fine", f"Now, {PROBLEM.lower()}!", "2 + 3", "2 - 3")
    kept, dropped = select(rows, None, {"farm": [("f7", PROBLEM)], "sums": [("s0", "2+3")]})
    assert [row.id for row in kept] == ["p0", "p3"]
    assert dropped == [Dropped("p1", "overlaps with farm", "f7"), Dropped("p2", "overlaps with sums", "s0")]


def test_a_row_that_a_suite_drops_is_not_repeated_by_others():
    head = " ".join(PROBLEM.split()[1:] * 3)
    rows = pool(f"{head} left to right with thirteen words of the suite in one long row here", head)
    problems = [("f0", "left to right with thirteen words of the suite in one long row here")]
    assert [row.id for row in select(rows, "near", {"s": problems})[0]] == ["p1"]


def test_one_text_of_two_domains_stays_twice():
    rows = [*pool("same", domain="math"), *pool("same", domain="code")]
    assert len(select(rows, "near", {})[0]) == 2


def test_nested_pools_stay_nested():
    rng = random.Random(0)
    words = PROBLEM.split()
    texts = [" ".join(rng.choices(words, k=rng.choice([2, 3, 40]))) for _ in range(30)]
    texts += [f"{rng.choice(texts)} {rng.choice(words)}" for _ in range(90)]
    rows = pool(*texts)
    suites = {"s": [("q", "left now"), ("r", " ".join(texts[3].split()[:13]))]}
    whole, dropped = select(rows, "near", suites)
    assert {"near duplicate", "overlaps with s"} == {one.because for one in dropped}
    for size in (8, 40, 77):
        kept, _ = select(rows[:size], "near", suites)
        assert kept == [row for row in whole if row in kept] == whole[: len(kept)]
        assert len(kept) == sum(int(row.id[1:]) < size for row in whole)


def test_what_is_left_has_neither():
    words = PROBLEM.split()
    rows = pool(*(" ".join(words[n % 5 :] + words[: n % 7]) for n in range(40)))
    suites = {"farm": [("f0", " ".join(words[2:18]))]}
    assert inspect_pools({"p": rows}, suites)["p"]["near_duplicates"]["num_repeats"] > 0
    kept, _ = select([*rows, *pool("Sheep?")], "near", suites)
    facts = inspect_pools({"p": kept}, suites)["p"]
    assert facts["near_duplicates"]["num_repeats"] == facts["overlap"]["farm"]["num_overlapping"] == 0


def test_the_provenance_tells_of_every_choice():
    (row,) = select(pool("a"), "exact", {"farm": []})[0]
    (told,) = row.provenance["selected"]
    assert told | {"opd": ""} == {"by": "filter", "dedup": "exact", "decontaminate": ["farm"], "opd": ""}
    assert row.provenance["teacher"] == "big"
    assert [one["by"] for one in selected(row, "calibrate", {}).provenance["selected"]] == ["filter", "calibrate"]
