"""What of a teacher's completions becomes training data."""

from opd.data_free.answer import training_rows
from opd.eval.samples import Sampled
from opd.records import Prompt

PROMPTS = [Prompt(str(n), ({"role": "user", "content": f"q{n}"},), answer=None if n else "7") for n in range(2)]


def sampled(place, sample, response, finish="eos"):
    return Sampled(place, sample, response, 3, finish, False)


def test_rows_and_counts():
    found = [sampled(1, 0, "b"), sampled(0, 1, "long", "length"), sampled(0, 0, "a"), sampled(1, 1, " \n")]
    rows, counts = training_rows(PROMPTS, {(row.index, row.sample): row for row in found}, {})
    assert rows == [
        {
            "id": "0",
            "sample": 0,
            "prompt": [{"role": "user", "content": "q0"}],
            "completion": [{"role": "assistant", "content": "a"}],
            "answer": "7",
        },
        {
            "id": "1",
            "sample": 0,
            "prompt": [{"role": "user", "content": "q1"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
    ]
    assert counts == {"num_answers": 2, "num_truncated": 1, "num_empty": 1, "num_tokens": 6}


def test_a_thought_that_the_template_opens_belongs_to_the_answer():
    rows, _ = training_rows(PROMPTS, {(0, 0): sampled(0, 0, "hm</think>\n7")}, {0: "<think>\n"})
    assert rows[0]["completion"][0]["content"] == "<think>\nhm</think>\n7"
