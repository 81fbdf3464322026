"""The help desk: its tasks, tools, rules, customer and verifier."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.envs.config import EnvironmentConfig, load_tasks
from opd.envs.opening import open_environment
from opd.envs.returns_desk.database import RETURN_DAYS
from opd.envs.returns_desk.desk import MAX_TURNS, RULES, ReturnsDesk, ReturnsDeskConfig
from opd.envs.returns_desk.tasks import FORBIDDEN, KINDS
from opd.envs.returns_desk.tools import TOOLS
from opd.episodes import EnvironmentTask, Reply, ToolCall
from opd.errors import UserError

TASKS = ReturnsDesk(ReturnsDeskConfig(tasks=200)).tasks()
SETTLED = Reply("All is settled now.")
REFUSAL = Reply("I am sorry, but the rules do not allow this, so I cannot do it.")


def call(name: str, /, **arguments: Any) -> Reply:
    return Reply("", (ToolCall(name, arguments),))


def opened(task, options: dict | None = None) -> ReturnsDesk:
    desk = ReturnsDesk(ReturnsDeskConfig(**options or {}))
    desk.reset(task.data, task.seed)
    return desk


def played(task, *replies: Reply) -> ReturnsDesk:
    desk = opened(task)
    for reply in replies:
        desk.step(reply)
    return desk


def owner(task) -> dict[str, str]:
    return task.data["database"]["customers"][task.data["customer"]]


def found(task) -> Reply:
    return call("find_customer", email=owner(task)["email"])


def perfect(task) -> list[Reply]:
    """What the best of all desks says and calls."""
    replies = [found(task)]
    for wish in task.data["wishes"]:
        replies.append(call("get_order", order_id=wish["order_id"]))
        if wish["about"] == "exchange":
            replies.append(call("check_stock", sku=wish["sku"]))
        replies += [call(right["name"], **right["arguments"]) for right in wish["calls"]]
        said = Reply(f"Your order {wish['order_id']} is {wish.get('fact')}.") if wish["about"] == "status" else SETTLED
        replies.append(REFUSAL if "forbidden" in wish else said)
    return replies


def of_kind(kind: str) -> list:
    return [task for task in TASKS if task.data["kind"] == kind]


def forbidden(rule: str) -> Any:
    return next(task for task in of_kind("forbidden") if task.data["wishes"][0]["forbidden"] == rule)


def answers(desk: ReturnsDesk, reply: Reply) -> list[str]:
    return [message["content"] for message in desk.step(reply).messages]


def error(desk: ReturnsDesk, reply: Reply) -> str:
    seen = desk.step(reply)
    assert seen.mistake is True
    assert not seen.done
    (message,) = seen.messages
    assert message["role"] == "tool"
    return json.loads(message["content"])["error"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_perfect_desk(kind):
    tasks = of_kind(kind)
    assert len(tasks) >= 33
    for task in tasks:
        desk, replies = opened(task), perfect(task)
        assert len(replies) < MAX_TURNS
        for number, reply in enumerate(replies):
            assert not desk.done
            seen = desk.step(reply)
            assert seen.mistake is False, (task.id, number, seen)
        assert seen.done
        assert not seen.messages
        assert desk.outcome() == 1.0
        assert desk.step(SETTLED).done


def test_a_change_counts_before_the_customer_is_told():
    for kind in ("cancel", "return", "exchange"):
        for task in of_kind(kind):
            *before, _ = perfect(task)
            assert played(task, *before).outcome() == 1.0
            assert played(task, *before[:-1]).outcome() == 0.0


def test_doing_nothing():
    for task in TASKS:
        assert played(task).outcome() == 0.0
        assert played(task, SETTLED, SETTLED).outcome() == 0.0
        desk = played(task, *[Reply("Hm.")] * 5)
        assert desk.done  # the customer has left
        assert desk.outcome() == 0.0


def test_refusing_and_handing_over():
    for task in TASKS:
        seen = [found(task), call("get_order", order_id=task.data["wishes"][0]["order_id"])]
        for ending in (REFUSAL, call("escalate")):
            for before in (seen, []):
                desk = played(task, *before)
                right = task.data["kind"] == "forbidden" and bool(before)  # nobody can know it before
                assert desk.step(ending).mistake is not right
                assert desk.outcome() == float(right)
                assert desk.done or task.data["kind"] == "two_wishes"


def test_saying_that_it_is_done():
    for task in TASKS:
        if task.data["kind"] != "status":
            desk = played(task, found(task))
            assert desk.step(Reply("I have cancelled the order and the item has been returned.")).mistake is True
            assert desk.outcome() == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It is {}.", True),
        ("Good news! The status is **{}**.\nIs there anything else?", True),
        ("It has not been cancelled: it is {}.", True),
        ("It is cancelled.", False),
        ("It is {}, or cancelled.", False),
        ("It was shipped and delivered.", None),
        ("It is processing, shipped, or delivered.", False),
    ],
)
def test_the_status_must_be_told(text, right):
    for task in of_kind("status"):
        fact = task.data["wishes"][0]["fact"]
        desk = played(task, *perfect(task)[:-1])
        seen = desk.step(Reply(text.format(fact)))
        settled = fact == "delivered" if right is None else right
        assert seen.done
        assert (desk.outcome(), seen.mistake) == (float(settled), not settled)
        desk = played(task, Reply(text.format(fact)))
        assert desk.outcome() == 0.0  # it was a guess


def test_a_change_that_is_not_right():
    for kind in ("return", "exchange", "cancel", "status", "two_wishes"):
        for task in of_kind(kind):
            wishes, database = task.data["wishes"], copy.deepcopy(task.data["database"])
            wish = wishes[0]
            *before, last = perfect(task)
            if wish["about"] == "return":
                wrong = call("return_item", **wish["calls"][0]["arguments"] | {"reason": "other"})
                assert "reason must be one of" in error(played(task, *before[:2]), wrong)
                reason = next(r for r in ("damaged", "not needed") if r != wish["reason"])
                wrong = call("return_item", **wish["calls"][0]["arguments"] | {"reason": reason})
            elif wish["about"] == "exchange":
                variants = database["products"][wish["item"]]["variants"]
                used = (wish["sku"], wish["calls"][0]["arguments"]["new_sku"])
                others = [sku for sku, variant in variants.items() if sku not in used and variant["stock"]]
                if not others:
                    continue
                wrong = call("exchange_item", order_id=wish["order_id"], sku=wish["sku"], new_sku=others[0])
            else:
                mine = [n for n, order in database["orders"].items() if order["customer"] == task.data["customer"]]
                known = {w["order_id"] for w in wishes if w["calls"]}
                others = [n for n in mine if n not in known and database["orders"][n]["status"] == "processing"]
                if not others:
                    continue
                wrong = call("cancel_order", order_id=others[0])
            desk = played(task, *before[:2])
            seen = desk.step(wrong)
            assert "error" not in seen.messages[0]["content"]
            assert seen.mistake is True
            for reply in [*before[2:], last]:
                desk.step(reply)
            assert desk.outcome() == 0.0


def test_the_right_change_twice():
    task = of_kind("return")[0]
    desk = played(task, *perfect(task)[:-1])
    assert "is already returned" in error(desk, perfect(task)[-2])
    assert desk.step(SETTLED).mistake is False
    assert desk.outcome() == 1.0


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("too_late", f"within {RETURN_DAYS} days; this was delivered"),
        ("not_delivered", "only delivered items can be"),
        ("not_processing", "only processing orders can be cancelled"),
        ("out_of_stock", "is out of stock"),
        ("other_product", "is no other variant of"),
        ("other_payment", "refunds go to the original payment only, which is"),
        ("other_owner", "belongs to another customer"),
    ],
)
def test_the_rules_hold(rule, message):
    task = forbidden(rule)
    wish, products = task.data["wishes"][0], task.data["database"]["products"]
    order = {"order_id": wish["order_id"]}
    item = {**order, "sku": wish["sku"]}
    if wish["about"] == "cancel":
        reply = call("cancel_order", **order)
    elif wish["about"] == "return":
        payment = {"refund_to": wish["refund_to"]} if "refund_to" in wish else {}
        reply = call("return_item", **item, reason=wish["reason"], **payment)
    elif rule == "other_product":
        other = products[wish["wanted"].removeprefix("a ")]
        reply = call("exchange_item", **item, new_sku=next(iter(other["variants"])))
    else:
        option, _, value = wish["wanted"].partition(" ")
        variants = products[wish["item"]]["variants"]
        reply = call("exchange_item", **item, new_sku=next(sku for sku, v in variants.items() if v[option] == value))
    assert error(opened(task), reply) == "first find the customer with find_customer"
    desk = played(task, found(task))
    assert message in error(desk, reply)
    assert desk.database == task.data["database"]
    assert desk.outcome() == 0.0
    assert desk.step(REFUSAL).mistake is False  # better late than never
    assert desk.outcome() == 1.0


def test_a_forbidden_wish_is_done_in_another_way():
    task = forbidden("other_payment")
    wish = task.data["wishes"][0]
    desk = played(task, *perfect(task)[:2])
    reply = call("return_item", order_id=wish["order_id"], sku=wish["sku"], reason=wish["reason"])
    assert desk.step(reply).mistake is True  # it is paid back, but not as the customer wants it
    desk.step(SETTLED)
    assert desk.outcome() == 0.0


def test_orders_of_others():
    task = of_kind("status")[0]
    own = task.data["customer"]
    others = [n for n, order in task.data["database"]["orders"].items() if order["customer"] != own]
    desk = played(task, found(task))
    assert error(desk, call("get_order", order_id=others[0])) == f"order {others[0]} belongs to another customer"


WRONG = [
    (call("get_orders", order_id="W1"), "unknown tool get_orders; the tools are find_customer, get_order, check_stock"),
    (call(""), "unknown tool ; the tools are"),
    (call("x" * 500), f"unknown tool {'x' * 40}...; the tools are"),
    (call("find_customer"), "give the email, or name and zip"),
    (call("find_customer", name="Ada Adler"), "give the email, or name and zip"),
    (call("find_customer", email=""), "give the email, or name and zip"),
    (call("find_customer", email="no@body"), "no customer with this email; write to the customer to ask for it"),
    (call("find_customer", email="{email}", zip="0"), "no customer with this email and zip"),
    (call("find_customer", email=["{email}"]), "find_customer: email must be a string"),
    (call("find_customer", phone="1"), "find_customer has no argument phone; it takes email, name, zip"),
    (call("get_order"), "get_order needs order_id"),
    (call("get_order", order_id=None), "get_order: order_id must be a string"),
    (call("get_order", order_id=1234), "get_order: order_id must be a string"),
    (call("get_order", order_id="W0"), "no order W0"),
    (call("check_stock"), "check_stock needs sku"),
    (call("check_stock", sku="hoodie"), "no item hoodie; get_order shows the SKUs"),
    (call("check_stock", sku=1.5), "check_stock: sku must be a string"),
    (call("cancel_order"), "cancel_order needs order_id"),
    (call("cancel_order", order_id="W0"), "no order W0"),
    (call("cancel_order", order_id="W0", reason="x"), "cancel_order has no argument reason; it takes order_id"),
    (call("return_item"), "return_item needs order_id and sku and reason"),
    (call("return_item", order_id="W0", sku="K0", reason="x"), "reason must be one of damaged, wrong item, not needed"),
    (call("return_item", order_id="W0", sku="K0", reason="damaged"), "no order W0"),
    (call("return_item", order_id="{order}", sku="K0", reason="damaged"), "has no item K0; it has K"),
    (call("return_item", order_id="W0", sku="K0", reason="damaged", refund_to={}), "refund_to must be a string"),
    (call("exchange_item", order_id="W0", sku="K0"), "exchange_item needs new_sku"),
    (call("exchange_item", order_id="{order}", sku="{sku}", new_sku="{sku}"), "is no other variant of"),
    (call("exchange_item", order_id="{order}", sku="{sku}", new_sku="K0"), "K0 is no other variant of"),
    (call("escalate", reason="x"), "escalate has no argument reason; it takes none"),
    (Reply("{", error="Invalid tool call: not valid JSON"), "Invalid tool call: not valid JSON"),
]


@pytest.mark.parametrize(("reply", "message"), WRONG)
def test_bad_calls(reply, message):
    task = of_kind("exchange")[0]
    wish = task.data["wishes"][0]
    known = {"{email}": owner(task)["email"], "{order}": wish["order_id"], "{sku}": wish["sku"]}
    calls = tuple(
        ToolCall(c.name, {k: known.get(v, v) if isinstance(v, str) else v for k, v in c.arguments.items()})
        for c in reply.calls
    )
    desk = played(task, found(task))
    assert message in error(desk, Reply(reply.content, calls, reply.error))
    assert desk.database == task.data["database"]


def test_every_tool_has_bad_calls():
    assert {c.name for reply, _ in WRONG for c in reply.calls} >= {tool["function"]["name"] for tool in TOOLS}


def test_what_was_shown_is_not_shown_again():
    """Small models repeat a lookup for ever; a change makes its answer new, and so does another customer."""
    task = of_kind("cancel")[0]
    order, others = task.data["wishes"][0]["order_id"], task.data["database"]["customers"]
    other = next(one for number, one in others.items() if number != task.data["customer"])
    desk = played(task, found(task), lookup := call("get_order", order_id=order))
    for again in (found(task), lookup):
        assert "you have this answer already" in error(desk, again)
    assert other["name"] in answers(desk, call("find_customer", email=other["email"]))[0]
    assert owner(task)["name"] in answers(desk, found(task))[0]
    assert '"processing"' in answers(desk, lookup)[0]
    desk.step(call("cancel_order", order_id=order))
    assert '"cancelled"' in answers(desk, lookup)[0]


def test_the_customers_orders_are_named():
    task = of_kind("status")[0]
    wish = task.data["wishes"][0]
    shown = json.loads(answers(opened(task), found(task))[0])
    assert shown["name"] == owner(task)["name"]
    assert wish["item"] in shown["orders"][wish["order_id"]]
    assert len(shown["orders"]) == 2


def test_several_calls_in_a_reply():
    task = of_kind("cancel")[0]
    replies = perfect(task)[:-1]
    desk = opened(task)
    seen = desk.step(Reply("I look it up.", tuple(c for reply in replies for c in reply.calls)))
    assert [message["role"] for message in seen.messages] == ["tool"] * 3
    assert seen.mistake is False
    assert desk.outcome() == 1.0
    wrong = desk.step(Reply("", (*replies[1].calls, ToolCall("nothing", {}))))
    assert [("error" in message["content"]) for message in wrong.messages] == [False, True]
    assert wrong.mistake is True


def test_what_the_tools_show():
    task = of_kind("exchange")[0]
    wish, database = task.data["wishes"][0], task.data["database"]
    desk = opened(task)
    (customer,) = map(
        json.loads, answers(desk, call("find_customer", name=owner(task)["name"].upper(), zip=owner(task)["zip"]))
    )
    assert customer["name"] == owner(task)["name"]
    assert wish["order_id"] in customer["orders"]
    (order,) = map(json.loads, answers(desk, call("get_order", order_id=wish["order_id"])))
    assert (order["status"], order["payment"]) == ("delivered", database["orders"][wish["order_id"]]["payment"])
    assert {"sku", "name", "price"} < order["items"][0].keys()
    assert wish["item"] in [item["name"] for item in order["items"]]
    (stock,) = map(json.loads, answers(desk, call("check_stock", sku=wish["sku"])))
    option, _, value = wish["wanted"].partition(" ")
    (new,) = [variant for variant in stock["variants"] if variant[option] == value]
    assert new["sku"] == wish["calls"][0]["arguments"]["new_sku"]
    answers(desk, call("exchange_item", order_id=wish["order_id"], sku=wish["sku"], new_sku=new["sku"]))
    (again,) = map(json.loads, answers(desk, call("check_stock", sku=wish["sku"])))
    assert next(v["stock"] for v in again["variants"] if v["sku"] == new["sku"]) == new["stock"] - 1
    assert "customer" not in order


QUESTIONS = (
    "Could you tell me your email, please?",
    "What is your full name and zip code?",
    "I need your order number.",
    "What is the reason for the return?",
    "Which size or colour would you like?",
)


@pytest.mark.parametrize("told", [0.0, 0.5, 1.0])
def test_the_customer_answers(told):
    desk = ReturnsDesk(ReturnsDeskConfig(told=told))
    asked = 0
    for number, task in enumerate(TASKS):
        wish, person = task.data["wishes"][0], owner(task)
        text = desk.reset(task.data, number)[1]["content"]
        wanted = [wish["item"], *([wish["wanted"]] if "wanted" in wish else [])]
        reasons = {"damaged": "damaged", "wrong item": "wrong item", "not needed": "not needed"}
        wanted += [reasons[wish["reason"]]] if "reason" in wish else []
        if told == 1.0:  # but a number or an email that the customer does not have
            assert person["email"] in text or person["name"] in text
            assert all(fact in text for fact in wanted[1:])
            assert wish["order_id"] in text or wish["item"] in text
        for question in QUESTIONS:
            seen = desk.step(Reply(question))
            assert not seen.done
            assert seen.mistake is None
            text += " " + seen.messages[0]["content"]
            asked += 1
        assert person["name"] in text
        assert person["zip"] in text
        assert wish["order_id"] in text or f"the order with the {wish['item']}" in text
        assert all(fact in text for fact in wanted if fact != wish["item"])
    assert asked == 1000


def test_not_every_customer_has_email_and_number():
    emails = [answers(opened(task), Reply("What is your email?"))[0] for task in TASKS]
    numbers = [answers(opened(task), Reply("What is the order number?"))[0] for task in TASKS]
    assert 100 < sum("@" in answer for answer in emails) < 180
    assert 100 < sum("W" in answer for answer in numbers) < 180
    strangers = [a for a, task in zip(numbers, TASKS) if task.data["wishes"][0].get("forbidden") == "other_owner"]
    assert len(strangers) >= 3
    assert all("W" in answer for answer in strangers)  # their order cannot be found by their name


def test_the_customer_repeats_itself_and_confirms():
    task = of_kind("cancel")[0]
    desk = opened(task)
    (answer,) = answers(desk, Reply("Shall I go ahead?"))
    assert answer.startswith("Yes, please. I only want to cancel my order")
    assert answers(desk, Reply("What can I do for you?"))[0].startswith("I want to cancel my order")
    assert answers(desk, Reply("I will do it at once.")) == ["All right, please go ahead."]
    assert answers(desk, Reply(""))[0].startswith("I am not sure what you mean. I want to cancel my order")
    seen = desk.step(Reply("Nice weather."))
    assert seen.done
    assert seen.mistake is None
    assert desk.outcome() == 0.0


def test_the_second_wish():
    task = of_kind("two_wishes")[0]
    first, second = task.data["wishes"]
    desk, replies = opened(task), perfect(task)
    said = [desk.step(reply).messages for reply in replies]
    opening = next(m["content"] for messages in said for m in messages if m["role"] == "user")
    assert second["order_id"] in opening or second["item"] in opening
    assert first["order_id"] != second["order_id"]
    assert owner(task)["email"] not in opening


def test_hashes():
    for task in TASKS[:24]:
        replies = perfect(task)
        hashes = [played(task, *replies[:n]).state_hash() for n in range(len(replies) + 1)]
        assert len(set(hashes)) == len(hashes)
        assert hashes[-1] == played(task, *replies).state_hash()
        assert played(task, Reply("a")).state_hash() != played(task, Reply("b")).state_hash()
    assert len({opened(task).state_hash() for task in TASKS}) == len(TASKS)


def test_the_tasks():
    assert [task.id for task in TASKS[:2]] == ["returns-0-0", "returns-0-1"]
    assert [task.data["kind"] for task in TASKS[:6]] == list(KINDS)
    assert json.loads(json.dumps([task.data for task in TASKS])) == [task.data for task in TASKS]
    assert {task.data["wishes"][0].get("forbidden") for task in of_kind("forbidden")} == set(FORBIDDEN)
    places = [list(task.data["database"]["orders"]).index(task.data["wishes"][0]["order_id"]) for task in of_kind("status")]
    assert set(places) == {0, 1}
    few = ReturnsDesk(ReturnsDeskConfig(tasks=3)).tasks()
    assert few == TASKS[:3]
    other = ReturnsDesk(ReturnsDeskConfig(tasks=3, seed=1)).tasks()
    assert all(a.data != b.data for a, b in zip(few, other))
    mixed = ReturnsDesk(ReturnsDeskConfig(tasks=6, kinds=["status", "status", "cancel"])).tasks()
    assert [task.data["kind"] for task in mixed] == ["status", "status", "cancel"] * 2


def test_data_are_not_changed():
    for task in TASKS[:12]:
        before = json.dumps(task.data)
        played(task, *perfect(task))
        assert json.dumps(task.data) == before


def test_the_seed_chooses_the_words():
    desk = ReturnsDesk(ReturnsDeskConfig())
    task: Any = TASKS[3]
    texts = [desk.reset(task.data, seed)[1]["content"] for seed in range(40)]
    assert len(set(texts)) > 20
    assert texts == [desk.reset(task.data, seed)[1]["content"] for seed in range(40)]


def test_prompts():
    prompts = load_tasks(EnvironmentConfig("returns_desk", {"tasks": 12}), "prompts")
    assert [prompt.id for prompt in prompts] == [f"returns-0-{i}" for i in range(12)]
    assert prompts[0].messages[0] == {"role": "system", "content": RULES}
    assert prompts[0].problem.startswith(prompts[0].messages[1]["content"])
    assert len({prompt.problem for prompt in prompts}) == 12
    task = EnvironmentTask("returns_desk", {}, 0, {"told": 0.5})
    assert open_environment(task).max_turns == MAX_TURNS


def test_it_is_short(chat_tokenizer):
    """Each turn of a model pays for it. A token has about four characters."""
    from tests.envs.conftest import QWEN2_5

    desk = opened(TASKS[0])
    tokenizer = chat_tokenizer(QWEN2_5)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": RULES}], tools=[dict(tool) for tool in desk.tools], tokenize=False
    )
    assert RULES in text
    assert all(f'"name": "{tool["function"]["name"]}"' in text for tool in TOOLS)
    assert len(text) < 2600
    assert max(len(text) for task in TASKS for text in answers(opened(task), found(task))) < 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, r"^prompts\.options\.tasks is 0 and must be at least 1"),
        ({"kinds": ["cancle"]}, r"^prompts\.options\.kinds: there is no kind 'cancle'; did you mean 'cancel'\?"),
        ({"kinds": []}, r"^prompts\.options\.kinds is empty: name some of status, cancel"),
        ({"told": 1.5}, r"^prompts\.options\.told is 1\.5: it is a chance, from 0 to 1"),
        ({"task": 3}, r"^unknown key 'prompts\.options\.task'; did you mean 'tasks'\?"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        load_tasks(EnvironmentConfig("returns_desk", options), "prompts")


def _words(task) -> list[str]:
    database = task.data["database"]
    skus = [sku for product in database["products"].values() for sku in product["variants"]]
    return [*database["orders"], *skus[:6], owner(task)["email"], "damaged", "visa"]


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(
    ["", "What is your email?", "It is delivered.", "Done.", "I cannot do this.", "Shall I proceed?", "I will wait."]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | TEXTS, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
NAMES = st.sampled_from([tool["function"]["name"] for tool in TOOLS]) | TEXTS


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_anything_may_be_said(data):
    task = data.draw(st.sampled_from(TASKS[:36]))
    known = st.sampled_from(_words(task))
    arguments = st.dictionaries(
        st.sampled_from(["order_id", "sku", "new_sku", "reason", "email"]) | TEXTS, known | VALUES, max_size=4
    )
    calls = st.lists(st.builds(ToolCall, NAMES, arguments), max_size=3).map(tuple)
    broken = st.builds(lambda text: Reply(text, error=text or "?"), TEXTS)
    replies = data.draw(st.lists(st.builds(Reply, TEXTS, calls) | broken, max_size=MAX_TURNS))
    first, second = opened(task), opened(task)
    for reply in [found(task), *replies]:
        seen = first.step(reply)
        assert seen == second.step(reply)
        assert first.state_hash() == second.state_hash()
        json.dumps([dict(message) for message in seen.messages]).encode()
        assert seen.done == (not seen.messages)
        assert first.outcome() in (0.0, 1.0)
        assert all(message["role"] in ("tool", "user") and message["content"] for message in seen.messages)
