"""The desk's tools: their schemas, and the service behind them, which keeps to the shop's rules.

Answers are short JSON texts. What cannot be done is answered by `{"error": ...}`, which says why; nothing raises.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opd.envs.returns_desk.database import RETURN_DAYS, Database, item_of, product_of
from opd.episodes import ToolCall

REASONS = ("damaged", "wrong item", "not needed")


def _schema(name: str, description: str, required: str = "", optional: str = "", **enums: tuple[str, ...]) -> dict[str, Any]:
    properties = {
        key: {"type": "string", **({"enum": list(enums[key])} if key in enums else {})}
        for key in f"{required} {optional}".split()
    }
    parameters = {"type": "object", "properties": properties} | ({"required": required.split()} if required else {})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[Mapping[str, Any], ...] = (
    _schema("find_customer", "By email, or by name and zip.", optional="email name zip"),
    _schema("get_order", "Status, payment, items with SKUs.", "order_id"),
    _schema("check_stock", "All variants of the product, with stock.", "sku"),
    _schema("cancel_order", "Cancel a processing order.", "order_id"),
    _schema("return_item", "Return a delivered item.", "order_id sku reason", "refund_to", reason=REASONS),
    _schema("exchange_item", "Exchange a delivered item.", "order_id sku new_sku"),
    _schema("escalate", "Hand the chat over to a colleague."),
)


@dataclass(frozen=True)
class Served:
    """What a tool answers.

    Example: `Served({"order_id": "W3190", "status": "cancelled"}, change={"name": "cancel_order", "arguments": {...}})`
    """

    content: Mapping[str, Any]
    change: Mapping[str, Any] | None = None  # the call that changed the database, without what changes nothing
    is_error: bool = False

    @property
    def text(self) -> str:
        return json.dumps(self.content)


class _Refused(Exception):
    """Why a call is not carried out."""


class Service:
    """Tools on a database, which they change. Nobody sees an order before its owner has been found."""

    def __init__(self, database: Database, customer: str | None = None) -> None:
        self.database, self.customer = database, customer
        self.looked_at: set[str] = set()  # orders of which the desk has learned something, if only whose they are not
        self.escalated = False
        self._shown: list[ToolCall] = []  # what was looked up since the last change, of this customer
        self._tools: dict[str, Callable[..., Served]] = {
            "find_customer": self._find_customer,
            "get_order": self._get_order,
            "check_stock": self._check_stock,
            "cancel_order": self._cancel_order,
            "return_item": self._return_item,
            "exchange_item": self._exchange_item,
            "escalate": self._escalate,
        }

    def call(self, call: ToolCall) -> Served:
        """Carries a call out, or says why not."""
        try:
            _check(call)
            if call in self._shown:
                raise _Refused("you have this answer already, and nothing has changed; now write to the customer")
            served = self._tools[call.name](**call.arguments)
        except _Refused as refusal:
            return Served({"error": str(refusal)}, is_error=True)
        self._shown = [] if served.change is not None else [*self._shown, call]
        return served

    def _find_customer(self, email: str | None = None, name: str | None = None, zip: str | None = None) -> Served:
        if not email and not (name and zip):
            raise _Refused("give the email, or name and zip; write to the customer to ask for them")
        wanted = {key: value.strip().lower() for key, value in (("email", email), ("name", name), ("zip", zip)) if value}
        for number, customer in self.database["customers"].items():
            if all(customer[key].lower() == value for key, value in wanted.items()):
                if number != self.customer:
                    self.customer, self._shown = number, []
                return Served({"name": customer["name"], "orders": self._orders(number)})
        raise _Refused(f"no customer with this {' and '.join(wanted)}; write to the customer to ask for it")

    def _orders(self, customer: str) -> dict[str, list[str | None]]:
        """The names of the items that the customer ordered, by order."""
        own = {number: order for number, order in self.database["orders"].items() if order["customer"] == customer}
        return {number: [product_of(self.database, item["sku"]) for item in order["items"]] for number, order in own.items()}

    def _order(self, order_id: str) -> dict[str, Any]:
        if self.customer is None:
            raise _Refused("first find the customer with find_customer")
        order = self.database["orders"].get(order_id)
        if order is None:
            raise _Refused(f"no order {_short(order_id)}")
        self.looked_at.add(order_id)
        if order["customer"] != self.customer:
            raise _Refused(f"order {order_id} belongs to another customer")
        return order

    def _item(self, order_id: str, sku: str, verb: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(order, item), where the item was delivered in time."""
        order = self._order(order_id)
        item = item_of(order, sku)
        if item is None:
            skus = ", ".join(item["sku"] for item in order["items"])
            raise _Refused(f"order {order_id} has no item {_short(sku)}; it has {skus}")
        if order["status"] != "delivered":
            raise _Refused(f"only delivered items can be {verb}; order {order_id} is {order['status']}")
        if order["days_since_delivery"] > RETURN_DAYS:
            raise _Refused(
                f"items can be {verb} within {RETURN_DAYS} days; this was delivered {order['days_since_delivery']} days ago"
            )
        if "state" in item:
            raise _Refused(f"item {sku} is already {item['state']}")
        return order, item

    def _get_order(self, order_id: str) -> Served:
        order = self._order(order_id)
        items = [{**item, **self._described(item["sku"])} for item in order["items"]]
        shown = {key: value for key, value in order.items() if key not in ("customer", "items")}
        return Served({"order_id": order_id, **shown, "items": items})

    def _described(self, sku: str) -> dict[str, Any]:
        """Name, price, and what tells the variant from the others."""
        name = product_of(self.database, sku)
        product = self.database["products"][name]
        option = product["option"]
        return {"name": name, "price": product["price"], option: product["variants"][sku][option]}

    def _check_stock(self, sku: str) -> Served:
        name = product_of(self.database, sku)
        if name is None:
            raise _Refused(f"no item {_short(sku)}; get_order shows the SKUs of an order's items")
        variants = self.database["products"][name]["variants"]
        return Served({"name": name, "variants": [{"sku": number, **variant} for number, variant in variants.items()]})

    def _cancel_order(self, order_id: str) -> Served:
        order = self._order(order_id)
        if order["status"] != "processing":
            raise _Refused(f"only processing orders can be cancelled; order {order_id} is {order['status']}")
        order["status"] = "cancelled"
        return _changed({"order_id": order_id, "status": "cancelled"}, "cancel_order", order_id=order_id)

    def _return_item(self, order_id: str, sku: str, reason: str, refund_to: str | None = None) -> Served:
        order, item = self._item(order_id, sku, "returned")
        if refund_to is not None and refund_to.strip().lower() != order["payment"]:
            raise _Refused(f"refunds go to the original payment only, which is {order['payment']}")
        item |= {"state": "returned", "reason": reason}
        content = {"order_id": order_id, "sku": sku, "state": "returned", "refund_to": order["payment"]}
        return _changed(content, "return_item", order_id=order_id, sku=sku, reason=reason)

    def _exchange_item(self, order_id: str, sku: str, new_sku: str) -> Served:
        _, item = self._item(order_id, sku, "exchanged")
        product = self.database["products"][product_of(self.database, sku)]
        if new_sku not in product["variants"] or new_sku == sku:
            raise _Refused(f"{_short(new_sku)} is no other variant of {sku}; check_stock shows them")
        if product["variants"][new_sku]["stock"] < 1:
            raise _Refused(f"{new_sku} is out of stock")
        product["variants"][new_sku]["stock"] -= 1
        item |= {"state": "exchanged", "new_sku": new_sku}
        content = {"order_id": order_id, "sku": sku, "state": "exchanged", "new_sku": new_sku}
        return _changed(content, "exchange_item", order_id=order_id, sku=sku, new_sku=new_sku)

    def _escalate(self) -> Served:
        self.escalated = True
        return Served({"status": "handed over"})


def _check(call: ToolCall) -> None:
    """Raises `_Refused` for a tool that does not exist, and for arguments that do not fit its schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    if call.name not in schemas:
        raise _Refused(f"unknown tool {_short(call.name)}; the tools are {', '.join(schemas)}")
    properties, required = schemas[call.name]["properties"], schemas[call.name].get("required", [])
    for name, value in call.arguments.items():
        if name not in properties:
            raise _Refused(f"{call.name} has no argument {_short(name)}; it takes {', '.join(properties) or 'none'}")
        if not isinstance(value, str):
            raise _Refused(f"{call.name}: {name} must be a string")
        enum = properties[name].get("enum")
        if enum is not None and value not in enum:
            raise _Refused(f"{call.name}: {name} must be one of {', '.join(enum)}")
    missing = [name for name in required if not call.arguments.get(name)]
    if missing:
        raise _Refused(f"{call.name} needs {' and '.join(missing)}")


def _changed(content: dict[str, Any], name: str, **arguments: str) -> Served:
    return Served(content, change={"name": name, "arguments": arguments})


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
