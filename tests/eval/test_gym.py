"""The verifier of reasoning-gym's tasks inside the grader: what is extracted, what votes."""

import pytest

from opd.data import DatasetConfig
from opd.eval import gym
from opd.eval.at_k import maj_at_k
from opd.eval.grading import Grader, Item

pytest.importorskip("reasoning_gym")


def test_answer_elements_are_extracted_and_vote():
    problem = gym.load_task("reasoning_gym:chain_sum@3", DatasetConfig(""), 1)[0]
    right = str(problem.meta["entry"]["answer"])
    responses = [f"<answer>{right}</answer>", *[f"<answer>{int(right) + 1}</answer>"] * 7, f"It is {right}.", "cut off"]
    items = [Item(text, None, truncated=text == "cut off", prompt=dict(problem.meta)) for text in responses]
    with Grader(num_workers=1, verifier=gym.VERIFIER) as grader:
        grades = grader.grade_many(items)
        classes = grader.classes([[grade.extracted for grade in grades]], [grades])
    assert [grade.verdict for grade in grades] == ["correct", *["wrong"] * 7, "no_answer", "truncated"]
    assert classes == [[0, *[1] * 7, None, None]]
    correct = [[grade.verdict == "correct" for grade in grades]]
    assert maj_at_k(classes, correct, 10)[0] == 0.0
