"""The scripted customer: states a wish, answers questions for what is asked, and leaves when told that it is settled.

Wordings, and which facts the opening has, are drawn once, from the episode's seed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opd.envs.returns_desk.hearing import hear
from opd.envs.returns_desk.tasks import Wish

PATIENCE = 4  # replies that bring no question for something new, after which the customer leaves

_FACTS = ("email", "order", "reason", "wanted")  # those that the first message may have
_GREETINGS = ("Hello! ", "Hi, ", "Good morning. ", "")
_THANKS = ("Thank you. One more thing: ", "Thanks! Something else: ")
_WANTED = {  # what the customer wants, with and without the order's number
    "status": ("to know the status of my order {order_id}", "to know the status of my order with the {item}"),
    "cancel": ("to cancel my order {order_id}", "to cancel my order with the {item}"),
    "return": ("to return the {item} of my order {order_id}", "to return the {item} that I bought"),
    "exchange": ("to exchange the {item} of my order {order_id}", "to exchange the {item} that I bought"),
}
_BEGINNINGS = ("I want {}", "I would like {}", "I need {}")
_REASONS = {
    "damaged": "It is damaged.",
    "wrong item": "It is the wrong item.",
    "not needed": "It is not needed any more.",
}

Ending = Literal["served", "told", "refused", "claimed", "left"]


@dataclass(frozen=True)
class Answer:
    """What the customer makes of a reply: words, or the end of a wish.

    `served`: the desk has changed the database and says something; `told`: it states the order's status; `refused`: it will
    not do it; `claimed`: it says that it is done, but it is not; `left`: the customer has lost patience.
    """

    text: str = ""
    ending: Ending | None = None
    statuses: frozenset[str] = frozenset()  # with `told`: what the desk stated


class Customer:
    """One chat. `told` is the chance that the opening has a fact: the email, the order's number, the reason, the variant."""

    def __init__(self, known: Mapping[str, str], wishes: Sequence[Wish], told: float, seed: int) -> None:
        rng = random.Random(seed)
        self._known, self._wishes = known, wishes
        self._greeting, self._thanks = rng.choice(_GREETINGS), rng.choice(_THANKS)
        self._beginnings = [rng.choice(_BEGINNINGS) for _ in wishes]
        self._has_email, has_number = rng.random() < 0.75, rng.random() < 0.75
        self._has_number = [has_number or wish.get("forbidden") == "other_owner" for wish in wishes]
        self._opening_facts = [[fact for fact in _FACTS if rng.random() < told] for _ in wishes]
        self._begin(0)

    def _begin(self, number: int) -> None:
        self.number, self.patience = number, PATIENCE
        self.wish = self._wishes[number]
        self.told = {"wish", "item"}

    @property
    def state(self) -> list[Any]:
        """All that changes, as plain JSON."""
        return [self.number, self.patience, sorted(self.told)]

    def opening(self) -> str:
        """The first message."""
        return self._greeting + self._stated()

    def next_opening(self) -> str | None:
        """The message that begins the next wish; None after the last one."""
        if self.number + 1 == len(self._wishes):
            return None
        self._begin(self.number + 1)
        return self._thanks + self._stated()

    def _stated(self) -> str:
        """The wish, with the facts that belong to its opening."""
        facts = self._opening_facts[self.number]
        if "order" in facts and self._has_number[self.number]:
            self.told.add("order")
        sentences = [f"{self._beginnings[self.number].format(self._wanted())}."]
        sentences += [self._fact("refund")] if "refund_to" in self.wish else []
        sentences += [self._fact(fact) for fact in ("wanted", "reason") if fact in facts and fact in self.wish]
        sentences += [self._fact("email")] if "email" in facts and self.number == 0 else []
        return " ".join(sentences)

    def _wanted(self) -> str:
        """The wish as an infinitive."""
        numbered, unnumbered = _WANTED[self.wish["about"]]
        text = (numbered if "order" in self.told else unnumbered).format(**self.wish)
        return f"{text} for {self.wish['wanted']}" if "wanted" in self.told and "wanted" in self.wish else text

    def _fact(self, fact: str) -> str:
        """The sentence that tells a fact."""
        wish, known = self.wish, self._known
        self.told.add(fact)
        person = f"I am {known['name']}, zip {known['zip']}."
        no_number = f"I do not have the number. It is the order with the {wish['item']}."
        return {
            "email": f"My email is {known['email']}." if self._has_email else person,
            "name": person,
            "order": f"The order is {wish['order_id']}." if self._has_number[self.number] else no_number,
            "item": f"It is about the {wish['item']}.",
            "wanted": f"I would like {wish.get('wanted')} instead.",
            "reason": _REASONS.get(wish.get("reason", ""), "There is no special reason."),
            "refund": f"Please refund it to my {wish['refund_to']}." if "refund_to" in wish else "Refund it the way I paid.",
            "wish": f"I want {self._wanted()}.",
        }[fact]

    def answer(self, text: str, acted: bool) -> Answer:
        """To a reply without calls. `acted`: for this wish, the desk has changed the database."""
        heard = hear(text)
        about = self.wish["about"]
        asked = [fact for fact in heard.asked if fact != "wanted" or "wanted" in self.wish]
        new = [fact for fact in asked if fact not in self.told]
        if acted:
            return Answer(ending="served")
        if not new:
            if about == "status" and heard.statuses:
                return Answer(ending="told", statuses=heard.statuses)
            if heard.refused:
                return Answer(ending="refused")
            if about != "status" and heard.done:
                return Answer(ending="claimed")
            self.patience -= 1
            if self.patience < 0:
                return Answer(ending="left")
        if asked:
            return Answer(" ".join(dict.fromkeys(self._fact(fact) for fact in asked)))
        if heard.confirms:
            return Answer(f"Yes, please. I only want {self._wanted()}.")
        if heard.waits:
            return Answer("All right, please go ahead.")
        return Answer(f"I am not sure what you mean. I want {self._wanted()}.")
