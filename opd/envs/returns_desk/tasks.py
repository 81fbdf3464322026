"""Tasks of the returns desk: what a customer wants, in a database where the rules allow it or not.

A wish is plain JSON: what it is `about`, the order and the item, what the customer knows (`reason`, `wanted`, `refund_to`),
and what is right: the `calls` that change the database, and the `fact` that the customer has to be told.
"""

import random
from collections.abc import Callable
from typing import Any

from opd.envs.returns_desk.database import STATUSES, Database, draw_database, other_payment, product_of, set_status
from opd.envs.returns_desk.tools import REASONS

Wish = dict[str, Any]


def draw_task(rng: random.Random, kind: str) -> dict[str, Any]:
    """The data of a task: `kind`, `customer`, `database` and `wishes`."""
    database = draw_database(rng)
    customer = next(iter(database["customers"]))
    own = [number for number, order in database["orders"].items() if order["customer"] == customer]
    rng.shuffle(own)
    abouts = rng.sample(list(_ALLOWED), 2) if kind == "two_wishes" else [kind]
    wishes = [{**_ALLOWED, "forbidden": _forbidden}[about](rng, database, number) for about, number in zip(abouts, own)]
    return {"kind": kind, "customer": customer, "database": database, "wishes": wishes}


def _status(rng: random.Random, database: Database, number: str) -> Wish:
    set_status(database["orders"][number], status := rng.choice(STATUSES), rng)
    return _wish("status", rng, database, number, fact=status)


def _cancel(rng: random.Random, database: Database, number: str) -> Wish:
    set_status(database["orders"][number], "processing", rng)
    return _right(_wish("cancel", rng, database, number), "cancel_order", order_id=number)


def _return(rng: random.Random, database: Database, number: str) -> Wish:
    set_status(database["orders"][number], "delivered", rng)
    wish = _wish("return", rng, database, number, reason=rng.choice(REASONS))
    return _right(wish, "return_item", order_id=number, sku=wish["sku"], reason=wish["reason"])


def _exchange(rng: random.Random, database: Database, number: str) -> Wish:
    set_status(database["orders"][number], "delivered", rng)
    wish = _wish("exchange", rng, database, number)
    product = database["products"][product_of(database, wish["sku"])]
    new_sku = rng.choice([sku for sku in product["variants"] if sku != wish["sku"]])
    variant = product["variants"][new_sku]
    variant["stock"] = max(variant["stock"], 1)
    wish["wanted"] = f"{product['option']} {variant[product['option']]}"
    return _right(wish, "exchange_item", order_id=number, sku=wish["sku"], new_sku=new_sku)


def _wish(about: str, rng: random.Random, database: Database, number: str, **known: Any) -> Wish:
    sku = rng.choice(database["orders"][number]["items"])["sku"]
    return {"about": about, "order_id": number, "sku": sku, "item": product_of(database, sku), "calls": [], **known}


def _right(wish: Wish, name: str, **arguments: str) -> Wish:
    return wish | {"calls": [{"name": name, "arguments": arguments}]}


def _forbidden(rng: random.Random, database: Database, number: str) -> Wish:
    """A wish that breaks one of the rules, so that nothing may be changed."""
    rule = rng.choice(list(FORBIDDEN))
    return FORBIDDEN[rule](rng, database, number) | {"calls": [], "forbidden": rule}


def _too_late(rng: random.Random, database: Database, number: str) -> Wish:
    wish = rng.choice((_return, _exchange))(rng, database, number)
    set_status(database["orders"][number], "delivered", rng, late=True)
    return wish


def _not_delivered(rng: random.Random, database: Database, number: str) -> Wish:
    wish = rng.choice((_return, _exchange))(rng, database, number)
    set_status(database["orders"][number], "shipped", rng)
    return wish


def _not_processing(rng: random.Random, database: Database, number: str) -> Wish:
    wish = _cancel(rng, database, number)
    set_status(database["orders"][number], rng.choice(("shipped", "delivered")), rng)
    return wish


def _out_of_stock(rng: random.Random, database: Database, number: str) -> Wish:
    wish = _exchange(rng, database, number)
    variants = database["products"][wish["item"]]["variants"]
    variants[wish["calls"][0]["arguments"]["new_sku"]]["stock"] = 0
    return wish


def _other_product(rng: random.Random, database: Database, number: str) -> Wish:
    wish = _exchange(rng, database, number)
    return wish | {"wanted": f"a {rng.choice([name for name in database['products'] if name != wish['item']])}"}


def _other_payment(rng: random.Random, database: Database, number: str) -> Wish:
    return _return(rng, database, number) | {"refund_to": other_payment(database["orders"][number]["payment"], rng)}


def _other_owner(rng: random.Random, database: Database, number: str) -> Wish:
    owner = database["orders"][number]["customer"]
    number = rng.choice([other for other, order in database["orders"].items() if order["customer"] != owner])
    return _cancel(rng, database, number)


_ALLOWED: dict[str, Callable[[random.Random, Database, str], Wish]] = {
    "status": _status,
    "cancel": _cancel,
    "return": _return,
    "exchange": _exchange,
}
FORBIDDEN: dict[str, Callable[[random.Random, Database, str], Wish]] = {
    "too_late": _too_late,
    "not_delivered": _not_delivered,
    "not_processing": _not_processing,
    "out_of_stock": _out_of_stock,
    "other_product": _other_product,
    "other_payment": _other_payment,
    "other_owner": _other_owner,
}
KINDS = (*_ALLOWED, "forbidden", "two_wishes")
