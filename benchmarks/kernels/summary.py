"""From the rounds of all processes to a row for each case and provider, and what the rows must show."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernels.cases import Case, least_work
from benchmarks.kernels.providers import LIGER_CHUNK, PROVIDERS, family

Row = dict[str, Any]
DEFAULT = f"@{LIGER_CHUNK}"


def floor_s(case: Case, device: str, ceilings: Mapping[str, float]) -> float:
    """The least seconds that the case takes on this machine: see the package's docstring."""
    work = least_work(case, device)
    passes = [work.bytes / ceilings["copy_bytes_s"]]
    if "exp_s" in ceilings:
        passes.append(work.exps / ceilings["exp_s"])
    return work.flop / ceilings[f"gemm_{case.dtype}_flop_s"] + max(passes)


def summarise(case: Case, provider: str, results: Sequence[Row], device: str, ceilings: Mapping[str, float]) -> Row:
    """One row from the results of all rounds. Times are over all calls, memory is the largest of the rounds."""
    row: Row = {"case": case.name, "provider": provider}
    good = [result for result in results if "failed" not in result]
    if not good:
        return row | {"failed": results[0]["failed"]}
    wall = sorted(second for result in good for second in result["wall_s"])
    row |= {"calls": len(wall), "wall_min_s": wall[0], "wall_median_s": statistics.median(wall), "wall_iqr_s": _iqr(wall)}
    if "cpu_s" in good[0]:
        cpu = [second for result in good for second in result["cpu_s"]]
        row["cpu_median_s"] = statistics.median(cpu)
        row["cpu_over_wall"] = sum(cpu) / sum(wall)
    row["first_s"], row["first_peak_mib"] = good[0]["first_s"], good[0]["first_peak_mib"]
    row["peak_mib"] = max(result["peak_mib"] for result in good)
    row["peak_net_mib"] = max(result["peak_mib"] - result["gradients_mib"] for result in good)
    for name in ("loss_error", "grad_error"):
        found = [result[name] for result in good if name in result]
        row |= {name: max(found)} if found else {}
    row["floor_s"] = floor_s(case, device, ceilings)
    row["floor_share"] = row["floor_s"] / row["wall_median_s"]
    return row


def contenders(names: Iterable[str], results: Mapping[str, Sequence[Row]]) -> list[str]:
    """Those that take part in further rounds: of the settings of a provider its default and the fastest so far."""
    seconds = {
        name: statistics.median(found[-1]["wall_s"]) for name, found in results.items() if found and "wall_s" in found[-1]
    }
    kept = []
    for name in names:
        rivals = [other for other in seconds if PROVIDERS[other].variant and family(other) == family(name)]
        if name in seconds and (not PROVIDERS[name].variant or name == min(rivals, key=seconds.__getitem__)):
            kept.append(name)
    return kept


@dataclass(frozen=True)
class Target:
    """`ours` against `theirs` in one case: of `field` theirs over ours is at least `bound`. Names that end in `@` stand for
    the setting with the least of it. Without `theirs` the field of `ours` itself is at most `bound`."""

    case: str
    field: str
    bound: float
    theirs: str | None = None
    ours: str = "ours_fused"


TIME, MEMORY = "wall_median_s", "peak_mib"
TARGETS = (
    Target("logits bf16", TIME, 8, "torch"),
    Target("logits bf16", MEMORY, 8, "torch"),
    Target("logits fp32", TIME, 4.5, "torch"),
    Target("logits fp32", MEMORY, 4.5, "torch"),
    Target("linear frozen", TIME, 2, "liger@"),
    Target("linear frozen", MEMORY, 4, "liger" + DEFAULT),
    Target("linear trained", TIME, 1.5, "liger" + DEFAULT),
    Target("linear trained", TIME, 1.5, "liger@"),
    Target("linear trained", MEMORY, 4, "liger" + DEFAULT),
    Target("linear trained", TIME, 1, "liger_compile@"),
    Target("linear trained", MEMORY, 3, "liger_compile" + DEFAULT),
    Target("linear frozen", TIME, 1, "liger_compile@"),
    Target("linear frozen", MEMORY, 3, "liger_compile" + DEFAULT),
    Target("gather", TIME, 5, "torch", ours="ours"),
    Target("gather", "loss_error", 1e-6, ours="ours"),
)


def judge(rows: Sequence[Row], targets: Sequence[Target] = TARGETS) -> list[Row]:
    """Each target whose rows are there, with the measured figure and whether it is reached; ratios of times are those of
    medians, with those of the fastest calls beside them."""
    judged = []
    for target in targets:
        ours = _figure(rows, target.case, target.ours, target.field)
        theirs = _figure(rows, target.case, target.theirs, target.field) if target.theirs else 1.0
        if ours is None or theirs is None:
            continue
        measured = theirs / ours if target.theirs else ours
        reached = measured >= target.bound if target.theirs else measured <= target.bound
        against = f"{target.theirs.rstrip('@')} / {target.ours}" if target.theirs else target.ours
        what = f"{target.case}: {target.field} of {against}"
        found: Row = {"target": what, "bound": target.bound, "measured": measured, "ok": reached}
        if target.field == TIME and target.theirs:
            fastest = (_figure(rows, target.case, name, "wall_min_s") for name in (target.theirs, target.ours))
            theirs, ours = (value or float("nan") for value in fastest)
            found["of_fastest"] = theirs / ours
        judged.append(found)
    return judged


def table(rows: Sequence[Row], judged: Sequence[Row]) -> str:
    """All rows as text, and the targets below them."""
    lines = [
        f"{'case':28} {'provider':20} {'min ms':>9} {'median':>9} {'IQR':>8} {'cpu/wall':>8} {'first s':>8} "
        f"{'MiB':>9} {'net MiB':>9} {'loss err':>9} {'grad err':>9} {'floor ms':>9} {'share':>6}"
    ]
    for row in rows:
        start = f"{row['case']:28} {row['provider']:20} "
        if "failed" in row:
            lines.append(start + row["failed"])
            continue
        times = (("wall_min_s", 9), ("wall_median_s", 9), ("wall_iqr_s", 8))
        cells = [f"{row[name] * 1e3:{width}.4g}" for name, width in times]
        cells += [f"{row['cpu_over_wall']:8.2f}" if "cpu_over_wall" in row else " " * 8, f"{row['first_s']:8.2f}"]
        cells += [f"{row[name]:9.1f}" for name in ("peak_mib", "peak_net_mib")]
        cells += [f"{row[name]:9.1e}" if name in row else " " * 9 for name in ("loss_error", "grad_error")]
        lines.append(start + " ".join([*cells, f"{row['floor_s'] * 1e3:9.4g} {row['floor_share']:6.1%}"]))
    if judged:
        lines += ["", f"{'target':72} {'bound':>9} {'measured':>9} {'fastest':>9}  ok"]
    for found in judged:
        fastest = f"{found['of_fastest']:9.3g}" if "of_fastest" in found else " " * 9
        figures = f"{found['bound']:9.3g} {found['measured']:9.3g} {fastest}"
        lines.append(f"{found['target']:72} {figures}  {'yes' if found['ok'] else 'NO'}")
    return "\n".join(lines)


def _iqr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _figure(rows: Sequence[Row], case: str, provider: str, field: str) -> float | None:
    """Of a provider, or the least among the settings of one whose name ends in `@`."""
    found = [
        row[field]
        for row in rows
        if row["case"] == case
        and field in row
        and (row["provider"].startswith(provider) if provider.endswith("@") else row["provider"] == provider)
    ]
    return min(found, default=None)
