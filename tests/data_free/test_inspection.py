"""What is told of pools."""

import json
import math

import numpy as np
import pytest

from opd.data_free.inspection import holds_solution, inspect_pools, lengths
from opd.data_free.inspection_tables import findings, tables
from opd.data_free.pool import Row, pool_digest
from opd.eval.ngrams import distinct_ngrams
from opd.eval.overlap import signed_words

PROBLEM = "A farmer has seventeen sheep and all but nine of them run away so how many sheep does he have left now"
PROVENANCE = {"teacher": "big", "instruction": "Write.", "sampling": {"temperature": 1.0}, "seed": 0}


def row(number, text, **values):
    return Row(f"p{number}", text, **{"provenance": PROVENANCE, **values})


def inspect(rows, suites=None, **options):
    return inspect_pools({"pool": rows}, suites or {}, **options)["pool"]


def test_counts():
    rows = [row(0, PROBLEM, domain="math", attempt=2), row(1, "Sort a list.", domain="code", attempt=1)]
    rows += [row(2, f"{PROBLEM} and then", domain="math"), row(3, PROBLEM, domain="math", provenance={"imported": "f"})]
    facts = inspect(rows)
    assert facts["num_prompts"] == 4
    assert facts["digest"] == pool_digest(rows)
    assert facts["domains"] == {"math": 3, "code": 1}
    assert facts["provenance"] == [
        {"num_prompts": 3, "provenance": PROVENANCE},
        {"num_prompts": 1, "provenance": {"imported": "f"}},
    ]
    assert (facts["num_redrawn"], facts["num_unusable_drafts"]) == (2, 3)
    assert (facts["exact_duplicates"]["num_groups"], facts["exact_duplicates"]["num_repeats"]) == (1, 1)
    assert facts["exact_duplicates"]["groups"] == [{"ids": ["p0", "p3"], "text": PROBLEM}]
    assert facts["near_duplicates"]["groups"] == [{"ids": ["p0", "p2", "p3"], "text": PROBLEM}]
    assert facts["near_duplicates"]["num_repeats"] == 2
    assert facts["length"]["characters"]["min"] == len("Sort a list.")
    assert facts["length"]["words"] == {"min": 3.0, "q1": 17.25, "median": 22.0, "q3": 22.5, "max": 24.0}


def test_the_same_text_in_two_domains_is_no_duplicate():
    rows = [row(0, PROBLEM, domain="math"), row(1, PROBLEM, domain="code")]
    assert inspect(rows)["near_duplicates"] == {"num_groups": 0, "num_repeats": 0, "groups": []}


def test_conversations_are_compared_as_a_whole():
    def talk(number, said):
        return row(number, [{"role": "system", "content": said}, {"role": "user", "content": "Go on."}])

    assert inspect([talk(0, "Be kind."), talk(1, "Count to ten.")])["exact_duplicates"]["num_repeats"] == 0
    assert inspect([talk(0, "Be kind."), talk(1, "Be kind.")])["exact_duplicates"]["num_repeats"] == 1
    assert inspect([row(0, "Go."), row(1, [{"role": "user", "content": "Go."}])])["exact_duplicates"]["num_repeats"] == 1


def test_conversations_without_a_user_are_compared_by_all_that_is_said():
    def ask(number, said):
        return row(number, [{"role": "system", "content": said}])

    facts = inspect([ask(0, "Name a river."), ask(1, "Name a lake."), ask(2, "Name a river.")])
    assert facts["exact_duplicates"]["groups"][0]["ids"] == ["p0", "p2"]
    assert facts["near_duplicates"]["num_repeats"] == 1


def test_a_provenance_of_another_tool_is_shown():
    told = {"teacher": {"name": "big"}, "seed": [1, 2], "instruction": ["Write."], "opd": None}
    (found,) = (one for one in tables({"pool": inspect([row(0, PROBLEM, provenance=told)])}) if one.name == "provenance")
    assert found.shown() == [["pool", "1", "{'name': 'big'}", "[1, 2]", "–", "–", "['Write.']", "–"]]


def test_overlap_with_suites():
    rows = [row(0, f"Well: {PROBLEM}?"), row(1, "What is 2 + 3?"), row(2, "What is 2 - 3?")]
    facts = inspect(rows, {"farm": [("f0", PROBLEM), ("f1", "unrelated " * 20)], "sums": [("s0", "2 + 3")]})["overlap"]
    assert (facts["farm"]["num_overlapping"], facts["farm"]["share"], facts["farm"]["ids"]) == (1, 0.5, ["f0"])
    assert (facts["farm"]["prompts"], facts["sums"]["prompts"]) == (["p0"], ["p1"])


def test_u4_is_told_at_numbers_of_words_that_all_pools_have():
    rng = np.random.default_rng(0)

    def pool(size):
        return [row(n, " ".join(f"w{k}" for k in rng.integers(0, 9, 20))) for n in range(size)]

    pools = {"small": pool(20), "large": pool(60), "short": [row(0, "two words")]}
    facts = inspect_pools(pools, {}, seed=1)
    words = {name: [signed_words(one.text) for one in rows] for name, rows in pools.items()}
    assert list(facts["small"]["u4"]["at"]) == ["256", "400", "1024"]
    assert facts["large"]["u4"] == {
        "unit": "words",
        "num_units": 1200,
        "common": 400,
        "at": {str(size): distinct_ngrams(words["large"], 4, size, 1) for size in (256, 400, 1024)},
    }
    assert facts["small"]["u4"]["at"]["1024"] is None
    assert facts["small"]["u4"]["at"]["400"] == pytest.approx(facts["large"]["u4"]["at"]["400"], abs=0.05)
    assert facts["short"]["u4"]["at"] == {"256": None, "400": None, "1024": None}
    assert not any(math.isnan(value) for value in facts["large"]["u4"]["at"].values())


def test_tokens_of_a_model(micro_tokenizer):
    rows = [row(0, "abcabc"), row(1, "ab")]
    facts = inspect(rows, tokenizer=micro_tokenizer)
    assert facts["u4"] == {"unit": "tokens", "num_units": 6, "common": 6, "at": {"6": 1.0}}
    assert facts["length"]["tokens"]["max"] == 6
    assert (lengths(rows, micro_tokenizer), lengths(rows, None)) == ([6, 2], [1, 1])


@pytest.mark.parametrize(
    "text",
    [
        r"What is 2 + 2? \boxed{4}",
        "What is 2 + 2?\n#### 4",
        "What is 2 + 2?\n\n**Solution:** Add them.",
        "### Problem\nAdd 2 and 2.\n### Solution\nWe add.",
        "What is 2 + 2? Answer: 4",
        "What is 2 + 2? The answer is 4.",
    ],
)
def test_a_solution_inside_is_seen(text):
    assert holds_solution(text)


@pytest.mark.parametrize(
    "text",
    [
        r"What is 2 + 2? Put your final answer in \boxed{}.",
        "What is 2 + 2?\nAnswer:",
        "Find the solution of x + 2 = 4 and explain the answer.",
        "#### Problem about sheep\nHow many are left?",
        "Solution A weighs 3 kg. How much salt is in it?",
    ],
)
def test_a_problem_alone_is_none(text):
    assert not holds_solution(text)


def test_examples_are_drawn_by_the_seed():
    rows = [row(n, f"text {n}") for n in range(50)]
    first, again, other = (inspect(rows, show=4, seed=seed)["examples"] for seed in (0, 0, 1))
    assert first == again != other
    assert len({one["id"] for one in first}) == 4
    assert len(inspect(rows[:2], show=4)["examples"]) == 2


def test_all_of_it_is_json_and_tables():
    rows = [row(n, f"{PROBLEM} {'abc'[n % 3]}", domain="ab"[n % 2]) for n in range(12)]
    facts = inspect_pools({"one": rows, "two": rows[:5]}, {"farm": [("f0", PROBLEM)]}, show=2)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    found = {table.name: table for table in tables(facts)}
    names = "pools provenance domains u4 lengths exact-duplicates near-duplicates overlap overlap-examples"
    assert list(found) == names.split()
    assert found["pools"].shown()[1][:4] == ["two", "5", "0", "3"]
    assert found["overlap"].shown()[0] == ["one", "farm", "1", "1", "100.0", "1", "12"]
    assert found["lengths"].shown()[0] == ["one", "characters", "104", "104.0", "104.0", "104.0", "104"]
    assert "12 prompts; 6 exact and 4 further near duplicates" in findings(facts)[0]
    assert "overlaps with 1 of 1 problems of farm" in findings(facts)[0]
    solved = inspect([row(0, r"2 + 2? \boxed{4}")])
    assert findings({"one": solved})[0].startswith(
        "one: 1 prompt; 0 exact and 0 further near duplicates; 1 seems to hold its solution; u4"
    )
