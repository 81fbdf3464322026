"""How well and how fast answers are graded: every correct answer of the suites as it is, rewritten, and changed.

    python -m benchmarks.grading SUITES [--out benchmarks/results/grading.json]

SUITES is a folder of JSON lines with `id` and `answer`. For each answer: itself in a box, in prose between dollar signs and
as the file has it; two rewritings of the same value (`benchmarks.grading_rewritings`) and two changed values
(`benchmarks.grading_perturbations`), in turn in a box and in prose. `table` counts what `Grader` makes of them,
`math_verify` what math-verify alone does. `every_rule` is `Grader` on all rewritings and changes that apply, and `remaining`
what it gets wrong there. Last, answers a second. Prints JSON.
"""

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.grading_alone import math_verify_alone
from benchmarks.grading_perturbations import PERTURBATIONS
from benchmarks.grading_rewritings import REWRITINGS
from benchmarks.grading_text import bare, cases
from benchmarks.machine import describe
from opd.eval.grading import Grader, Item
from opd.eval.pool import WorkerPool

LIMIT_S = 5.0
BOX, PROSE, AS_WRITTEN = "So we get \\boxed{%s}.", "We add them up. The final answer is $%s$.", "The final answer is %s."


@dataclass(frozen=True)
class Case:
    """A response and whether it is right; `form` is how it was made, `rule` by which rule."""

    suite: str
    form: str
    rule: str
    answer: str
    response: str
    right: bool


def load(folder: Path) -> dict[str, list[str]]:
    """The correct answers of each suite, in the order of the files."""
    suites = {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))}
    return {name: [json.loads(line)["answer"] for line in lines] for name, lines in suites.items()}


def self_cases(suite: str, answer: str) -> list[Case]:
    """The answer itself in each form."""
    shown = {"box": BOX % answer, "prose": PROSE % bare(answer), "as written": AS_WRITTEN % answer}
    return [Case(suite, f"self, {form}", "self", answer, response, True) for form, response in shown.items()]


def changed_cases(suite: str, answer: str, turn: int, most: int | None) -> list[Case]:
    """Rewritings and perturbations of the answer: `most` of each, starting at the rule that has its turn."""
    found = []
    for form, rules in (("rewritten", REWRITINGS), ("perturbed", PERTURBATIONS)):
        made = list(cases(answer, rules).items())
        start = turn % len(made) if made else 0
        for place, (rule, text) in enumerate((made[start:] + made[:start])[:most]):
            response = (BOX if (turn + place) % 2 == 0 else PROSE) % text
            found.append(Case(suite, form, rule, answer, response, form == "rewritten"))
    return found


def all_cases(suites: dict[str, list[str]], most: int | None) -> list[Case]:
    """Every case of every answer."""
    found = []
    for suite, answers in suites.items():
        for turn, answer in enumerate(answers):
            found += self_cases(suite, answer) + changed_cases(suite, answer, turn, most)
    return found


def verdicts(found: Sequence[Case], grader: Grader) -> list[str]:
    """What our grader says of each case."""
    return [grade.verdict for grade in grader.grade_many([Item(case.response, case.answer) for case in found])]


def others_verdicts(found: Sequence[Case]) -> list[str]:
    """What math-verify says of each case, as its documentation calls it."""
    pool = WorkerPool(math_verify_alone, num_workers=2, limit_s=LIMIT_S)
    try:
        results = pool.run([(case.answer, case.response) for case in found])
    finally:
        pool.close()
    return [{True: "correct", False: "wrong", None: "timeout"}[result] for result in results]


def table(found: Sequence[Case], given: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """{suite: {form: {verdict: count}}}, with the sum over suites as "all"."""
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for case, verdict in zip(found, given, strict=True):
        for suite in (case.suite, "all"):
            counts[suite][case.form][verdict] += 1
    return {suite: {form: dict(counter) for form, counter in forms.items()} for suite, forms in counts.items()}


def failures(found: Sequence[Case], given: Sequence[str]) -> list[dict[str, str]]:
    """The cases with the wrong verdict."""
    return [
        {"suite": case.suite, "rule": case.rule, "answer": case.answer, "response": case.response, "verdict": verdict}
        for case, verdict in zip(found, given, strict=True)
        if (verdict == "correct") != case.right
    ]


def by_rule(found: Sequence[Case], given: Sequence[str]) -> dict[str, list[int]]:
    """{form: rule: [failures, cases]} of the rules that fail anywhere."""
    total = Counter(f"{case.form}: {case.rule}" for case in found)
    wrong = Counter(
        f"{c.form}: {c.rule}" for c, verdict in zip(found, given, strict=True) if (verdict == "correct") != c.right
    )
    return {name: [count, total[name]] for name, count in wrong.most_common()}


def throughput(found: Sequence[Case]) -> dict[str, Any]:
    """Answers a second of `grade_many` on two workers, cases in a random order, the workers' start included."""
    shuffled = random.Random(0).sample(list(found), len(found))
    with Grader(LIMIT_S, num_workers=2) as grader:
        started_s = time.perf_counter()
        verdicts(shuffled, grader)
        seconds = time.perf_counter() - started_s
    right = sum(case.right for case in found)
    return {
        "answers": len(found),
        "of_which_right": right,
        "seconds": round(seconds, 2),
        "per_s": round(len(found) / seconds),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", type=Path, help="folder of the suites")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--alone", action="store_true", help="without math-verify, which takes minutes")
    options = parser.parse_args(arguments)
    suites = load(options.suites)
    chosen, every = all_cases(suites, 2), all_cases(suites, None)
    result: dict[str, Any] = {"machine": describe(), "math-verify": version("math-verify")}
    result["answers"] = {name: len(answers) for name, answers in suites.items()}
    with Grader(LIMIT_S, num_workers=2) as grader:
        given = verdicts(chosen, grader)
        given_every = verdicts(every, grader)
    result["table"] = table(chosen, given)
    result["every_rule"] = {"table": table(every, given_every)["all"], "failing_rules": by_rule(every, given_every)}
    result["remaining"] = failures(every, given_every)
    result["throughput"] = {suite: throughput([c for c in chosen if c.suite == suite]) for suite in suites}
    result["throughput"]["all"] = throughput(chosen)
    if not options.alone:
        started_s = time.perf_counter()
        theirs = others_verdicts(chosen)
        seconds = time.perf_counter() - started_s
        result["math_verify"] = {"table": table(chosen, theirs), "failing_rules": by_rule(chosen, theirs)}
        result["math_verify"]["per_s"] = round(len(chosen) / seconds)
    report = json.dumps(result, indent=2, ensure_ascii=False)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
