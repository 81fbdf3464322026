"""The shop's database: customers, products with their variants and stock, and orders, all plain JSON values."""

import random
from typing import Any

Database = dict[str, Any]  # {"customers": {id: ...}, "products": {name: ...}, "orders": {id: ...}}

STATUSES = ("processing", "shipped", "delivered")
RETURN_DAYS = 30  # after delivery
NUM_CUSTOMERS = 3
ORDERS_EACH = 2

_FIRST = ("Ada", "Bela", "Carla", "David", "Emil", "Farid", "Greta", "Hana", "Igor", "Jana", "Karim", "Lena", "Mona", "Nils")
_LAST = ("Adler", "Brandt", "Costa", "Dahl", "Engel", "Fischer", "Gruber", "Haas", "Ivanov", "Jensen", "Keller", "Lopez")
_PAYMENTS = ("visa", "mastercard", "paypal", "bank transfer")
_PRODUCTS = {
    "hoodie": ("size", ("S", "M", "L", "XL")),
    "jacket": ("size", ("S", "M", "L", "XL")),
    "T-shirt": ("size", ("S", "M", "L")),
    "pair of sneakers": ("size", ("39", "40", "41", "42")),
    "backpack": ("colour", ("black", "green", "red")),
    "desk lamp": ("colour", ("black", "white", "yellow")),
    "mug": ("colour", ("blue", "white", "green")),
    "blanket": ("colour", ("grey", "blue", "red")),
}


def draw_database(rng: random.Random) -> Database:
    """A shop with a few customers. Nobody ordered the same product twice, so that an item's name tells the order."""
    skus = iter(rng.sample(range(100, 1000), sum(len(values) for _, values in _PRODUCTS.values())))
    products = {
        name: {
            "price": rng.randrange(10, 90, 5),
            "option": option,
            "variants": {f"K{next(skus)}": {option: value, "stock": rng.choice((0, 2, 3, 5, 8))} for value in values},
        }
        for name, (option, values) in _PRODUCTS.items()
    }
    customers: dict[str, Any] = {}
    for first, last in zip(rng.sample(_FIRST, NUM_CUSTOMERS), rng.sample(_LAST, NUM_CUSTOMERS)):
        customers[f"C{10 + len(customers)}"] = {
            "name": f"{first} {last}",
            "email": f"{first}.{last}@example.com".lower(),
            "zip": str(rng.randrange(10000, 100000)),
        }
    order_ids = iter(rng.sample(range(1000, 10000), NUM_CUSTOMERS * ORDERS_EACH))
    orders: dict[str, Any] = {}
    for customer in customers:
        names = rng.sample(sorted(products), 2 * ORDERS_EACH)
        payment = rng.choice(_PAYMENTS)
        for number in range(ORDERS_EACH):
            items = names[2 * number : 2 * number + rng.choice((1, 2))]
            orders[f"W{next(order_ids)}"] = {
                "customer": customer,
                "payment": payment,
                "items": [{"sku": rng.choice(sorted(products[name]["variants"]))} for name in items],
                "status": "shipped",
            }
    for order in orders.values():
        set_status(order, rng.choice(STATUSES), rng)
    return {"customers": customers, "products": products, "orders": orders}


def set_status(order: dict[str, Any], status: str, rng: random.Random, late: bool = False) -> None:
    """Gives the order a status, with the days since a delivery; `late`: more of them than a return may have."""
    order.pop("days_since_delivery", None)
    order["status"] = status
    if status == "delivered":
        order["days_since_delivery"] = rng.randrange(RETURN_DAYS + 5, 90) if late else rng.randrange(2, RETURN_DAYS - 2)


def product_of(database: Database, sku: str) -> str | None:
    """The name of the product that `sku` is a variant of."""
    return next((name for name, product in database["products"].items() if sku in product["variants"]), None)


def item_of(order: dict[str, Any], sku: str) -> dict[str, Any] | None:
    """The order's item with that SKU."""
    return next((item for item in order["items"] if item["sku"] == sku), None)


def other_payment(payment: str, rng: random.Random) -> str:
    """A way of payment that is not `payment`."""
    return rng.choice([other for other in (*_PAYMENTS, "gift card") if other != payment])
