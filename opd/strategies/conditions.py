"""Negative conditions: a short text that makes a model worse at a problem, and the prompt that holds it.

Negative Self-Distillation (arXiv 2609.11699, appendix C): the model itself describes a student who would get the problem
wrong, from the problem alone or from an attempt at it as well; or the text has nothing to do with the problem.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from opd.data import DatasetConfig, read_rows
from opd.errors import UserError, refuse_unused
from opd.plugins import Models
from opd.records import Prompt, Rollout
from opd.strategies.reprompted import reworded, wording
from opd.templates import check_template

FIELD = "terms.negative.condition"
CHARACTERS_A_TOKEN = 16  # more than any text has: what is longer by this measure need not be tokenised as a whole
MIN_TELLING = 2  # characters of an answer that would hardly stand in a text by chance
SAID = r"(?i:\b(?:answer|result|solution|total|sum|is|are|be|equals?|gives?|gets?)\b|[=:])[\s$\\({*]{1,4}"
SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f]")

_ASK = (
    'Write two or three sentences that begin with "You are a student who" and describe a student who would get this '
    "problem wrong: what kind of person this is, what in such problems misleads them, and which flawed shortcut{} they take "
    "instead of reasoning. Say that they never make the check that would show the mistake. Describe it in general "
    "words: use no number of the problem, do not solve it, and give no answer. Write nothing else."
)
ONLINE = "Problem: {problem}\n\nAn attempt at it:\n{response}\n\n" + _ASK.format(", much like a weakness of this attempt,")
QUESTION = "Problem: {problem}\n\n" + _ASK.format("")
TEMPLATE = "{condition}\n\n{prompt}"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


@dataclass(frozen=True)
class ConditionConfig:
    """Where the negative condition comes from, and the prompt that holds it."""

    source: Literal["online", "question", "file", "fixed"] = "online"
    """`online`: a model writes it from the problem and the student's response; `question`: from the problem alone; `file`: a
    passage of `path` that has nothing to do with the problem; `fixed`: always `text`."""
    path: str | None = None
    """For `file`: a .txt file with a blank line between passages, or a .jsonl file with a column `text`. The prompt, its
    place in the batch and the seed choose the passage."""
    text: str | None = None
    """For `fixed`: the condition."""
    max_tokens: int = 256
    """The longest condition. What is cut off ends with its last whole sentence."""
    temperature: float = 1.0
    """For `online` and `question`: how it is sampled; 0 is greedy."""
    online_prompt: str = ONLINE
    """For `online`: what the writer is asked, with {problem} and {response}."""
    question_prompt: str = QUESTION
    """For `question`: what the writer is asked, with {problem}."""
    template: str = TEMPLATE
    """What takes the place of the user's last message: {condition}, {prompt}, which is the message itself, {problem} as the
    data have it, and {instruction}. It should differ from the student's own prompt by the condition alone, or the gate
    measures the other wording as well; the paper's (recipe `negative/paper`) fits the paper's prompt."""
    instruction: str = INSTRUCTION
    """What {instruction} stands for: what the student's own prompt asks for (`prompts.template`)."""

    @property
    def written(self) -> bool:
        """Whether a model writes it."""
        return self.source in ("online", "question")

    def check(self) -> None:
        """Raises `UserError` for values out of range, and for a source without what it needs."""
        if self.max_tokens < 1:
            raise UserError(f"{FIELD}.max_tokens is {self.max_tokens}: it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"{FIELD}.temperature is {self.temperature}: it must be 0 or more, and finite")
        for name, source in (("path", "file"), ("text", "fixed")):
            value = getattr(self, name)
            if self.source == source and (value is None or not value.strip()):
                raise UserError(f"{FIELD}.{name} is missing: source {source} needs it; set {FIELD}.{name}=VALUE")
            if self.source != source:
                refuse_unused(self, (name,), FIELD, f"with source {self.source}")
        if self.source == "file" and Path(str(self.path)).suffix not in (".txt", ".jsonl", ""):
            raise UserError(f"{FIELD}.path: {self.path} is neither .txt nor .jsonl")
        if not self.written:
            refuse_unused(self, ("online_prompt", "question_prompt", "temperature"), FIELD, f"with source {self.source}")
        if "{instruction}" not in self.template:
            refuse_unused(self, ("instruction",), FIELD, "with a template without {instruction}")
        of_template = ("condition", "prompt", "problem", "instruction")
        check_template(f"{FIELD}.template", self.template, of_template, needed=("condition",))
        check_template(f"{FIELD}.question_prompt", self.question_prompt, ("problem",), needed=("problem",))
        of_online = ("problem", "response")
        check_template(f"{FIELD}.online_prompt", self.online_prompt, of_online, needed=of_online)
        if not any(word in self.template for word in ("{prompt}", "{problem}")):
            raise UserError(f"{FIELD}.template: it must contain {{prompt}} or {{problem}}, where the problem goes")

    def check_files(self) -> None:
        """Raises `UserError` for a file of passages that is not there."""
        if self.path is not None and not (file := Path(self.path).expanduser()).is_file():
            missing = f"{self.path!r} is a folder; name a file in it" if file.is_dir() else f"no such file {self.path!r}"
            raise UserError(f"{FIELD}.path: {missing}")


@dataclass(frozen=True)
class Condition:
    """The condition of one rollout.

    Example: `Condition("You are a student who guesses.")`
    """

    text: str  # empty: there is none
    leaked: bool = False  # there is none because it held the problem's answer


class Conditions:
    """The conditions of a run. `writer` is the model that writes them, `seed` the run's."""

    def __init__(self, config: ConditionConfig, writer: str, seed: int) -> None:
        self.config, self.writer, self.seed = config, writer, seed

    async def of(self, rollout: Rollout, models: Models) -> Condition:
        """The condition of a rollout of one answer: none where the writer's prompt is too long, where nothing was written,
        and where what was written holds the answer. Raises `UserError` for a file of passages that cannot be read."""
        prompt, config = rollout.prompt, self.config
        if config.source == "file":
            passages, start = self._passages, _number(f"{self.seed} {prompt.id} {rollout.slot}")
            others = (passages[(start + place) % len(passages)] for place in range(len(passages)))
            chosen = next((one for one in others if not holds_answer(one, prompt)), None)
            return Condition("", leaked=True) if chosen is None else Condition(self._cut(chosen, models))
        if config.source == "fixed":
            text = self._cut(str(config.text), models)
        else:
            answer = await models.write(
                self.writer, self._question(rollout, models), rollout.slot, config.max_tokens, config.temperature
            )
            text = whole_sentences(_after_thinking(answer or ""))
        leaked = holds_answer(text, prompt)
        return Condition("" if leaked else text, leaked)

    def negative(self, prompt: Prompt, condition: str) -> Prompt:
        """The same prompt with the condition: the template takes the place of the user's last message, or of the plain text.
        Raises `UserError` for messages among which none is a user's text."""
        asked, config = wording(prompt), self.config
        words = {"prompt": asked, "problem": prompt.problem or asked, "condition": condition}
        return reworded(prompt, config.template, {**words, "instruction": config.instruction})

    def _question(self, rollout: Rollout, models: Models) -> Prompt:
        """What the writer is asked, in a conversation of its own."""
        prompt, (turn,) = rollout.prompt, rollout.turns
        empty = Prompt(prompt.id, ({"role": "user", "content": ""},), chat_template_kwargs=prompt.chat_template_kwargs)
        if prompt.text is not None:
            empty = Prompt(prompt.id, text="")
        words = {"problem": prompt.problem or wording(prompt)}
        if self.config.source == "question":
            return reworded(empty, self.config.question_prompt, words)
        words["response"] = b"".join(models.spell(turn.sampled_ids)).decode(errors="replace").strip()
        return reworded(empty, self.config.online_prompt, words)

    def _cut(self, text: str, models: Models) -> str:
        """At most `max_tokens` of a text that no model wrote."""
        most, ids = self.config.max_tokens, None
        piece = text[: CHARACTERS_A_TOKEN * most]
        while piece and (ids := models.context(Prompt("condition", text=piece), 0)) is None:
            piece = piece[: len(piece) // 2]  # it is longer than any context
        if ids is not None and len(ids) > most:
            piece = b"".join(models.spell(ids[:most])).decode(errors="ignore")
        return piece.strip() if len(piece) == len(text) else whole_sentences(piece)

    @cached_property
    def _passages(self) -> Sequence[str]:
        return read_passages(str(self.config.path))


def read_passages(path: str) -> list[str]:
    """The passages of a file, without what is blank. Raises `UserError` for one that cannot be read, or holds none."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{FIELD}.path: no such file {path!r}")
    if file.suffix == ".jsonl":
        texts: list[str] = []
        for where, row in read_rows(DatasetConfig(path), FIELD):
            if not isinstance(row.get("text"), str):
                raise UserError(f"{FIELD}.path: {where} of {path} has no text in a column 'text'")
            texts.append(row["text"])
    else:
        try:
            texts = re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{FIELD}.path: {path} is not UTF-8: {error}") from None
    passages = [text.strip() for text in texts if text.strip()]
    if not passages:
        raise UserError(f"{FIELD}.path: {path} holds no passages")
    return passages


def whole_sentences(text: str) -> str:
    """The text up to the end of its last whole sentence; all of it where none ends."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return (text[: ends[-1]] if ends else text).strip()


def holds_answer(text: str, prompt: Prompt) -> bool:
    """Whether the text names the prompt's answer, or one of several, as a word of its own; a single character, which any
    text may have, only where it is said to be a result. Known answers are used for nothing else."""
    answers = (prompt.answer,) if isinstance(prompt.answer, str) else prompt.answer or ()
    return any(_names(text, answer.strip()) for answer in answers if answer.strip())


def _names(text: str, answer: str) -> bool:
    said = "" if len(answer) >= MIN_TELLING else SAID
    return re.search(rf"{said}(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _after_thinking(text: str) -> str:
    """What follows a model's own reasoning; nothing where that did not end."""
    before, ended, after = text.rpartition("</think>")
    return after if ended else before + after if "<think>" not in text else ""


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
