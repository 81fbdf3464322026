"""A prompt with another wording, and a rollout as a model sees it that was given that prompt.

The student never sees it: its tokens stay what they are, and only the context changes in which a frozen model reads them.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from opd.errors import UserError
from opd.plugins import Models
from opd.records import Prompt, Rollout


def wording(prompt: Prompt) -> str:
    """What the prompt asks, instructions included: its text, or its last user message.

    Raises `UserError` naming a prompt without such a message, or with one that is not plain text.
    """
    if prompt.text is not None:
        return prompt.text
    content = prompt.messages[_last_user(prompt)].get("content")
    if not isinstance(content, str):
        raise UserError(f"prompts: the last user message of {prompt.id} is not plain text, so that it cannot be worded anew")
    return content


def reworded(prompt: Prompt, template: str, values: Mapping[str, str]) -> Prompt:
    """The prompt with `template` in place of `wording`: each {name} of `values` is filled in, once and as it is.

    System messages, earlier turns, tools and the chat template's arguments stay. Raises `UserError` as `wording` does.
    """
    names = "|".join(map(re.escape, values))
    content = re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)
    if prompt.text is not None:
        return replace(prompt, text=content)
    messages, last = list(prompt.messages), _last_user(prompt)
    messages[last] = {**messages[last], "content": content}
    return replace(prompt, messages=tuple(messages))


def seen_under(rollout: Rollout, prompt: Prompt, models: Models) -> Rollout | None:
    """A single answer as it follows `prompt`, token by token the same; None where the two do not fit into the context."""
    (turn,) = rollout.turns
    context_ids = models.context(prompt, len(turn.sampled_ids))
    return None if context_ids is None else replace(rollout, turns=(replace(turn, context_ids=context_ids),))


def _last_user(prompt: Prompt) -> int:
    """The place of the last user message."""
    places = [place for place, message in enumerate(prompt.messages) if message.get("role") == "user"]
    if not places:
        raise UserError(f"prompts: {prompt.id} has no user message that could be worded anew")
    return places[-1]
