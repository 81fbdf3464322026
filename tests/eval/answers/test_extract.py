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
    (r"so \boxed 5.", "5"),
    (r"so \boxed5, done", "5"),
    (r"$\boxed -1,200.5$", "-1,200.5"),
    (r"\boxed C", "C"),
    (r"\boxed{4}, no: \boxed 5", "5"),
    (r"\boxed an answer", None),
    ("<answer> 8 </answer>", "8"),
    ("<answer>7</answer> no, <answer>1 2\n3 4</answer>", "1 2\n3 4"),
    (r"\boxed{7} <answer>8</answer>", "7"),
    (r"<answer>\boxed{7}</answer>", "7"),
    ("The answer is 5. <answer>8</answer>", "8"),
    ("<answer></answer> The answer is 5.", "5"),
    ("<answer>8", None),
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
    (r"\boxed{2} and \boxed{3}", "2, 3"),
    (r"$\boxed{2}$, $\boxed{3}$ or \boxed{4}.", "2, 3, 4"),
    (r"\boxed{2} so \boxed{3}", "3"),
    (r"x = \boxed{2}, y = \boxed{3}", "3"),
    (r"\boxed{\boxed{\boxed 9}}", "9"),
    ("**Final Answer**\n\n5", "5"),
    ("### Final Answer\n\n5", "5"),
    ("## Final Answer:\n$x = 5$", "x = 5"),
    ("**Final Answer**\n\nWe have shown that this is 5", None),
    ("The answers are 2 and 3", "2 and 3"),
    ("The correct option is B.", "B"),
    ("The correct answer is (B)", "(B)"),
    ("The options are A and B.", None),
    ("The answer: 5", "5"),
    ("Answer is 5", "5"),
    ("The answer is\n\\[\n5\n\\]\nas said.", "5"),
    ("The answer is approximately 5", "5"),
    ("The answer is therefore, $x=5$.", "x=5"),
    ("The answer is thus equal to 5.", "5"),
    ("The answer is 5, because of it", "5"),
    ("The answer is 5 (since 2+3=5)", "5"),
    ("The answer is 5. I think the answer is correct.", "5"),
    ("The answer is as follows: 2 is even.", None),
    ("The answer is right triangle", "right triangle"),
    (r"<think>\boxed{1}</think> I do not know.", None),
    (r"<think>So \boxed{1}, but wait", "1"),
]


@pytest.mark.parametrize(("response", "answer"), CASES)
def test_extract_answer(response: str, answer: str | None):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "\\boxed",
        "{",
        "}",
        "the answer is ",
        "answer * ",
        "\n#### ",
        "*",
        "$",
        ". ",
        "\\boxed{1}",
        "\\(",
        "<answer>",
        "</answer>",
        "\\boxed 1,",
    ],
)
def test_extraction_is_linear(piece: str):
    started_s = time.perf_counter()
    for text in (piece * (100_000 // len(piece)), "The answer is " + piece * (100_000 // len(piece))):
        extract_answer(text)
    assert time.perf_counter() - started_s < 1.0


@pytest.mark.parametrize(
    ("before", "piece", "between", "after"),
    [
        ("", "\\boxed{", "5", "}"),
        ("", "\\boxed{ ", "", " }"),
        ("The answer is \\( a", "\\)", "", "\\("),
        ("", "Final Answer\nprose of more than four words\n", "", ""),
        ("", "\\boxed{1}, ", "", ""),
    ],
)
def test_twice_the_length_takes_twice_the_time(before: str, piece: str, between: str, after: str):
    def duration_s(number: int) -> float:
        text = before + piece * number + between + after * number
        durations_s = []
        for _ in range(3):
            started_s = time.process_time()
            extract_answer(text)
            durations_s.append(time.process_time() - started_s)
        return min(durations_s)

    assert duration_s(32_000) < 8 * duration_s(8_000) + 0.01  # four times, where sixteen would be quadratic
