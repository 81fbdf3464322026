"""Under TRITON_INTERPRET=1 these tests run the Triton kernels, a millisecond or more a tile: each kind of case then once."""

from collections import Counter

import pytest

from opd.kernels.dispatch import interpreted
from opd.kernels.grid import Grid

# Of tests whose id has this in it, by the first line that fits: cases with these values of a parameter, or none. Else all.
SAMPLE = {
    "test_divergence.py::test_shapes": {"c": (0, 1, 5), "beta": (0.5,), "mode": ("recompute",)},
    "test_divergence.py::test_hard_rows": {"beta": (0.5,), "mode": ("recompute",)},
    "test_divergence.py::test_low_precision": {"beta": (0.5,), "mode": ("recompute",)},
    "test_divergence.py::test_equal_rows": {"beta": (0.5,), "mode": ("recompute",)},
    "test_gather.py::test_shapes": {"c": (0, 1, 5)},
    "test_topk.py::test_all_tokens": {"vocab": (1, 50)},
    "test_topk.py::test_never_negative": None,
    "test_topk.py::test_the_tail_bucket": None,
    "test_linear.py::test_every_teacher": {"temperature": (0.5,)},
    "test_linear.py": None,
    "float64": None,
}
launches: Counter[str] = Counter()


if interpreted():
    launch = Grid.launch

    def counted(self, kernel, *args, **constants):  # type: ignore[no-untyped-def]
        launches[f"{kernel.fn.__module__.rsplit('.')[-1]}.{kernel.fn.__name__}"] += self.num_programs > 0
        launch(self, kernel, *args, **constants)

    Grid.launch = counted  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if interpreted():
        skipped = [item for item in items if not sampled(item)]
        config.hook.pytest_deselected(items=skipped)
        items[:] = [item for item in items if item not in skipped]
        for item in items:  # numpy speaks up where a device computes on
            item.add_marker(pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"))


def sampled(item: pytest.Function) -> bool:
    wanted = next((values for part, values in SAMPLE.items() if part in item.nodeid), {})
    return wanted is not None and all(item.callspec.params[name] in values for name, values in wanted.items())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, number in sorted(launches.items()):
        terminalreporter.write_line(f"launched {name} {number}")
