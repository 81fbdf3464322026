"""What a server says that it can do, and what several can do together."""

from dataclasses import asdict

import pytest

from opd.teachers.abilities import Abilities, usable

LIMITED = {"hidden": False, "temperature": False, "ids": "overlap", "max_k": 64}


def test_of_an_info():
    assert Abilities.of({}) == Abilities()
    assert Abilities.of({"scores": LIMITED}) == Abilities(False, False, "overlap", 64)
    assert asdict(Abilities.of({"scores": LIMITED})) == LIMITED


def test_replicas_can_do_what_the_least_of_them_can():
    one, other = Abilities(False, True, "exact", 64), Abilities(True, False, "overlap", 20)
    assert Abilities.shared([one, other]) == Abilities(False, False, "overlap", 20)
    assert Abilities.shared([one, Abilities()]) == one
    assert Abilities.shared([Abilities(), Abilities()]) == Abilities()


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        LIMITED | {"more": 1},
        LIMITED | {"hidden": 1},
        LIMITED | {"temperature": "no"},
        LIMITED | {"ids": "some"},
        LIMITED | {"max_k": -1},
        LIMITED | {"max_k": True},
    ],
    ids=str,
)
def test_what_is_no_such_answer(value):
    assert not usable(value)
    assert usable(None)
    assert usable(LIMITED)
    assert usable(LIMITED | {"max_k": None})
