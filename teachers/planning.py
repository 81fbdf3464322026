"""Which requests share a forward pass.

Shape legend: B rows of a pass, C columns of cached tokens, W columns of new ones.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from opd.records import ScoreRequest
from opd.teachers.kv_streams import extent

CACHED_SHARE = 4  # cached columns are copied and attended to, not computed: so many for each token of the budget
MASK_ELEMENTS = 2**27  # of a pass over cached rows; a single row may need more


def plan(requests: Sequence[ScoreRequest], variants: Sequence[Hashable], budget: int, cached: bool) -> list[list[int]]:
    """Indices of the requests, pass by pass; a request's pass comes after those of its stream's earlier requests.

    Only requests of equal `variants` [R] share a pass. `budget` is in tokens with padding; `cached` is whether the model
    keeps keys.
    """
    passes: list[list[int]] = []
    for turn in _turns(requests):
        alike: defaultdict[tuple[Hashable, bool], list[int]] = defaultdict(list)
        for i in turn:  # a pass with cached rows needs a mask, which costs the others the fastest attention
            alike[variants[i], extent(requests[i], cached)[0] > 0].append(i)
        for group in alike.values():
            group.sort(
                key=lambda i: (requests[i].token_ids.tobytes(), requests[i].context_ids.tobytes())
            )  # arrival is chance
            passes += _packed(group, {i: extent(requests[i], cached) for i in group}, budget)
    return passes


def _turns(requests: Sequence[ScoreRequest]) -> list[list[int]]:
    """The k-th requests of each stream together, for every k: a stream's appends build on one another."""
    turns: list[list[int]] = []
    seen: Counter[str] = Counter()
    for i, request in enumerate(requests):
        turn = 0
        if request.stream is not None:
            turn = seen[request.stream]
            seen[request.stream] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    return turns


def _packed(group: Sequence[int], extents: dict[int, tuple[int, int]], budget: int) -> list[list[int]]:
    """Rows of similar lengths together, longest first."""
    passes: list[list[int]] = []
    width = columns = 0
    for i in sorted(group, key=lambda i: (extents[i][1], extents[i][0]), reverse=True):
        cached, new = extents[i]
        columns = max(columns, cached)
        if not passes or not _fits(len(passes[-1]) + 1, width, columns, budget):
            passes.append([])
            width, columns = new, cached
        passes[-1].append(i)
    return passes


def _fits(rows: int, width: int, columns: int, budget: int) -> bool:
    if not columns:
        return rows * width <= budget
    whole = rows * (columns + width)
    return rows * width <= budget and whole <= CACHED_SHARE * budget and whole * width <= MASK_ELEMENTS
