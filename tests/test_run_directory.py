"""Which difference between two recipes is named."""

import pytest

from opd.errors import UserError
from opd.run_directory import refuse_differences

OLD = {"steps": 3, "rollout": {"stride": {"stop_below": -1.0, "restart": True}}, "betas": (0.9, 0.95), "lora": None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rollout": {}}, r"^rollout\.stride: the run in run began with this section, not without it; resume it with"),
        ({"rollout": {**OLD["rollout"], "prefix": {}}}, r"^rollout\.prefix: the run in run began without this section;"),
        (
            {"rollout": {"stride": {"stop_below": -1.0, "restart": False}}},
            r"^rollout\.stride\.restart: .* with True, not False",
        ),
        ({"lora": {"r": 4}}, r"^lora: the run in run began without this section"),
        ({"steps": 4}, r"^steps: the run in run began with 3, not 4;"),
    ],
)
def test_the_first_difference_is_named(changed, message):
    with pytest.raises(UserError, match=message):
        refuse_differences("run", OLD, {**OLD, **changed}, lambda key: False)  # type: ignore[arg-type]
    refuse_differences("run", OLD, {**OLD, **changed}, lambda key: True)  # type: ignore[arg-type]


def test_lists_are_as_good_as_tuples():
    refuse_differences("run", OLD, {**OLD, "betas": [0.9, 0.95]}, lambda key: False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^betas"):
        refuse_differences("run", OLD, {**OLD, "betas": [0.9, 0.9]}, lambda key: False)  # type: ignore[arg-type]
