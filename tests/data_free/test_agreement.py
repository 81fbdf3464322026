"""A model's agreement with itself."""

from opd.data_free.agreement import Agreement, agreements
from opd.eval.grading import Grader
from opd.eval.samples import Sampled


def agreement(*responses):
    samples = {(4, number): Sampled(4, number, response, 3, "eos", False) for number, response in enumerate(responses)}
    with Grader() as grader:
        found = agreements(samples, grader)
    assert list(found) == [4]
    return found[4]


def boxed(*answers):
    return agreement(*(rf"So \boxed{{{answer}}}" if answer else "I do not know." for answer in answers))


def test_the_largest_class_of_equal_answers():
    assert boxed("7", "8", "7", "9") == Agreement("7", 0.5)
    assert boxed("0.5", r"\frac12", "1/2", "2") == Agreement("0.5", 0.75)  # as evaluation compares them


def test_no_answer_does_not_vote_but_counts():
    assert boxed("7", None, None, None) == Agreement("7", 0.25)
    assert boxed(None, None) == Agreement(None, 0.0)


def test_of_answers_as_frequent_the_first_stands():
    assert boxed("8", "7", "7", "8") == Agreement("8", 0.5)
