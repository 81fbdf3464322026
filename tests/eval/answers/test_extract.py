import time

import pytest

from opd.eval.answers.extract import extract_answer

CASES = [
    (r"So \boxed{5}.", "5"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\fbox{7}", "7"),
    (r"\boxed {8}", "8"),
    (r"\boxed{\boxed{9}}", "9"),
    (r"\boxed{a + \fbox{b}}", r"a + \fbox{b}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"{ \boxed{5}", "5"),
    (r"} \boxed{5}", "5"),
    (r"\boxed{5} and then \boxed{6", "5"),
    (r"\boxed{} The answer is 4.", "4"),
    (r"The answer is 3. \boxed{4}. The answer is 5.", "4"),
    (r"\boxed{a \\ {b}}", r"a \\ {b}"),
    ("She makes 9 * 2 = 18.\n#### 18", "18"),
    ("#### $1,200\n", "1,200"),
    ("#### yes", "yes"),
    ("#### Step two\nWe add 5.", None),
    ("The answer is 73.", "73"),
    ("the answer is **73**.", "73"),
    ("The final answer is $\\frac{1}{2}$.", r"\frac{1}{2}"),
    ("Final answer: 3.5", "3.5"),
    ("Answer: 73", "73"),
    ("**Answer:** 73", "73"),
    ("**Answer: 73**", "73"),
    ("**Final Answer**: 73", "73"),
    ("Final answer:\n\n$x^2$", "x^2"),
    ("Answer: x**2 + 1", "x**2 + 1"),
    ("The answer is 3. No: the answer is 4. This follows from 5.", "4"),
    ("The answer is $5$ apples.", "5"),
    ("The answer is $5$ and $7$.", "5 and 7"),
    (r"The answer is \(12\).", "12"),
    (r"The answer is \$18.", "18"),
    ("Answer: 0.333...", "0.333..."),
    ("We get 5 and are done.", None),
    ("Answering 5 questions: 7", None),
    ("The answer is", None),
    ("", None),
    (r"<think>\boxed{1}</think> The answer is 2.", "2"),
    (r"<think>\boxed{1}</think> I do not know.", None),
    (r"<think>So \boxed{1}, but wait", "1"),
]


@pytest.mark.parametrize(("response", "answer"), CASES)
def test_extract_answer(response: str, answer: str | None):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed", "{", "}", "the answer is ", "answer * ", "\n#### ", "*", "$", ". ", "\\boxed{1}", "\\("],
)
def test_extraction_is_linear(piece: str):
    started_s = time.perf_counter()
    for text in (piece * (100_000 // len(piece)), "The answer is " + piece * (100_000 // len(piece))):
        extract_answer(text)
    assert time.perf_counter() - started_s < 1.0
