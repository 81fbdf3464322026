"""The final answer of a response: the last `\\boxed{...}`, else the last `<answer>...</answer>`, else an explicit
final-answer phrase, else none.

A phrase is "the answer is ...", "the correct option is ...", "Answer: ..." or a heading "Final Answer" and the line below.
Words like "approximately" before an answer and a reason behind it are left out; "the answer is correct" states none.
A number is never fished out of prose: a response that does not say which expression is its answer has no answer.
All scans are linear in the response's length, since they run outside the grader's time limit.
"""

import re
from typing import NamedTuple

# `\\.` skips escaped braces and line breaks, so that only braces that group are counted.
_BRACES = re.compile(
    r"\\(?:boxed|fbox)\s*+(?:\{|(?P<bare>-?\d++(?:,\d{3})*+(?:\.\d++)?|[A-J](?![a-zA-Z])))|\\.|[{}]",  # `\boxed 5`
    re.DOTALL,
)

_PHRASE = re.compile(
    r"""(?: \bthe[ ]+(?:(?:final|correct)[ ]+)?answers?[ ]+(?:is|are)\b | \bthe[ ]+correct[ ]+(?:option|choice)[ ]+is\b
          | \b(?:the|final)[ ]+(?:(?:final|correct)[ ]+)?answers?(?:[ ]+is)?(?=[* ]*+:)
          | ^[ \t>#*-]*+answer(?:[ ]+is\b|(?=[* ]*+:))
          | (?P<heading>^[ \t>#*]*+(?:the[ ]+)?final[ ]+answer[ \t*]*+$) )
        [*:\s]*+(?=\S)
        (?!(?:correct|incorrect|right(?![ ]+(?:tri|ang|isos))|wrong|below|above|as[ ]follows|obvious|clear|unclear)\b)""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
MAX_WORDS = 4  # of a line below a heading that is an answer and no prose

# GSM8K's `#### 18`. A level-4 Markdown heading looks the same: words count only on the response's last line.
_HASHES = re.compile(r"^####[ \t]*+(?:(?!\**+[A-Za-z]{3})(\S.*)|(\S.*)\Z)", re.MULTILINE)

_BOLD_END = re.compile(r"\*\*(?![\w(\\{-]|\.\d)")  # not the power operator of `x**2`
_SENTENCE_END = re.compile(r"(?<!\.)\.(?:\s.*)?$")  # neither a decimal point nor an ellipsis
_LEADING_WORDS = re.compile(
    r"(?:(?:approximately|about|around|roughly|exactly|therefore|thus|hence|simply|just|then|equal to|given by)\b[,:]? +)++",
    re.IGNORECASE,
)
_REASON = re.compile(r"(?<=\S)(?:,? \(?(?:because|since)\b|, (?:as|so|which)\b).*+")
_DISPLAYS = {r"\[": r"\]", "$$": "$$"}
_DOLLARS = re.compile(r"\$([^$]+)(?<!\\)\$[^$]*$")
_BETWEEN_BOXES = re.compile(r"[$\s]*(?:,|,?\s*\b(?:and|or)\b)[$\s]*")
MAX_BETWEEN = 20


def extract_answer(response: str) -> str | None:
    """The answer that a response commits to, as written; None if it commits to none.

    Only the text after the last `</think>` is read. Text without that tag is read whole: many chat templates open the
    thinking in the prompt, so that the response alone cannot show that it was never closed.

    Example: `extract_answer("So \\\\boxed{\\\\frac{1}{2}}.") == "\\\\frac{1}{2}"`
    """
    text = response.rpartition("</think>")[2].rstrip()
    return _last_box(text) or _last_element(text) or _last_phrase(text)


class _Box(NamedTuple):
    """Where a box and its stripped content stand: the text itself is cut out once, since boxes may be nested deeply."""

    start: int
    end: int
    content_start: int
    content_end: int


def _last_box(text: str) -> str | None:
    """The content of the last balanced, non-empty box; of nested boxes the outer one, unless it is only a wrapper.

    Boxes joined by nothing but `and`, `or` or a comma are a list: `\\boxed{2} and \\boxed{3}` is "2, 3".
    """
    open_braces: list[tuple[int, int] | None] = []  # where a box and its content start, None for any other group
    boxes: list[_Box] = []  # none inside another
    for match in _BRACES.finditer(text):
        token = match.group()
        if match["bare"]:
            boxes.append(_Box(*match.span(), *match.span("bare")))
        elif token.endswith("{") and token != r"\{":
            open_braces.append(match.span() if token != "{" else None)
        elif token == "}" and open_braces and (opening := open_braces.pop()):
            start, end = _stripped(text, opening[1], match.start())
            if start < end:
                box = _Box(opening[0], match.end(), start, end)
                inside = None
                while boxes and boxes[-1].start > box.start:
                    inside = boxes.pop()
                if inside and (inside.start, inside.end) == (start, end):
                    box = inside._replace(start=box.start, end=box.end)
                boxes.append(box)
    first = len(boxes) - 1
    while first > 0 and _are_joined(text, boxes[first - 1], boxes[first]):
        first -= 1
    contents = [text[box.content_start : box.content_end] for box in boxes[max(first, 0) :]]
    return ", ".join(dict.fromkeys(contents)) or None


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _are_joined(text: str, first: _Box, second: _Box) -> bool:
    is_near = second.start - first.end <= MAX_BETWEEN
    return is_near and _BETWEEN_BOXES.fullmatch(text[first.end : second.start]) is not None


def _last_element(text: str) -> str | None:
    """The content of the last `<answer>` element, which may have many lines."""
    inside, end, _ = text.rpartition("</answer>")
    _, start, content = inside.rpartition("<answer>")
    return content.strip() or None if start and end else None


def _last_phrase(text: str) -> str | None:
    for match in reversed([*_PHRASE.finditer(text)]):
        end = text.find("\n", match.end())
        line = text[match.end() : end if end >= 0 else None]
        is_formula = line.startswith(("$", r"\(", r"\["))
        if end >= 0 and (closing := _DISPLAYS.get(line.strip())):  # a formula on lines of its own
            return _clean(text[end:].partition(closing)[0].strip())
        if not match["heading"] or is_formula or len(line.split()) <= MAX_WORDS:
            return _clean(_SENTENCE_END.sub("", _BOLD_END.split(line)[0]))
    lines = [match.group(1) or match.group(2) for match in _HASHES.finditer(text)]
    return _clean(lines[-1]) if lines else None


def _clean(answer: str) -> str | None:
    """The phrase without Markdown, math delimiters, a reason and a final full stop; "$5$ apples" is "5"."""
    answer = answer.strip(" \t*`")
    if words := _LEADING_WORDS.match(answer):
        answer = answer[words.end() :]
    answer = _one_formula(answer) or _REASON.sub("", answer, count=1)
    answer = re.sub(r"\\?\$", "", _SENTENCE_END.sub("", answer.strip(" \t*`"))).strip()
    return answer or None


def _one_formula(answer: str) -> str | None:
    """The formula that an answer starts with, if it is its only one."""
    if dollars := _DOLLARS.match(answer):
        return dollars[1]
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        inside, end, rest = answer.removeprefix(opening).partition(closing)
        if answer.startswith(opening) and inside and end and opening not in rest:
            return inside
    return None
