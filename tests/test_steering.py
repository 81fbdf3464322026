"""Several rollout controllers together."""

import numpy as np
import pytest

from opd.plugins import RolloutController
from opd.records import Limits, Prompt, Rollout, Start, Turn
from opd.steering import Steering


def turn():
    ids = np.arange(2, dtype=np.int32)
    return Turn(ids, ids, -ids.astype(np.float32), "eos")


class Limited(RolloutController):
    def __init__(self, turns=None, tokens=None, start=None, scores=False):
        self.own, self.begin, self.needs_scores = Limits(turns, tokens), start, scores
        self.seen, self.forgotten, self.value = [], False, np.zeros(2, np.float32)

    def start(self, prompt, step, slot):
        return self.begin

    def limits(self, step):
        return self.own

    def landed(self, step, rollouts):
        self.seen.append((step, [rollout.slot for rollout in rollouts]))

    def forget(self):
        self.forgotten = True

    def figures(self):
        return {"mine": 1.0}

    def state_dict(self):
        return {"seen": len(self.seen)}, {"value": self.value}

    def load_state_dict(self, state, arrays):
        self.loaded = state["seen"], arrays["value"].tolist()


def test_the_least_of_all_limits_holds_and_the_first_start():
    first, second = Start(turns=(turn(),)), Start(turns=(turn(), turn()))
    steering = Steering({"a": Limited(turns=5), "b": Limited(3, 9, first), "c": Limited(None, 12, second)})
    plan = steering.plan(Prompt(id="p"), 0, 0)
    assert plan.start is first
    assert plan.limits == Limits(turns=3, tokens=9)


def test_none_of_them_wants_anything():
    steering = Steering({"a": Limited()})
    assert steering.plan(Prompt(id="p"), 0, 0).limits == Limits()
    assert not steering.plan(Prompt(id="p"), 0, 0).start.turns
    assert not steering.needs_scores
    assert Steering({"a": Limited(), "b": Limited(scores=True)}).needs_scores
    assert not Steering({})


def test_rollouts_come_in_the_order_of_their_slots():
    one = Limited()
    Steering({"a": one}).landed(4, [Rollout(Prompt(id="p"), slot, (turn(),)) for slot in (3, 0, 2)])
    assert one.seen == [(4, [0, 2, 3])]


@pytest.mark.parametrize("identity", ["same", "other"])
def test_its_state_comes_back_and_is_forgotten_where_scores_would_differ(identity):
    before, after = Steering({"a": Limited(), "b": Limited()}, "same"), Steering({"a": Limited(), "b": Limited()}, identity)
    before.controllers["b"].value = np.array([1, 2], np.float32)  # type: ignore[attr-defined]
    before.landed(0, [])
    assert after.load_state_dict(*before.state_dict()) == (identity == "same")
    assert [one.loaded for one in after.controllers.values()] == [(1, [0, 0]), (1, [1, 2])]  # type: ignore[attr-defined]
    assert [one.forgotten for one in after.controllers.values()] == [identity == "other"] * 2  # type: ignore[attr-defined]
