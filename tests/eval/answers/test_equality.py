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
5 m | 5
5 m | \sqrt{25}
\frac{20m}{4} | 5 m
5 m | 5 \text{ meters}
5 \text{ km/h} | 5 kilometers per hour
5 | 5 apples
12 \text{ eggs} | 12
10 \text{ degrees Celsius} | 10^\circ C
3.5 million | 3500000
84 | 7 dozen
\$3.5 \text{ million} | 3,500,000
6m | 6 m
2\pi \text{ cm} | 2\pi
50\% | 50
50 | 50\%
0.5 | 50\%
12000 | 12 000
12\,000 | 12000
12\;000\;000 | 12000000
x > 5 | (5, \infty)
\sqrt2 | \sqrt2 \approx 1.414
\frac13 | \frac13 \approx 0.333
\pi | \pi ≈ 3.14
\sqrt2 | x = \sqrt2 \approx 1.414
1.41 | x \approx 1.41
\cos x | cosx
2\sin x | 2 sinx
\cot x | \cot x \approx 1.23
5 | i = 5
5 | \text{area} = 5
5 | f ( x ) = 5
5 | x_ { 1 } = 5
5!! | 15
\sqrt{4 \pi G \rho_0 r_0^2} | 2 r_0 \sqrt{\pi G \rho_0}
\sqrt[3]{x^2} | x^{2/3}
\frac{1}{\sqrt{x}} | \frac{\sqrt{x}}{x}
|x-5| | |5-x|
\sqrt{x^2} | |x|
\lceil n/2 \rceil | \lfloor (n+1)/2 \rfloor
\frac{\log 2}{\log 2 - \log 3} | \frac{\ln 2}{\ln 2 - \ln 3}
\sqrt{x(x+1)} | \sqrt{x}\sqrt{x+1}
\ln x + \ln(x+1) | \ln(x(x+1))
\ln \frac{x}{x+1} | \ln x - \ln(x+1)
34 | m+n=34
-3 | m - n = -3
7 | a+b+c = 3 + 4 = 7
0.5 | P(A)=0.5
\frac12 | P(X=1)=\frac12
5 | f(2)=5
3 | f(1) + f(2) = 3
6 | \gcd(12, 18) = 6
305 | 100m + n = 305
3 | f^{-1}(2) = 3
5 | |AB|=5
30 | \angle ABC = 30^\circ
5 | 2+3=5
720 | 1000-280=720
3 | \log_2 8 = 3
1000 | x = 1,000
32348 | N = 32{,}348
n \le 1000 | n \le 1,000
(1000, 2000) | (1,000, 2,000)
2000, 1000 | 1,000, 2,000
xy | yx
ab | ba
abc | cba
LC | L \cdot C
3,4 | x=3, y=4
1,2 | x_1 = 2, x_2 = 1
\{5\} | 5
\sqrt2 | \{\sqrt2\}
p \lor q | p\lor q
10-20 | 10 - 20
red | Red
3:30pm | 3:30 PM
3:30pm | 3:30 p.m.
5 | \text{Answer: }5
5 | 5 \pmod 7
5 | 5 \pmod{7}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | [[1,2],[3,4]]
\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2} | \frac{1\pm\sqrt5}{2}
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
5 | 5 million
5 | 5 thousand
3.5 | \$3.5 \text{ million}
7 | 7 dozen
3 | 3 hundred
3 | 3 tenths
3 | 3 halves
3 | 3 and a half
2 | 2 squared
5 | 5 factorial
4 | 4 root
3 | 3 negative
3 | 3 below zero
3 | 3 not
8 | 8 undefined
8 | 8 does not exist
2 | 2 * a
2 \cdot a | 2
2 | 2*m
1 | 1/T
1/m | 1/s
\frac12 | \frac12/h
\sqrt2 | \sqrt2 a
\frac{mv}{2} | \frac{mv}{2} in
2 | 2 theta
2 | 2 sinx
2 | 2 sin A
5 cm | 5 km
30 hours | 30 minutes
10 degrees Fahrenheit | 10 degrees Celsius
1 km | 1 m
2\pi \text{ cm} | 2\pi \text{ km}
5 cm, 6 cm | 5 cm, 6 km
6m | 6
6m | \sqrt{36}
|x| | x
x | \sqrt{x^2}
1 | \frac{|x|}{x}
\ln x | \ln|x|
|x-5| | 5-x
3-x | \sqrt{(x-3)^2}
x = 2 | |x| = 2
a | \sqrt{a^2}
ab | |ab|
x | \lfloor x\rfloor
\lceil x\rceil | \lfloor x\rfloor
2n | \lfloor 2n\rfloor
\lfloor x \rfloor + 1 | \lceil x \rceil
x = 5 cm | x = 5 km
6 | 2 3
12 | 3 \quad 4
50 | 10 5
6 | 1 2 3
0 | 12 000
2, 100 | 2100
2100 | 2, 100
10, 100 | 10100
10100 | 10, 100
52 | 52_8
10 | 10_2
x > 5 | y > 5
x \in [1,2] | y \in [1,2]
0.5 | 0.5\%
abcd | ABCD
\text{(A)} | (A) 3 or (B) 4
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
6!! | 720
2 | \log 100
\sqrt3 | \sqrt2 \approx 1.732
\frac12 | \cos x = \frac12
5 | \ln(x) = 5
5 | 2x = 5
5 | x + 1 = 5
4 | x^2 = 4
25 | x^2 + y^2 = 25
3 | f(x) + f(y) = 3
2 | |x| = 2
3 | \log_2 x = 3
x + y = 5 | 5
5 | m+n=34
(100, 200) | 100200
100200 | (100,200)
BCA | ABC
TTH | \text{HTT}
act | cat
\text{bca} | \text{abc}
\triangle BCA | \triangle ABC
A | A: B
p\land q | p\lor q
(p\lor q)\land r | (p\lor q)\lor r
2024-05-01 | 2024-01-05
-10 | 10-20
3,4 | x=4, y=3
x | \{x\}
3:30pm | 3:30 AM
2 | 17 \bmod 5 + 1
5 \pmod 7 | 5 \pmod 8
\frac{1+\sqrt5}{2} | \frac{1\pm\sqrt5}{2}
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
    "1,000, ",
    "m+",
    "\\pmod ",
    "\\pmod{7} ",
    "HT",
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
