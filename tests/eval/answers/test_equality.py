import time

import pytest

from opd.eval.answers.equality import equivalent, same_value

# Correct answer and what is the same.
SAME = r"""
\sqrt{\frac{1}{n}} | sqrt(1/n)
\frac{7}{2} | 3 1/2
4.5e33 | 4.5 × 10^33
4.5e33 | 4.5 \times 10^{33} \mathrm{~erg} \mathrm{~s}^{-1}
1e-8 | 10^{-8} m
50\% | \frac{1}{2}
18 | \$18.00
90^\circ | 90 \text{ degrees}
[2,\infty) | x\geq 2
[2,\infty) | 2 \leq x < \infty
(1,3] | 3 \ge x > 1
(-\infty,1)\cup(2,\infty) | x<1 \text{ or } x>2
(-\infty, 0) \cup\{1\} | \{1\} \cup (-\infty, 0)
t(0,4] | (0, 4]
1,2 | x = 2 \text{ or } x = 1
1,2 | x \in \{2, 1\}
1,2 | (1, 2)
(1,2) | (x,y) = (1,2)
(1,2) | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
(1,2) | \left(\frac{2}{2},\ \sqrt{4}\right)
1 \pm \sqrt{19} | x = 1 - \sqrt{19} \text{ and } x = 1 + \sqrt{19}
\{1\pm\sqrt{5},-2\} | \{-2, 1-\sqrt5, 1+\sqrt5\}
\text{Evelyn} | \textbf{evelyn}
\text{ellipse} | \text{an ellipse}
\text{(C)} | \textbf{(C)}\ 12
\frac{n(n+1)}{2} | \binom{n+1}{2}
y = 2x+3 | 2x - y + 3 = 0
y = 2x+3 | 2x+3
f(x) = 2x | f(n)=2n
5 | n = 5
\sqrt{2} | 1.41421356
\sqrt{2} | 1.414...
\ln 2 + i\pi / 3 | \ln(2) + \frac{\pi i}{3}
np.arcsin(10/13) | \sin^{-1}(10/13)
\frac{1}{2a}(\exp{a*t} - \exp{-a*t}) | \frac{\sinh(at)}{a}
864 \mbox{ inches}^2 | 864 \text{ square inches}
12\pi | 12pi \text{ cm}^2
12 | 12 m
52_8 | 52
2^{1009} | 2 \cdot 2^{1008}
\frac{37}{4} m | \frac{37m}{4}
MR=SRMC | SRMC = MR
E_{1},E_{2} | E_2 \text{ and } E_1
x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega | x_0 \cos(\omega t) + \frac{\dot{x}_0}{\omega} \sin(\omega t)
(1 - 3e^{-2t} + 2e^{-5t}) u(t) | u(t)(1 - 3 e^{-2 t} + 2 e^{-5 t})
\sum_{n=1}^{3} n | 6
(-\infty,\infty) | \mathbb{R}
x**2 + 1 | 1 + x^2
"""

# Correct answer and what is not.
DIFFERENT = r"""
12\pi | 12
12 | 12x
12_3 | 12_4
12_3 | 5
10:30 | 10:31
50\% | 0.05
1e-8 | 1.1e-8
[2,\infty) | x > 2
(1,3) | [1,3]
(1,3) | \{1,3\}
(1,2) | (2,1)
1,2 | 1
1,2 | 1,2,3
-2,-2 | -2
1 | 1, 2
1 \pm \sqrt{19} | 1 + \sqrt{19}
\text{(C)} | (B) 12
\text{(C)} | c
p - q | q - p
x=5 | y=5
f(x)=2x | g(x)=2x
f(x)=2x | f(x)=3x
\sqrt{2} | 1.41422
2^{1009} | 2^{1009}+1
\frac{37}{4} m | \frac{37}{4}
7.6 Z | 7.6
I(0) | 0
(-\infty,1)\cup(2,\infty) | (-\infty,1]\cup(2,\infty)
(-\infty,1)\cup(2,\infty) | (-\infty,1)
1\frac{4}{5} | \frac{4}{5}
10112369 | 10112370
\infty | -\infty
3xy | 3
silent | listen
5 | I do not know
5 | }{
5 |
"""


def pairs(block: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in line.split(" |", 1)) for line in block.strip().splitlines()]


@pytest.mark.parametrize(("answer", "extracted"), pairs(SAME))
def test_same(answer: str, extracted: str):
    assert equivalent((extracted, (answer,)))
    assert equivalent((extracted, ("y + 3", answer)))


@pytest.mark.parametrize(("answer", "extracted"), pairs(DIFFERENT))
def test_different(answer: str, extracted: str):
    assert not equivalent((extracted, (answer,)))


@pytest.mark.parametrize(
    ("extracted", "answer", "same"),
    [
        ("025", "25", True),
        ("142", "142.0", True),
        ("1,000", "1000", True),
        ("5", "6", False),
        ("1.24e-8", "3e-9", False),
        (r"4.50 \times 10^{33}", "4.5e33", True),
        ("1e9999", "2", False),
        ("evelyn", r"\text{Evelyn}", True),
        ("silent", "listen", False),
        ("1/2", "0.5", True),
        ("1 1/2", "11/2", False),
        ("(1, 3)", "(1, 2)", False),
        ("2, 1.0", "1, 2", True),
        ("[1, 2]", "(1, 2]", False),
        ("1, 2, 3", "1, 2", False),
        ("I do not know", "1, 2", False),
        ("2x", "x + x", None),
        ("(1, 2x)", "(1, x + x)", None),
        ("(1, 2x)", "(2, x + x)", False),
        ("2x, 1", "x + x, 2", None),
        ("2x, [1, 2]", "x + x, [1, 3]", False),
    ],
)
def test_same_value_without_algebra(extracted: str, answer: str, same: bool | None):
    assert same_value(extracted, answer) is same


PIECES = [
    "1",
    "{",
    "}",
    "(",
    "$ ",
    r"\text{",
    r"\left",
    "1,234,",
    " ",
    r"\,",
    "**",
    "9^{",
    "a ",
    "abcd ",
    "1,",
    "(1,2),",
    r"\pm ",
]
PIECES += [
    " and ",
    "= ",
    r"\le ",
    r"\begin{pmatrix}",
    r"\\",
    "1e",
    "0.",
    r"\overline{3}",
    "cm ",
    "m/",
    "x_{",
    r"\sqrt",
    "12_3",
    "C. ",
]


@pytest.mark.parametrize("piece", PIECES)
def test_comparing_texts_is_linear(piece: str):
    for length in (1_990, 100_000):
        text = piece * (length // len(piece))
        started_s = time.perf_counter()
        for extracted in (text, "5" + text, "(" + text + ")"):
            same_value(extracted, "5")
            same_value(extracted, "(1, x + 2)")
        assert time.perf_counter() - started_s < 4.0
