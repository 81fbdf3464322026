"""The facts about pools as tables, one row a pool."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opd.report.tables import Column, Table
from opd.report.text import one_line, plural

Facts = Mapping[str, Mapping[str, Any]]  # by pool, as `inspect_pools` returns them


def tables(facts: Facts) -> list[Table]:
    """All that the facts hold something for."""
    found = [_pools(facts), _provenance(facts), *_domains(facts), _diversity(facts), _lengths(facts)]
    found += [*_duplicates(facts), *_overlaps(facts), *_solvability(facts)]
    return [table for table in found if table.rows]


def _pools(facts: Facts) -> Table:
    columns = [Column("pool"), Column("prompts", "count"), Column("exact duplicates", "count")]
    columns += [Column("near duplicates", "count"), Column("with a solution", "count"), Column("drawn again", "count")]
    columns += [Column("unusable drafts", "count"), Column("digest")]
    rows = [
        [
            name,
            pool["num_prompts"],
            pool["exact_duplicates"]["num_repeats"],
            pool["near_duplicates"]["num_repeats"],
            len(pool["with_solution"]),
            pool["num_redrawn"],
            pool["num_unusable_drafts"],
            pool["digest"][:8],
        ]
        for name, pool in facts.items()
    ]
    note = "Duplicates: prompts beyond the first of a group, within a domain; near ones share four fifths of their 5-grams "
    note += "and include exact ones. With a solution: the prompt seems to state its answer. opd prompts filter leaves "
    note += "duplicates out."
    return Table("pools", "Pools", columns, rows, note)


def _provenance(facts: Facts) -> Table:
    columns = [Column("pool"), Column("prompts", "count"), Column("teacher"), Column("seed", "count"), Column("opd")]
    columns += [Column("sampling"), Column("instruction"), Column("selected")]
    rows = []
    for name, pool in facts.items():
        for part in pool["provenance"]:
            told = part["provenance"]
            teacher = told.get("teacher") or (f"imported: {told['imported']}" if "imported" in told else None)
            sampling = ", ".join(f"{key} {value}" for key, value in (told.get("sampling") or {}).items())
            selected = ", ".join(str(one.get("by")) for one in told.get("selected", ()))
            cells = [teacher, told.get("seed"), told.get("opd"), sampling or None, told.get("instruction"), selected or None]
            # of a file that another tool wrote, any of these may be a list or an object
            shown = [str(cell) if isinstance(cell, list | dict) else cell for cell in cells]
            rows.append([name, part["num_prompts"], *shown])
    return Table("provenance", "Provenance", columns, rows)


def _domains(facts: Facts) -> Iterator[Table]:
    if all(len(pool["domains"]) == 1 for pool in facts.values()):
        return
    rows = [
        [name, domain, number, number / pool["num_prompts"]]
        for name, pool in facts.items()
        for domain, number in pool["domains"].items()
    ]
    columns = [Column("pool"), Column("domain"), Column("prompts", "count"), Column("of all", "percent")]
    yield Table("domains", "Domains", columns, rows)


def _diversity(facts: Facts) -> Table:
    unit, sizes = next((pool["u4"]["unit"], list(pool["u4"]["at"])) for pool in facts.values())
    columns = [Column("pool"), Column(unit, "count"), *(Column(f"at {size}", "ratio", f"u4_at_{size}") for size in sizes)]
    rows = [[name, pool["u4"]["num_units"], *pool["u4"]["at"].values()] for name, pool in facts.items()]
    note = f"Distinct 4-grams / all 4-grams of {unit}. It falls with size: compare within a column."
    return Table("u4", "u4, distinct 4-grams", columns, rows, note)


def _lengths(facts: Facts) -> Table:
    units = next(list(pool["length"]) for pool in facts.values())
    heads = ("shortest", "lower quartile", "median", "upper quartile", "longest")
    rows = [[name, unit, *pool["length"][unit].values()] for unit in units for name, pool in facts.items()]
    kinds = ("count", "number", "number", "number", "count")  # a quartile may lie between two lengths
    columns = [Column("pool"), Column("unit"), *map(Column, heads, kinds)]
    return Table("lengths", "Length", columns, rows)


def _duplicates(facts: Facts) -> Iterator[Table]:
    for kind in ("exact", "near"):
        rows = [
            [name, len(group["ids"]), group["text"], ", ".join(group["ids"])]
            for name, pool in facts.items()
            for group in pool[f"{kind}_duplicates"]["groups"]
        ]
        columns = [Column("pool"), Column("prompts", "count"), Column("first"), Column("ids")]
        yield Table(f"{kind}-duplicates", f"{kind.capitalize()} duplicates, the largest groups", columns, rows)


def _overlaps(facts: Facts) -> Iterator[Table]:
    columns = [Column("pool"), Column("suite"), Column("problems", "count"), Column("overlapping", "count")]
    columns += [Column("of all", "percent"), Column("copies", "count"), Column("prompts that share 13 words", "count")]
    rows, examples = [], []
    for name, pool in facts.items():
        for suite, found in pool["overlap"].items():
            counts = [found[key] for key in ("num_problems", "num_overlapping", "share", "num_copies")]
            rows.append([name, suite, *counts, len(found["prompts"])])
            examples += [[name, suite, one["id"], one["copied"], one["text"]] for one in found["examples"]]
    note = "Overlapping: problems that share 13 words in a row with a prompt, or are held by one where they are shorter; "
    note += "phrases in more than 10 prompts do not count. Copies: one prompt holds half of the problem. "
    note += "The last column counts prompts, whatever phrase it is: those that opd prompts filter would leave out."
    yield Table("overlap", "Overlap with suites", columns, rows, note)
    heads = [Column("pool"), Column("suite"), Column("problem"), Column("copied", "percent"), Column("shared")]
    yield Table("overlap-examples", "Overlap with suites, the most copied problems", heads, examples)


def _solvability(facts: Facts) -> Iterator[Table]:
    asked = {name: pool["solvability"] for name, pool in facts.items() if "solvability" in pool}
    if not asked:
        return
    levels = list(next(iter(asked.values()))["histogram"])
    columns = [Column("pool"), Column("teacher"), Column("asked", "count"), Column("too long", "count")]
    columns += [Column("answered", "percent"), Column("agreement", "percent"), *(Column(level, "count") for level in levels)]
    rows = [
        [
            name,
            found["teacher"],
            found["num_asked"],
            found["num_skipped"],
            found["answered"],
            found["agreement"],
            *found["histogram"].values(),
        ]
        for name, found in asked.items()
    ]
    note = "Answered: prompts of which at least one sample states a final answer. Agreement: the mean share of a prompt's "
    note += "samples that give its most frequent answer. The last columns count prompts by that share."
    yield Table("solvability", "Does the teacher agree with itself?", columns, rows, note)


def findings(facts: Facts) -> Sequence[str]:
    """What a reader should know first, a line each."""
    lines = []
    for name, pool in facts.items():
        repeats, near = (pool[f"{kind}_duplicates"]["num_repeats"] for kind in ("exact", "near"))
        said = [plural(pool["num_prompts"], "prompt")]
        said.append(f"{repeats} exact and {plural(near - repeats, 'further near duplicate')}")
        if number := len(pool["with_solution"]):
            said.append("1 seems to hold its solution" if number == 1 else f"{number} seem to hold their solution")
        overlapping = {suite: found for suite, found in pool["overlap"].items() if found["num_overlapping"]}
        for suite, found in overlapping.items():
            said.append(f"overlaps with {found['num_overlapping']} of {found['num_problems']} problems of {suite}")
        if pool["u4"]["at"] and (value := pool["u4"]["at"].get(str(pool["u4"]["common"]))) is not None:
            said.append(f"u4 {value:.3f} at {pool['u4']['common']} {pool['u4']['unit']}")
        if solved := pool.get("solvability"):
            share, teacher = f"{100 * solved['agreement']:.0f} %", one_line(solved["teacher"], 60)
            none = f"no final answer in any sample of {teacher}, see --template and --max-new-tokens"
            said.append(f"{teacher} agrees with itself in {share} of its answers" if solved["answered"] else none)
        lines.append(f"{one_line(name, 60)}: {'; '.join(said)}.")
    return lines
