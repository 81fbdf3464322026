"""Which prompts of a pool a step gets: always a full batch, however small the pool, so that every size costs the same.

Of one domain with N prompts: pi is a seeded permutation of the pool, and batch s of B prompts holds pi[(s B + i) mod N] for
i < B, shuffled. So for every N each prompt comes floor(B / N) or ceil(B / N) times a batch, and over all batches so far no
prompt is ahead of another by more than one. (Fresh permutations laid end to end lack this: A B C, C B A.)

Of several domains with proportions p that sum to 1, the m-th prompt of domain d is due at time (m + 1/2) / p[d]; batches
are filled in the order of these times. Of the first n prompts domain d then has n p[d] to within 1/2 + p[d] (D - 2) / 2 for
D domains: less than 1 for two or three. All of it is exact and a pure function of the step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np

HALF = Fraction(1, 2)
Order = Literal["fixed", "reshuffle", "iid"]


@dataclass(frozen=True)
class PoolSampler:
    """`sizes`: the prompts of each domain's pool. `weights`: their proportions, any positive numbers.

    `order`: `fixed` is the rule above; `reshuffle` takes another permutation each time that a domain's pool is through;
    `iid` draws each prompt independently, the domains in the same proportions.
    """

    sizes: Mapping[str, int]
    weights: Mapping[str, float]
    seed: int
    order: Order = "fixed"

    @cached_property
    def proportions(self) -> dict[str, Fraction]:
        """Of each domain, summing to 1; 0.1 is one tenth."""
        exact = {domain: Fraction(str(self.weights[domain])) for domain in self.sizes}
        return {domain: weight / sum(exact.values()) for domain, weight in exact.items()}

    def batch(self, step: int, attempt: int, count: int) -> list[tuple[str, int]]:
        """(domain, place in its pool) of each of the `count` prompts of `step`.

        Another `attempt` permutes the pools another way, and has the same domain in every place of the batch.
        """
        due = list(islice(self._due(step * count), count))
        if self.order == "iid":
            draw = np.random.default_rng([self.seed, attempt, step, 1])
            chosen = [(domain, int(draw.integers(self.sizes[domain]))) for domain, _ in due]
        else:
            chosen = self._in_order(due, attempt)
        return [chosen[place] for place in np.random.default_rng([self.seed, step]).permutation(count)]

    def _in_order(self, due: list[tuple[str, int]], attempt: int) -> list[tuple[str, int]]:
        orders: dict[tuple[str, int], list[int]] = {}
        chosen = []
        for domain, number in due:
            epoch, place = divmod(number, self.sizes[domain])
            key = domain, epoch if self.order == "reshuffle" else 0
            if key not in orders:
                name, again = key  # the name, not its place: a further domain leaves the others' orders as they are
                rng = np.random.default_rng([self.seed, attempt, again, *name.encode()])
                orders[key] = rng.permutation(self.sizes[domain]).tolist()
            chosen.append((domain, orders[key][place]))
        return chosen

    def _due(self, start: int) -> Iterator[tuple[str, int]]:
        """(domain, how many of it came before) of all prompts in the order in which they are due, from the `start`-th on."""
        # At time t domain d has had floor(t p[d] + 1/2) prompts, in all t to within D / 2: few are left to go through.
        time = max(Fraction(0), start - HALF * len(self.sizes))
        had = {domain: int(time * share + HALF) for domain, share in self.proportions.items()}
        passed = sum(had.values())
        while True:
            domain = min(had, key=lambda name: (had[name] + HALF) / self.proportions[name])  # the first named, of a tie
            if passed >= start:
                yield domain, had[domain]
            had[domain] += 1
            passed += 1
