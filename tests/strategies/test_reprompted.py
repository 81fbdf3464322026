"""Prompts in other words, and rollouts under them."""

import re
from typing import Any

import numpy as np
import pytest

from opd.errors import UserError
from opd.records import Prompt
from opd.strategies.reprompted import reworded, seen_under, wording

CHAT = Prompt(
    id="7",
    messages=(
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "2+2? box it", "name": "ann"},
        {"role": "assistant", "content": "So"},
    ),
    problem="2+2?",
    chat_template_kwargs={"enable_thinking": False},
    tools=({"name": "add"},),
)
PLAIN = Prompt(id="8", text="2+2=", problem="2+2=")


def test_the_last_user_message_alone_changes():
    assert wording(CHAT) == "2+2? box it"
    changed = reworded(CHAT, "{prompt} It is {answer}.", {"prompt": wording(CHAT), "answer": "4"})
    assert changed.messages[3] == {"role": "user", "content": "2+2? box it It is 4.", "name": "ann"}
    assert (*changed.messages[:3], changed.messages[4]) == (*CHAT.messages[:3], CHAT.messages[4])
    assert (changed.tools, changed.chat_template_kwargs) == (CHAT.tools, CHAT.chat_template_kwargs)
    assert (changed.id, changed.problem) == ("7", "2+2?")
    assert CHAT.messages[3]["content"] == "2+2? box it"


def test_of_a_plain_prompt_it_is_the_text():
    assert wording(PLAIN) == "2+2="
    changed = reworded(PLAIN, "4 is {prompt}", {"prompt": "2+2="})
    assert (changed.text, changed.messages) == ("4 is 2+2=", ())


def test_what_is_filled_in_is_not_read_as_a_template():
    values = {"prompt": "a {answer} \\1 {prompt}", "answer": "{x}"}
    assert reworded(PLAIN, "{prompt}|{answer}|{other}|{}", values).text == "a {answer} \\1 {prompt}|{x}|{other}|{}"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (({"role": "assistant", "content": "hm"},), "prompts: 9 has no user message"),
        (({"role": "user", "content": [{"type": "text", "text": "hm"}]},), "user message of 9 is not plain text"),
    ],
)
def test_prompts_without_words_are_refused(messages, message):
    with pytest.raises(UserError, match=re.escape(message)):
        wording(Prompt(id="9", messages=messages))


class Room:
    """Models that show a prompt as its text's bytes, in a context of 20 tokens."""

    def context(self, prompt: Prompt, num_tokens: int) -> np.ndarray | None:
        ids = np.frombuffer((prompt.text or "").encode(), np.uint8).astype(np.int32)
        return ids if len(ids) + num_tokens <= 20 else None


def test_the_tokens_stay_and_the_context_changes(random_rollout):
    models: Any = Room()
    rollout = random_rollout(0, (3, 6), num_reused=2)
    seen = seen_under(rollout, PLAIN, models)
    assert seen is not None
    assert bytes(seen.turns[0].context_ids.tolist()) == b"2+2="
    assert seen.turns[0].sampled_ids is rollout.turns[0].sampled_ids
    assert (seen.slot, seen.prompt, seen.trainable.tolist()) == (rollout.slot, rollout.prompt, [False] * 2 + [True] * 4)
    assert seen_under(rollout, Prompt(id="9", text="x" * 14), models) is not None
    assert seen_under(rollout, Prompt(id="9", text="x" * 15), models) is None
