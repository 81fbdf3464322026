import subprocess
import sys
import time

import pytest

from opd.eval.overlap import overlap, problem_key

PROBLEM = (
    "A train leaves the station at noon and travels north at $60$ miles per hour; another follows two hours later "
    "at 80 miles per hour. When does the second train overtake the first?"
)
OTHER = "Find the remainder when the product of the first fifty odd primes, each raised to the power two, is divided by 101."


def ids(training, problems):
    return overlap(training, problems)["ids"]


def test_a_copy_is_found_whatever_its_punctuation_and_its_surroundings():
    copy = "Solve this. " + PROBLEM.upper().replace("$60$", "\\(60\\)").replace(";", ",\n") + "\nPut it in \\boxed{}."
    found = overlap(
        [OTHER, copy], [("a", PROBLEM), ("b", "Something else entirely, of no more than thirteen words, I think, or so.")]
    )
    assert found["ids"] == ["a"]
    assert (found["num_problems"], found["num_overlapping"], found["num_training"]) == (2, 1, 2)
    assert (found["share"], found["num_copies"]) == (0.5, 1)
    [example] = found["examples"]
    assert (example["id"], example["copied"]) == ("a", 1.0)
    assert example["text"] == "a train leaves the station at noon and travels north at 60 miles"


def test_thirteen_words_overlap_and_twelve_do_not():
    words = PROBLEM.split()
    assert ids(["So: " + " ".join(words[3:16])], [("a", PROBLEM)]) == ["a"]
    assert ids(["So: " + " ".join(words[3:15])], [("a", PROBLEM)]) == []
    assert overlap([" ".join(words[3:16])], [("a", PROBLEM)])["num_copies"] == 0


def test_short_problems_overlap_only_as_a_whole():
    problems = [("a", "Compute $\\sin 60^\\circ$."), ("b", "Compute $\\cos 60^\\circ$."), ("c", "$$")]
    assert ids(["Please compute \\(\\sin 60^{\\circ}\\) for me", "Compute"], problems) == ["a"]


@pytest.mark.parametrize(
    ("prompt", "same"),
    [
        ("12 + 7 =", True),
        ("What is $12+7=$?", True),
        ("12 - 7 =", False),
        ("12 7", False),
        ("12 + 71 =", False),
        ("1.12 + 7 =", True),  # all of it occurs
        ("12 + 7.5 =", False),
    ],
)
def test_the_signs_of_short_problems_count(prompt, same):
    found = overlap([prompt], [("a", "12+7=")])
    assert (found["num_overlapping"], found["num_copies"]) == (same, same)


@pytest.mark.parametrize(
    ("one", "other"), [("Find 5!", "Find 5."), ("Find 2^{3+4}", "Find 2^3+4"), ("Find 1.5", "Find 15"), ("3 ≤ x", "3 < x")]
)
def test_short_problems_that_differ_in_signs_alone_are_no_copies(one, other):
    assert ids([other], [("a", one)]) == []
    assert ids([f"Now: {one}"], [("a", one)]) == ["a"]


def test_a_copied_problem_counts_however_many_prompts_hold_it():
    """Augmented sets have dozens of variants of one problem."""
    for number in (1, 10, 11, 50):
        found = overlap([f"Variant {i} of it. {PROBLEM} Say it in {i} words." for i in range(number)], [("a", PROBLEM)])
        assert (found["num_overlapping"], found["num_copies"]) == (1, 1)
        assert found["examples"][0]["copied"] == 1.0


def test_common_phrases_and_repeated_prompts():
    instruction = "Reason step by step and put the final answer of the problem into a box at the end. "
    training = [f"{instruction} What is {i} plus {i * i}?" for i in range(11)]
    problem = instruction + "What is the meaning of life, and how many of the answers that were given to it are right?"
    assert ids(training, [("a", problem)]) == []
    assert ids(training[:10], [("a", problem)]) == ["a"]
    assert ids([PROBLEM] * 50, [("a", PROBLEM)]) == ["a"]  # one prompt, however often it is repeated


def test_text_without_spaces_has_words():
    chinese = "设复数满足条件求所有可能的值并证明你的结论是正确的"
    assert ids([f"题目{chinese}。"], [("a", chinese + "谢谢")]) == ["a"]


def test_five_thousand_prompts_take_a_fraction_of_a_second():
    words = [f"w{i}" for i in range(997)]
    texts = [" ".join(words[(i * j * j + j) % 997] for j in range(60)) for i in range(6000)]
    begin_s = time.perf_counter()
    assert overlap(texts[:5000], [(str(i), text) for i, text in enumerate(texts[4999:])])["num_overlapping"] >= 1
    assert time.perf_counter() - begin_s < 2  # 0.2 s on an idle core


def test_nothing_to_compare():
    found = overlap([], [])
    assert (found["share"], found["num_training"], found["ids"], found["examples"]) == (0, 0, [], [])


def test_the_result_does_not_depend_on_the_hash_seed():
    code = "from opd.eval.overlap import overlap; import sys; print(overlap([sys.argv[1]] * 2, [('a', sys.argv[1])]))"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code, PROBLEM], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1


@pytest.mark.parametrize(
    ("other", "same"), [("What is\n 2 + 3? ", True), ("What is 2 - 3?", False), ("what is 2 + 3?", False)]
)
def test_keys_tell_problems_apart(other, same):
    assert (problem_key(other) == problem_key("What is 2 + 3?")) == same
    assert len(problem_key(other)) == 32
    assert int(problem_key(other), 16) >= 0
