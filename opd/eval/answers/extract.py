"""The final answer of a response: the last `\\boxed{...}`, else an explicit final-answer phrase, else none.

A number is never fished out of prose: a response that does not say which expression is its answer has no answer.
All scans are linear in the response's length, since they run outside the grader's time limit.
"""

import re

# `\\.` skips escaped braces and line breaks, so that only braces that group are counted.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\.|[{}]", re.DOTALL)

_PHRASE = re.compile(
    r"""(?: \bthe[ ]+(?:(?:final|correct)[ ]+)?answer[ ]+is\b | \bfinal[ ]+answer(?:[ ]+is)?(?=[* ]*+:)
          | ^[ \t>#*-]*+answer(?=[* ]*+:) )
        [*:\s]*+(?=\S)""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)

# GSM8K's `#### 18`. A level-4 Markdown heading looks the same: words count only on the response's last line.
_HASHES = re.compile(r"^####[ \t]*+(?:(?!\**+[A-Za-z]{3})(\S.*)|(\S.*)\Z)", re.MULTILINE)

_BOLD_END = re.compile(r"\*\*(?![\w(\\{-]|\.\d)")  # not the power operator of `x**2`
_SENTENCE_END = re.compile(r"(?<!\.)\.(?:\s.*)?$")  # neither a decimal point nor an ellipsis
_ONE_FORMULA = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$[^$]*$|\\\((.+?)\\\)(?!.*\\\()|\\\[(.+?)\\\](?!.*\\\[)")


def extract_answer(response: str) -> str | None:
    """The answer that a response commits to, as written; None if it commits to none.

    Only the text after the last `</think>` is read. Text without that tag is read whole: many chat templates open the
    thinking in the prompt, so that the response alone cannot show that it was never closed.

    Example: `extract_answer("So \\\\boxed{\\\\frac{1}{2}}.") == "\\\\frac{1}{2}"`
    """
    text = response.rpartition("</think>")[2].rstrip()
    return _last_box(text) or _last_phrase(text)


def _last_box(text: str) -> str | None:
    """The content of the last balanced, non-empty box; of nested boxes the outer one, unless it is only a wrapper."""
    open_braces: list[int | None] = []  # where a box's content starts, None for any other group
    answer = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            open_braces.append(match.end() if token != "{" else None)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            content = text[start : match.start()].strip() if start is not None else ""
            is_wrapper = answer is not None and re.fullmatch(r"\\(?:boxed|fbox)\s*\{", content.removesuffix(answer + "}"))
            if content and not is_wrapper:
                answer = content
    return answer


def _last_phrase(text: str) -> str | None:
    starts = [match.end() for match in _PHRASE.finditer(text)]
    if starts:
        line = text[starts[-1] :].partition("\n")[0]
        return _clean(_SENTENCE_END.sub("", _BOLD_END.split(line)[0]))
    lines = [match.group(1) or match.group(2) for match in _HASHES.finditer(text)]
    return _clean(lines[-1]) if lines else None


def _clean(answer: str) -> str | None:
    """The phrase without Markdown, math delimiters and a final full stop; "$5$ apples" is "5"."""
    answer = answer.strip(" \t*`")
    if answer.startswith(("$", r"\(", r"\[")) and (formula := _ONE_FORMULA.match(answer)):
        answer = next(group for group in formula.groups() if group)
    answer = re.sub(r"\\?\$", "", _SENTENCE_END.sub("", answer.strip(" \t*`"))).strip()
    return answer or None
