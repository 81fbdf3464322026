"""The parts of a written solution: its reasoning, the reasoning's steps, and the final answer.

Everything is in bytes of the text, so that it can be laid over tokens without encoding anything again.
"""

from dataclasses import dataclass

OPENED, CLOSED = b"<think>", b"</think>"
ANSWER_MARKS = (b"\\boxed{", b"####")  # of a final answer in the maths suites and in GSM8K, in order of precedence


@dataclass(frozen=True)
class Thinking:
    """Where a model that writes its reasoning between <think> and </think> did so.

    Example: `Thinking.of(b"<think>2+2=4</think>It is 4.") == Thinking(start=7, end=12, closed=True)`
    """

    start: int  # behind <think>; 0 where the prompt's template has written it
    end: int  # before the last </think>, or the end of the text
    closed: bool

    @classmethod
    def of(cls, text: bytes) -> "Thinking | None":
        """None for a text without either mark."""
        end = text.rfind(CLOSED)
        closed = end >= 0
        start = text.find(OPENED, 0, end if closed else len(text))
        if start < 0 and not closed:
            return None
        return cls(start + len(OPENED) if start >= 0 else 0, end if closed else len(text), closed)


def answer_lines(text: bytes) -> list[tuple[int, int]]:
    """[start, end) of the last line with each of the marks of a final answer, blanks behind it included.

    The line that counts as the answer comes first. Empty where there is no such line.
    """
    found = []
    for mark in ANSWER_MARKS:
        place = text.rfind(mark)
        if place >= 0:
            start, end = text.rfind(b"\n", 0, place) + 1, text.find(b"\n", place)
            end = len(text) if end < 0 else end
            found.append((start, end + len(text[end:]) - len(text[end:].lstrip())))
    return found


def step_ends(text: bytes, delimiter: bytes) -> list[int]:
    """Where each step of `text` ends; the last one ends with the text. A delimiter belongs to the step that it ends.

    What is blank between two delimiters is no step: it belongs to the step before it, at the beginning to the one after.
    """
    ends: list[int] = []
    start, place = 0, text.find(delimiter)
    while place >= 0:
        end = place + len(delimiter)
        if text[start:place].strip():
            ends.append(end)
            start = end
        elif ends:
            ends[-1] = start = end
        place = text.find(delimiter, end)
    if text[start:].strip() or not ends:
        return [*ends, len(text)]
    return [*ends[:-1], len(text)]
