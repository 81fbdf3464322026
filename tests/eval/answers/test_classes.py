import time

import pytest

from opd.eval.answers.classes import vote_classes
from opd.eval.grading import Grade, Grader, Item


def by_table(*equal: tuple[str, str]):
    """A comparison that knows these pairs to be equal, and cannot decide on "w"."""
    asked: list = []

    def compare(pairs):
        asked.append(pairs)
        return [None if "w" in (first, *others) else (first, *others) in equal for first, others in pairs]

    return compare, asked


def test_answers_are_grouped_by_text_value_and_algebra():
    compare, asked = by_table(("2x+y", "y+2x"))
    extracted = [["5", "5.0", "6", None, "6", r"\text{5}"], ["2x+y", "y+2x", "z", "2x + y"], []]
    verdicts = [["wrong"] * 6, ["wrong"] * 4, []]
    assert vote_classes(extracted, verdicts, compare) == [[0, 0, 1, None, 1, 0], [0, 0, 1, 0], []]
    assert asked == [[("2x+y", ("y+2x",)), ("2x+y", ("z",)), ("y+2x", ("z",))]]


def test_correct_answers_are_one_class_and_what_was_not_found_does_not_vote():
    compare, asked = by_table()
    classes = vote_classes([["a+b", "5", "b+a", None]], [["correct", "wrong", "correct", "correct"]], compare)
    assert classes == [[0, 1, 0, None]]
    assert asked == [[]]


def test_the_order_of_answers_does_not_matter():
    compare, _ = by_table()
    assert vote_classes([["34", "m+n=34"], ["m+n=34", "34"]], [["wrong"] * 2] * 2, compare) == [[0, 0], [0, 0]]


def test_undecided_pairs_are_different_and_late_answers_are_not_compared():
    compare, asked = by_table()
    classes = vote_classes(
        [["x + w", "w", "9^{9^{9^9}}x", "9^{9^{9^9}} x"]], [["wrong", "wrong", "timeout", "timeout"]], compare
    )
    assert classes == [[0, 1, 2, 2]]
    assert asked == [[("x + w", ("w",))]]


def test_equality_is_passed_on():
    compare, _ = by_table(("a+b", "b+a"), ("b+a", "a+b+0"))
    assert vote_classes([["a+b", "b+a", "a+b+0"]], [["wrong"] * 3], compare) == [[0, 0, 0]]


def test_rows_must_match():
    with pytest.raises(ValueError, match="zip"):
        vote_classes([["5"]], [["wrong", "wrong"]], by_table()[0])


@pytest.fixture(scope="module")
def grader():
    with Grader(limit_s=5, num_workers=1) as grader:
        yield grader


def test_of_a_grader(grader: Grader):
    answers = [r"\frac{2}{4}", "0.5", "2x", "x + x", "(1,2)", r"\left(1, 2\right)", "7"]
    grades = [grader.grade_many([Item(f"\\boxed{{{answer}}}", "7") for answer in answers])]
    extracted = [[grade.extracted for grade in row] for row in grades]
    assert grader.classes(extracted, grades) == [[0, 0, 1, 1, 2, 2, 3]]


def test_of_a_grader_with_a_verifier(tmp_path):
    (tmp_path / "judge.py").write_text("def judge(response, answer, prompt):\n    return False\n")
    with Grader(limit_s=5, num_workers=1, verifier=f"{tmp_path}/judge.py:judge") as grader:
        assert grader.classes([["2x", "x + x"]], [[Grade("wrong", "2x", 0.0), Grade("wrong", "x + x", 0.0)]]) == [[0, 0]]


def test_many_whole_numbers_are_quick():
    rows = [[str(number * 7 + problem) for number in range(64)] for problem in range(100)]
    started_s = time.perf_counter()
    classes = vote_classes(rows, [["wrong"] * 64] * 100, by_table()[0])
    assert time.perf_counter() - started_s < 3
    assert classes == [list(range(64))] * 100
