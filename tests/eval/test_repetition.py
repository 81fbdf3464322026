import time

import numpy as np
import pytest

from opd.eval.repetition import is_repetitive

MATHS = r"""
We count the lattice points with $x + y \le 10$. Case 1: $x = 0$ gives $y \in \{0, 1, \dots, 10\}$, that is 11 points.
Case 2: $x = 1$ gives 10 points. Case 3: $x = 2$ gives 9 points. Case 4: $x = 3$ gives 8 points. Case 5: $x = 4$ gives 7.
\begin{align*} S &= 11 + 10 + 9 + 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1 \\ &= \frac{11 \cdot 12}{2} \\ &= 66. \end{align*}
| n | n^2 | n^3 |
|---|---|---|
| 1 | 1 | 1 |
| 2 | 4 | 8 |
| 3 | 9 | 27 |
| 4 | 16 | 64 |
| 5 | 25 | 125 |
So $\det \begin{pmatrix} 0 & 0 & 0 \\ 0 & 0 & 0 \\ 0 & 0 & 0 \end{pmatrix} = 0$ and $\frac{1}{3} = 0.333333333333333\ldots$
Check: 1 + 1 = 2, 1 + 1 = 2. Hence the number of points is $\boxed{66}$."""
ROWS = "".join(f"| {i} | {i * i} | {i % 2} |\n" for i in range(60))


@pytest.mark.parametrize("text", [MATHS, MATHS + ROWS, ROWS, MATHS * 3, "yes " * 5, "", "a"])
@pytest.mark.parametrize("split", [list, str.split])
def test_ordinary_text_is_no_loop(text, split):
    words = split(text)
    table = {word: i for i, word in enumerate(dict.fromkeys(words))}
    assert not is_repetitive([table[word] for word in words])


@pytest.mark.parametrize("period", [1, 2, 3, 7, 16, 50, 111, 200])
@pytest.mark.parametrize("after", [[], [2]])  # EOS
def test_loops_are_found(period, after):
    rng = np.random.default_rng(period)
    before, block = rng.integers(3, 5000, 300).tolist(), rng.integers(3, 5000, period).tolist()
    cut = block[: period // 2]
    repeats = max(4, -(-32 // period))
    assert is_repetitive(before + block * repeats + cut + after)
    assert not is_repetitive(before + block * 3 + after)
    assert is_repetitive(np.array(before + block * repeats, np.int32))


def test_a_loop_that_was_left_does_not_count():
    words = np.random.default_rng(0).integers(3, 5000, 50).tolist()
    assert not is_repetitive([7, 8] * 100 + words)


def test_few_short_repetitions_are_no_loop():
    assert not is_repetitive([9] * 31)
    assert is_repetitive([9] * 32)


def fibonacci_word(length):
    """Full of repetitions, but of no block four times: 0 1 0 0 1 0 1 0 0 1 0 0 1 ..."""
    word, last = [0, 1], [0]
    while len(word) < length:
        word, last = word + last, word
    return word[:length]


@pytest.mark.parametrize(
    "ids",
    [
        fibonacci_word(60_000)[::-1],
        [0, 1] * 30_000 + [2, 3, 4],
        [0] * 60_000 + [1] * 7,
        ([0] * 999 + [1]) * 3 + [0] * 30,
        ([0] * 30 + [1]) * 3 + ([0] * 30 + [2]) * 3,
    ],
)
def test_near_loops_are_quickly_told(ids):
    begin_s = time.perf_counter()
    assert not is_repetitive(ids)
    assert time.perf_counter() - begin_s < 2  # 0.1 s on an idle core
