"""What a server says about itself: taken only where every field is of use, and the same at every replica."""

import asyncio
import copy

import pytest

from opd.errors import UserError
from opd.teachers.client.handshake import check_same, difference, identity, read_info

INFO = {
    "protocol": 1,
    "models": {"base": {"weights": "a" * 32}, "maths": {"weights": "b" * 32}},
    "tokens": "c" * 32,
    "num_tokens": 38,
    "rows": 45,
    "head": "d" * 32,
    "eos_ids": [2],
    "max_context": 512,
    "limits": {"body_bytes": 1000},
}


class Told:
    """A replica that answers this."""

    field, url = "teachers.t.url", "http://x"

    def __init__(self, info) -> None:
        self.info = info

    async def get_json(self, path: str, max_bytes: int):
        return self.info


def read(info):
    return asyncio.run(read_info(Told(info)))  # type: ignore[arg-type]


def test_a_whole_info():
    assert read(INFO | {"further": 1}) == INFO | {"further": 1}


@pytest.mark.parametrize("info", [None, [], 3, "x", {}, {"protocol": "1"}, {"protocol": True}, {"protocol": None}])
def test_another_service(info):
    with pytest.raises(UserError, match=r"^teachers\.t\.url: http://x is no teacher server of opd: .* no protocol"):
        read(info)


def test_another_protocol():
    with pytest.raises(UserError, match="speaks protocol 2, this side speaks 1: install the same opd on both"):
        read({"protocol": 2})


WRONG = {
    "models": [
        None,
        {},
        [],
        {"base": {}},
        {"base": {"weights": "xyz"}},
        {"base": {"weights": 3}},
        {"a b": {"weights": "a" * 32}},
        {"base": 1},
    ],
    "tokens": [None, "", 3, "C" * 32, "c" * 15],
    "num_tokens": [None, 0, -1, 1.5, True, "38", 2**70],
    "rows": [None, 0, [1]],
    "head": [None, "", "../../etc", "a/b", 3],
    "eos_ids": [None, 2, ["2"], [-1], [True], [2.0]],
    "max_context": [None, 0, "512"],
    "limits": [None, {}, {"body_bytes": 0}, {"body_bytes": "1"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_field_that_is_of_no_use(name, value):
    for info in (INFO | {name: value}, {key: one for key, one in (INFO | {name: value}).items() if key != name}):
        with pytest.raises(UserError, match=f"^teachers.t.url: http://x: its /v1/info has no usable '{name}'") as found:
            read(info)
        assert len(str(found.value)) < 200


def test_what_a_server_can_do_is_checked_where_it_says():
    read(INFO | {"scores": {"hidden": False, "temperature": True, "ids": "overlap", "max_k": 9}})
    with pytest.raises(UserError, match="no usable 'scores'"):
        read(INFO | {"scores": {"hidden": False}})


def changed(**fields):
    info = copy.deepcopy(INFO)
    info.update(fields)
    return info


def same(*infos, model="base", digest=None):
    return check_same([(f"http://{i}", info) for i, info in enumerate(infos)], "teachers.t", model=model, digest=digest)


def test_the_same_model():
    assert same(INFO, changed(max_context=9, limits={"body_bytes": 5})) == identity(INFO, "base")
    assert same(INFO, changed(models={"maths": {"weights": "b" * 32}}), model="maths").weights == "b" * 32
    assert same(INFO, digest="A" * 32).weights == "a" * 32


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"models": {"base": {"weights": "e" * 32}}}, "their weights"),
        ({"tokens": "e" * 32}, "their token -> id maps"),
        ({"head": "e" * 32}, "their output heads"),
        ({"rows": 46}, "the rows of their output heads"),
        ({"num_tokens": 39}, "their numbers of tokens"),
    ],
)
def test_replicas_that_differ(fields, text):
    with pytest.raises(UserError, match=rf"^teachers\.t\.url: http://2 and http://0 differ in {text}"):
        same(INFO, INFO, changed(**fields))
    assert difference(identity(INFO, "base"), identity(changed(**fields), "base")).startswith(text)  # type: ignore[union-attr]


def test_a_model_that_is_not_served():
    with pytest.raises(UserError, match=r"^teachers\.t\.served_as: http://0 serves no 'physics', only base, maths; "):
        same(INFO, model="physics")


def test_other_weights_than_the_recipe_names():
    with pytest.raises(
        UserError, match=rf"^teachers\.t\.url: http://0 serves weights {'a' * 32}, but teachers\.t\.digest is f"
    ):
        same(INFO, digest="f" * 32)
