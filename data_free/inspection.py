"""What a pool of prompts is like: duplicates, overlap with suites, diversity, length. It is told and never acted upon."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.data_free.duplicates import exact_groups, near_groups
from opd.data_free.pool import Row, pool_digest
from opd.eval.answers.extract import extract_answer
from opd.eval.ngrams import distinct_ngrams, usable_tokens
from opd.eval.overlap import overlap, sharing, signed_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Problems = Sequence[tuple[str, str]]  # (id, text)
Units = Mapping[str, Sequence[Sequence[Any]]]  # the texts of a pool as words, and as tokens

FIRST_SIZE, GROWTH = 256, 4  # tokens at which u4 is told: 256, 1024, 4096, ...
SHOWN = 5  # groups of duplicates
QUARTILES = {"min": 0, "q1": 25, "median": 50, "q3": 75, "max": 100}
_SOLUTION = re.compile(
    r"""(?: ^[ \t>#*_]* | [.?!] ['")*_]* \s+ [*_]* ) (?:solution|explanation|(?:final[ ])?answer) [ \t*_]* : [*_\s]* \S
        | ^[ \t>#*_]* (?:solution|explanation) [ \t*_]* $ \s* \S""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)


def inspect_pools(
    pools: Mapping[str, Sequence[Row]],
    suites: Mapping[str, Problems],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    show: int = 0,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """The facts about each pool, as JSON holds them, by the pools' names.

    Words are runs of letters or digits, and the signs between them; with a `tokenizer`, texts are measured in its tokens
    too, and u4 in these alone. `show` prompts are drawn by `seed`, which also draws the tokens that u4 looks at.
    """
    units = {name: _units([row.text for row in rows], tokenizer) for name, rows in pools.items()}
    unit = "tokens" if tokenizer else "words"
    diversity = _diversity({name: found[unit] for name, found in units.items()}, seed)
    return {
        name: {
            "num_prompts": len(rows),
            "digest": pool_digest(rows),
            "domains": dict(Counter(row.domain for row in rows)),
            "provenance": _provenance(rows),
            "num_redrawn": sum(row.attempt > 0 for row in rows),
            "num_unusable_drafts": sum(row.attempt for row in rows),
            "exact_duplicates": _duplicates(rows, near=False),
            "near_duplicates": _duplicates(rows, near=True),
            "with_solution": [row.id for row in rows if holds_solution(row.text)],
            "overlap": {suite: _overlap(rows, problems) for suite, problems in suites.items()},
            "u4": {"unit": unit, **diversity[name]},
            "length": {"characters": _spread([len(row.text) for row in rows])}
            | {kind: _spread(list(map(len, found))) for kind, found in units[name].items()},
            "examples": _examples(rows, show, seed),
        }
        for name, rows in pools.items()
    }


def holds_solution(text: str) -> bool:
    r"""Whether a problem seems to hold its own solution.

    It does if it states a final answer, as `opd eval` would find it in a response (`\boxed{7}`, `the answer is 7`,
    `#### 7`), or if a line or sentence begins with "Solution:", "Explanation:" or "Answer:" and more follows.
    """
    return extract_answer(text) is not None or _SOLUTION.search(text) is not None


def lengths(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase | None") -> list[int]:
    """Of each prompt, in tokens; without a tokenizer in words."""
    return list(map(len, _units([row.text for row in rows], tokenizer)["tokens" if tokenizer else "words"]))


def by_domain(rows: Sequence[Row]) -> list[list[int]]:
    """The places of each domain's rows. The same text in two domains is no duplicate: another teacher scores it."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.domain, []).append(place)
    return list(places.values())


def duplicates(rows: Sequence[Row], *, near: bool) -> list[list[int]]:
    """The places of rows of one domain that say the same, exactly or nearly, in groups of two or more; the first stands
    for its group."""
    find = near_groups if near else exact_groups
    groups = []
    for places in by_domain(rows):
        groups += [[places[at] for at in group] for group in find([_whole(rows[place]) for place in places])]
    return groups


def _whole(row: Row) -> str:
    """A conversation with all that is said in it; of one user message the words alone, as where the prompt is text."""
    if isinstance(row.prompt, str) or (len(row.prompt) == 1 and row.text):
        return row.text
    return "\n".join(f"{one['role']}: {one.get('content') or one.get('tool_calls')}" for one in row.prompt)


def _duplicates(rows: Sequence[Row], *, near: bool) -> dict[str, Any]:
    groups = duplicates(rows, near=near)
    largest = sorted(groups, key=len, reverse=True)[:SHOWN]
    return {
        "num_groups": len(groups),
        "num_repeats": sum(len(group) - 1 for group in groups),  # what `filter` would drop
        "groups": [{"ids": [rows[at].id for at in group], "text": rows[group[0]].text} for group in largest],
    }


def _units(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase | None") -> Units:
    found: dict[str, Sequence[Sequence[Any]]] = {"words": [signed_words(text) for text in texts]}
    if tokenizer is not None:
        found["tokens"] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return found


def _diversity(units: Mapping[str, Sequence[Sequence[Any]]], seed: int) -> dict[str, dict[str, Any]]:
    """u4 of each pool at numbers of tokens that are the same for all; None where a pool has fewer."""
    available = {name: usable_tokens(sequences) for name, sequences in units.items()}
    common = min(filter(None, available.values()), default=0)
    sizes = {common} if common else set()
    size = FIRST_SIZE
    while size <= max(available.values(), default=0):
        sizes.add(size)
        size *= GROWTH
    return {
        name: {
            "num_units": available[name],
            "common": common,
            "at": {str(size): _number(distinct_ngrams(sequences, 4, size, seed)) for size in sorted(sizes)},
        }
        for name, sequences in units.items()
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {name: float(np.percentile(values, share)) for name, share in QUARTILES.items()}


def _overlap(rows: Sequence[Row], problems: Problems) -> dict[str, Any]:
    texts = [row.text for row in rows]
    holding = [row.id for row, shared in zip(rows, sharing(texts, problems)) if shared]
    return {**overlap(texts, problems), "prompts": holding}


def _provenance(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each different one, with the number of prompts that have it."""
    counts = Counter(json.dumps(row.provenance, sort_keys=True) for row in rows)
    return [{"num_prompts": number, "provenance": json.loads(told)} for told, number in counts.items()]


def _examples(rows: Sequence[Row], show: int, seed: int) -> list[dict[str, str]]:
    drawn = np.random.default_rng(seed).permutation(len(rows))[:show]
    return [{"id": rows[place].id, "domain": rows[place].domain, "text": rows[place].text} for place in sorted(drawn)]
