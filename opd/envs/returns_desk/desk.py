"""Environment `returns_desk`: a help desk that finds the customer, looks things up, and changes orders as the rules allow.

In the manner of tau-bench's retail domain (arXiv 2406.12045), but small and without a model behind the customer. Calls go to
the tools, and text beside them is not shown; a reply without calls goes to the customer. An episode succeeds when the
database ends up as the right calls leave it, and the customer was told the truth where nothing is to be changed.
"""

import copy
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opd.envs.environment import Message, Observation, Task
from opd.envs.returns_desk.customer import Answer, Customer
from opd.envs.returns_desk.database import RETURN_DAYS
from opd.envs.returns_desk.tasks import KINDS, draw_task
from opd.envs.returns_desk.tools import TOOLS, Service
from opd.episodes import Reply, ToolCall
from opd.errors import UserError
from opd.spelling import nearest

MAX_TURNS = 16
RULES = f"""You are the help desk of a shop. Work with the tools, one step at a time:
1. find_customer comes first. Ask the customer for what you do not know; never guess.
2. get_order shows the status and the SKUs.
3. Only processing orders can be cancelled; only delivered items returned or exchanged, within {RETURN_DAYS} days.
4. Exchange only for a variant of the same product in stock; check_stock shows its SKU.
5. Refunds go to the original payment only.
If a rule forbids the wish, change nothing and say that it is not possible. Else do it by a tool, then say what you did."""


@dataclass(frozen=True)
class ReturnsDeskConfig:
    """Drawn tasks, the same ones for the same seed; of more tasks, the first ones are the same."""

    tasks: int = 256
    """How many there are."""
    seed: int = 0
    """Of their databases and wishes."""
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    """What customers want, in turn: `status`, `cancel`, `return`, `exchange`, `forbidden` (the rules do not allow it),
    `two_wishes`; one that is named twice comes twice as often."""
    told: float = 0.75
    """Chance that the customer's first message has a fact (email, order number, reason, variant); the desk has to ask for
    the others."""


class ReturnsDesk:
    """See the package. Everything the customer says was drawn at `reset`, so that replies alone tell where an episode is."""

    Config = ReturnsDeskConfig
    single_turn = False
    restores = True
    tools: Sequence[Mapping[str, Any]] = TOOLS
    max_turns = MAX_TURNS

    def __init__(self, config: ReturnsDeskConfig) -> None:
        if config.tasks < 1:
            raise UserError(f"prompts.options.tasks is {config.tasks} and must be at least 1")
        if not config.kinds:
            raise UserError(f"prompts.options.kinds is empty: name some of {', '.join(KINDS)}")
        for kind in config.kinds:
            if kind not in KINDS:
                raise UserError(f"prompts.options.kinds: there is no kind {kind!r}{nearest(kind, KINDS)}")
        if not 0 <= config.told <= 1:
            raise UserError(f"prompts.options.told is {config.told}: it is a chance, from 0 to 1")
        self.config = config

    def tasks(self) -> Sequence[Task]:
        """See `opd.envs.environment.Environment.tasks`."""
        return [self._task(i) for i in range(self.config.tasks)]

    def _task(self, index: int) -> Task:
        name = f"returns-{self.config.seed}-{index}"
        kind = self.config.kinds[index % len(self.config.kinds)]
        return Task(name, draw_task(random.Random(name), kind), seed=index)

    def reset(self, data: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """See `opd.envs.environment.Environment.reset`."""
        self.wishes, owner = data["wishes"], data["customer"]
        self.database = copy.deepcopy(data["database"])
        self.service = Service(self.database)
        self.customer = Customer(self.database["customers"][owner], self.wishes, self.config.told, seed)
        self.target = copy.deepcopy(data["database"])
        for call in (call for wish in self.wishes for call in wish["calls"]):
            served = Service(self.target, owner).call(ToolCall(call["name"], call["arguments"]))
            assert served.change == call, served.text
        self.changes: list[Mapping[str, Any]] = []  # of this wish
        self.settled: list[bool] = []  # of the wishes that are over
        self.done = False
        self.history: list[Any] = []
        return [{"role": "system", "content": RULES}, {"role": "user", "content": self.customer.opening()}]

    def step(self, reply: Reply) -> Observation:
        """See `opd.envs.environment.Environment.step`. A mistake is an error of a tool, a change of the database that is not
        right, and something untrue or unfounded that ends a wish; asking and small talk are left open."""
        if self.done:
            return Observation(done=True)
        seen = self._served(reply) if reply.calls or reply.error is not None else self._spoken(reply.content)
        self.done = seen.done
        calls = [[call.name, dict(call.arguments)] for call in reply.calls]
        self.history.append([reply.content, calls, reply.error, [message["content"] for message in seen.messages]])
        return seen

    def _served(self, reply: Reply) -> Observation:
        """A reply with calls. Handing over ends the episode; it is right where the rules forbid the wish."""
        contents, mistake = [], reply.error is not None
        if reply.error is not None:
            contents.append(json.dumps({"error": reply.error}))
        for call in reply.calls:
            served = self.service.call(call)
            contents.append(served.text)
            mistake |= served.is_error and not self._reveals_another_owner(call)
            if served.change is not None:
                mistake |= served.change not in self.customer.wish["calls"]
                self.changes.append(served.change)
            if self.service.escalated:
                self.settled.append(self._forbidden_and_seen())
                return Observation(done=True, mistake=mistake or not self.settled[-1])
        return Observation(tuple({"role": "tool", "content": content} for content in contents), mistake=mistake)

    def _reveals_another_owner(self, call: ToolCall) -> bool:
        """Whether this is the look that shows a wish to be forbidden, though it is answered by an error."""
        wish = self.customer.wish
        lookup = ToolCall("get_order", {"order_id": wish["order_id"]})
        return wish.get("forbidden") == "other_owner" and call == lookup and self.service.customer is not None

    def _spoken(self, text: str) -> Observation:
        """A reply to the customer."""
        answer = self.customer.answer(text, bool(self.changes))
        if answer.ending is None:
            return Observation(({"role": "user", "content": answer.text},))
        mistake = self._settle(answer)
        following = self.customer.next_opening() if answer.ending != "left" else None
        if following is None:
            return Observation(done=True, mistake=mistake)
        self.changes = []
        return Observation(({"role": "user", "content": following},), mistake=mistake)

    def _settle(self, answer: Answer) -> bool | None:
        """Notes whether the wish ended well; whether this reply is a mistake."""
        wish = self.customer.wish
        if answer.ending == "told":
            true = {"delivered", "shipped"} if wish["fact"] == "delivered" else {wish["fact"]}
            well = wish["order_id"] in self.service.looked_at and wish["fact"] in answer.statuses <= true
        elif answer.ending == "refused":
            well = self._forbidden_and_seen()
        else:
            well = answer.ending == "served" and bool(wish["calls"]) and self.changes == wish["calls"]
        self.settled.append(well)
        return None if answer.ending in ("served", "left") and not well else not well

    def _forbidden_and_seen(self) -> bool:
        """Whether the wish must be refused, and the desk can know it."""
        wish = self.customer.wish
        return "forbidden" in wish and wish["order_id"] in self.service.looked_at

    def outcome(self) -> float | None:
        """See `opd.envs.environment.Environment.outcome`: 1.0 or 0.0. A change that is right counts before the desk has told
        the customer about it."""
        talks = [number for number, wish in enumerate(self.wishes) if not wish["calls"]]
        told = all(number < len(self.settled) and self.settled[number] for number in talks)
        return float(told and self.database == self.target)

    def state_hash(self) -> str:
        """See `opd.envs.environment.Environment.state_hash`."""
        service = [self.service.customer, sorted(self.service.looked_at), self.service.escalated]
        state = [self.database, service, self.customer.state, self.changes, self.settled, self.done, self.history]
        return hashlib.sha256(json.dumps([self.wishes, state], sort_keys=True).encode()).hexdigest()
