"""A conversation as the student's token ids: what it sees after the environment has answered one of its turns.

`append_only` (T1: tokens in, tokens out): the next context is to the last id what the student saw and sampled, and behind it
what the chat template writes after a reply: the observations and the header of the next one. `rerender`: the whole
conversation goes through the template again, as a chat service does it; templates that leave earlier reasoning out then
show the student what they would show a user.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from opd.envs.environment import Message
from opd.episodes import Reply
from opd.errors import UserError
from opd.records import Array, Prompt
from opd.tokenization import HiddenMarks, any_of

Exchange = tuple[Reply, Sequence[Message]]  # a reply, and the messages by which the environment answered it

REFUSALS = (TemplateError, TypeError, ValueError)  # of a chat template
MAX_REMEMBERED = 4096  # texts behind replies
STAND_IN = "THEREPLYSTANDSHERE"  # one word, which no template changes


def messages(prompt: Prompt, exchanges: Iterable[Exchange]) -> list[dict[str, Any]]:
    """The conversation so far as chat messages, for any chat template.

    Some templates want an id of nine characters for each call; calls are numbered within their turn, and the turn's tool
    messages are taken to answer them in order.
    """
    said = [dict(message) for message in prompt.messages]
    for reply, observations in exchanges:
        message = reply.message
        calls = message.get("tool_calls", [])
        for number, call in enumerate(calls):
            call["id"] = _call_id(number)
        said += [message, *_answers(observations)]
    return said


class Dialogue:
    """Contexts for one tokenizer. `eos_ids` end a turn; `field` is what the recipe calls the model, for messages.

    The text of special tokens in an observation becomes plain text, so that it cannot begin or end a turn; so does that of
    EOS tokens in a reply that is rendered again. This does not help with templates whose marks are no special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], field: str) -> None:
        self.tokenizer, self.field = tokenizer, field
        texts = {int(token): tokenizer.convert_ids_to_tokens(int(token)) for token in eos_ids}
        self._eos = {str(text): token for token, text in texts.items() if text is not None}
        added = tokenizer.added_tokens_decoder.values()
        self._marks = any_of([*(token.content for token in added if token.special), *self._eos, STAND_IN])
        self._ends = any_of(self._eos)
        self._checked: set[tuple[Any, ...]] = set()
        self._behind_replies: dict[str, Array] = {}

    def appended(self, prompt: Prompt, context_ids: Array, sampled_ids: Array, observations: Sequence[Message]) -> Array:
        """The context [c] int32 behind `context_ids` and `sampled_ids`, which end with an EOS.

        An EOS other than the template's stays as it was sampled. Raises `UserError` when the template refuses or leaves out
        these messages, or puts what came before another way once they are there.
        """
        eos = int(sampled_ids[-1])
        roles = [message["role"] for message in prompt.messages]
        # what a template writes behind a reply follows from these, whatever was said before it
        key = json.dumps([roles, eos, observations, prompt.chat_template_kwargs, bool(prompt.tools)], default=str)
        if key not in self._behind_replies:
            if len(self._behind_replies) >= MAX_REMEMBERED:
                self._behind_replies.clear()
            self._behind_replies[key] = np.array(self._behind_reply(prompt, eos, observations), np.int32)
        return np.concatenate([context_ids, sampled_ids, self._behind_replies[key]]).astype(np.int32)

    def _behind_reply(self, prompt: Prompt, eos: int, observations: Sequence[Message]) -> list[int]:
        """The ids of the observations and of the header of the next reply, behind the EOS of the last one."""
        hidden = HiddenMarks(*prompt.messages, *observations, *prompt.tools)
        shown = [hidden.hide(message, self._marks) for message in _answers(observations)]
        stand_in = {"role": "assistant", "content": STAND_IN}
        try:
            text = self._render(prompt, [*prompt.messages, stand_in, *shown])
        except REFUSALS as error:
            raise self._refusal(prompt, observations, error) from None
        before, _, tail = text.rpartition(STAND_IN)
        self._check(prompt, shown, before, tail)
        return self._behind(tail, eos, hidden)

    def rerendered(self, prompt: Prompt, exchanges: Sequence[Exchange]) -> Array:
        """The context [c] int32 of the whole conversation. Raises `UserError` when the template refuses it."""
        said = messages(prompt, exchanges)
        hidden = HiddenMarks(*said, *prompt.tools)
        first = len(prompt.messages)
        said[:first] = map(dict, hidden.hide_in(self.tokenizer, said[:first]))
        patterns = (self._ends if message["role"] == "assistant" else self._marks for message in said[first:])
        said[first:] = [hidden.hide(message, pattern) for message, pattern in zip(said[first:], patterns)]
        try:
            text = self._render(prompt, said)
        except REFUSALS as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in said))
            said = messages(prompt, exchanges)
            place = next((end for end in range(len(said)) if self._refuses(prompt, said[: end + 1])), -1)
            raise UserError(
                f"prompts.context: the conversation of {prompt.id} ({roles}) does not fit the chat template of {self.field} "
                f"({_line(error)}); take a model whose template knows these ({_said(prompt, said[place])})"
            ) from None
        return np.asarray(hidden.encode(self.tokenizer, text), np.int32)

    def _render(self, prompt: Prompt, said: Sequence[Message], header: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in said],
            tools=[dict(tool) for tool in prompt.tools] or None,
            tokenize=False,
            add_generation_prompt=header,
            **prompt.chat_template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def _behind(self, tail: str, sampled: int, hidden: HiddenMarks) -> list[int]:
        """The ids that stand behind the EOS of a reply. `tail` is what the template writes after the reply's content.

        They are tokenised with the EOS before them, since some tokenizers read the start of a text, or white space behind a
        special token, another way.
        """
        rest = tail.lstrip()  # white space that the template puts before its EOS was not sampled
        found = self._ends.match(rest)
        if found is not None:
            text, eos = rest, self._eos[found[0]]
        else:  # a template without EOS: all of it follows the sampled one
            eos = sampled
            text = str(self.tokenizer.convert_ids_to_tokens(eos)) + tail
        ids = hidden.encode(self.tokenizer, text)
        return ids[ids.index(eos) + 1 :]

    def _check(self, prompt: Prompt, shown: Sequence[Message], before: str, tail: str) -> None:
        """Raises `UserError` when the template cannot be appended to; once for each kind of observations."""
        kind = (*(message["role"] for message in shown), bool(prompt.tools))
        if kind in self._checked:
            return
        template = f"prompts.context: the chat template of {self.field}"
        if not before or STAND_IN in before:
            raise UserError(f"{template} does not show a reply once; set prompts.context=rerender")
        if not before.startswith(self._render(prompt, prompt.messages, header=False)):
            raise UserError(f"{template} changes what came before a reply once it is answered; set prompts.context=rerender")
        for message in shown:
            words = re.findall(r"\w+", message["content"])
            if words and words[0] not in tail:
                raise UserError(
                    f"{template} leaves out {message['role']!r} messages; take a student whose template has that role "
                    f"({_said(prompt, message)})"
                )
        self._checked.add(kind)

    def _refusal(self, prompt: Prompt, observations: Sequence[Message], error: Exception) -> UserError:
        """Why the template refuses the observations behind a reply without calls: for want of a call, for the role of one of
        them, or for its content."""
        template = f"prompts.context: the chat template of {self.field}"
        calls = [{"type": "function", "id": _call_id(0), "function": {"name": "tool", "arguments": {}}}]
        replies = [{"role": "assistant", "content": STAND_IN}, {"role": "assistant", "content": "", "tool_calls": calls}]

        def refuses(*shown: Message) -> bool:
            return all(self._refuses(prompt, [*prompt.messages, reply, *shown]) for reply in replies)

        shown = _answers(observations)
        guilty = next((one for end, one in enumerate(shown, 1) if refuses(*shown[:end])), None)
        if guilty is None:
            return UserError(f"{template} cannot be appended to: {_line(error)}; set prompts.context=rerender")
        what, fix = f"{guilty['role']!r} messages", "take a student whose template has that role"
        if not refuses({**guilty, "content": ""}):
            what, fix = "what is said there", "take a student that knows it, or let the environment say it in other words"
        return UserError(f"{template} refuses {what}: {_line(error)}; {fix} ({_said(prompt, guilty)})")

    def _refuses(self, prompt: Prompt, said: Sequence[Message]) -> bool:
        try:
            self._render(prompt, said)
        except REFUSALS:
            return True
        return False


def _answers(observations: Sequence[Message]) -> list[dict[str, Any]]:
    """The observations, tool messages with the ids of the calls that they answer."""
    answers: list[dict[str, Any]] = []
    number = 0
    for message in observations:
        known = {"tool_call_id": _call_id(number)} if message["role"] == "tool" else {}
        answers.append({**known, **message})
        number += message["role"] == "tool"
    return answers


def _call_id(number: int) -> str:
    return f"{number:09d}"


def _said(prompt: Prompt, message: Message) -> str:
    """Who says a message, for an error."""
    where = f"task {prompt.id}" if prompt.task is None else f"environment {prompt.task.environment!r} in task {prompt.id}"
    return f"{where} says, as {message['role']}: {message['content']!r:.100}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
