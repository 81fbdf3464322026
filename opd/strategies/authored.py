"""Prompt source `authored`: a frozen pool of prompts that a teacher wrote, repeated to fill every batch.

In DF-OPD the only data are a teacher's own problems, in DF-MOPD those of several: who wrote a problem scores the rollouts of
it. `opd prompts author` writes pools, `opd.data_free.sampler` says which of their prompts a step gets. Nothing but these
files is read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opd.data import DatasetConfig, check_options, prompt_of
from opd.data_free.pool import Row, pool_digest, read_pool
from opd.data_free.sampler import Order, PoolSampler
from opd.errors import UserError
from opd.plugins import PromptSource
from opd.records import DEFAULT_DOMAIN, Prompt
from opd.spelling import nearest
from opd.tiny import is_tiny, member_of, resolve
from opd.tiny.members import MEMBERS, Pool

Reader = Callable[[str, str], list[Row]]  # of a pool's path and the field that names it


@dataclass(frozen=True)
class AuthoredConfig:
    """Prompts that teachers wrote."""

    path: str | None = None
    """A pool. Where its rows name several domains, each is scored by the teacher of that name."""
    pools: dict[str, str] = field(default_factory=dict)
    """Instead of `path`, a pool for each domain: the key is its name and the teacher's."""
    size: int | None = None
    """The first so many prompts of each domain; null takes all."""
    proportions: dict[str, float] = field(default_factory=dict)
    """How the prompts of all batches are divided among the domains, as any positive numbers; empty divides them equally."""
    order: Order = "fixed"
    """`fixed`: one permutation again and again, so that no prompt of a domain is ever ahead of another by more than one;
    `reshuffle`: another one each time; `iid`: independent draws."""
    template: str = "{prompt}"
    """Text around the problem, such as an instruction about the form of the answer."""
    system: str | None = None
    """A system message before the problem."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`."""


class AuthoredPrompts(PromptSource):
    """See the module. Raises `UserError` for pools that cannot be read or do not fit the config."""

    Config = AuthoredConfig

    def __init__(self, config: AuthoredConfig, seed: int, read: Reader | None = None) -> None:
        rows = [row for rows in _sized(_pools(config, read or _read), config.size).values() for row in rows]
        _refuse_repeated_ids(rows)
        self.digest = pool_digest(rows)  # of what is used: a pool may have grown behind it
        kwargs = config.chat_template_kwargs
        wording = DatasetConfig("", template=config.template, system=config.system, chat_template_kwargs=kwargs)
        check_options(wording, "prompts")
        self.prompts: dict[str, list[Prompt]] = {}
        for row in rows:
            prompt = prompt_of(row.columns, row.id, wording, "prompts")
            self.prompts.setdefault(row.domain, []).append(prompt)
        sizes = {domain: len(prompts) for domain, prompts in self.prompts.items()}
        self.sampler = PoolSampler(sizes, _weights(config, list(sizes)), seed, config.order)

    @classmethod
    def preview(cls, config: AuthoredConfig, seed: int) -> "AuthoredPrompts":
        """See `opd.plugins.PromptSource.preview`. The tiny family's pools may have to be written first."""
        return cls(config, seed, _foresee)

    def known(self) -> Sequence[Prompt]:
        """See `opd.plugins.PromptSource.known`."""
        return [prompt for prompts in self.prompts.values() for prompt in prompts]

    def at(self, step: int, attempt: int, count: int) -> Sequence[Prompt]:
        """See `opd.plugins.PromptSource.at`. Another attempt has the same domain in every place."""
        sampler = self.sampler
        for domain, size in sampler.sizes.items() if sampler.order == "reshuffle" else ():
            if size < (share := count * sampler.proportions[domain]):
                raise UserError(
                    f"prompts.order: reshuffle needs a pool that fills a batch, and of {math.ceil(share)} prompts of domain "
                    f"{domain!r} a step its pool has {size}; set prompts.order=fixed"
                )
        return [self.prompts[domain][place] for domain, place in sampler.batch(step, attempt, count)]


def _pools(config: AuthoredConfig, read: Reader) -> dict[str, list[Row]]:
    """The rows of each domain, in order."""
    if (config.path is None) == (not config.pools):
        raise UserError("prompts: name one pool with prompts.path, or one for each domain with prompts.pools.DOMAIN")
    if config.path is not None:
        found: dict[str, list[Row]] = {}
        for row in read(config.path, "prompts.path"):
            found.setdefault(row.domain, []).append(row)
        return found
    return {domain: _of_domain(domain, path, read) for domain, path in config.pools.items()}


def _of_domain(domain: str, path: str, read: Reader) -> list[Row]:
    """The rows of a pool under this name, which those without one take; their ids then tell two such pools apart."""
    field = f"prompts.pools.{domain}"
    rows = read(path, field)
    for row in rows:
        if row.domain not in (domain, DEFAULT_DOMAIN):
            raise UserError(f"{field}: prompt {row.id} of {path} is of domain {row.domain!r}; name the pool by that")
    return [row if row.domain == domain else replace(row, domain=domain, id=f"{domain}/{row.id}") for row in rows]


def _read(path: str, field: str) -> list[Row]:
    if is_tiny(path):
        _tiny_pool(path, field)  # the data of other members are not pools
    return read_pool(resolve(path) if is_tiny(path) else Path(path).expanduser(), field)


def _foresee(path: str, field: str) -> list[Row]:
    """What `_read` returns but for the texts of the tiny family's pools, without writing these."""
    if not is_tiny(path):
        return _read(path, field)
    pool = _tiny_pool(path, field)
    return [Row(f"{pool.domain}-{place}", f"problem {place}", pool.domain) for place in range(pool.num_prompts)]


def _tiny_pool(path: str, field: str) -> Pool:
    pool = member_of(path)
    if not isinstance(pool, Pool):
        known = ", ".join(f"tiny:{name}" for name, member in MEMBERS.items() if isinstance(member, Pool))
        raise UserError(f"{field}: {path} is not a pool of prompts; those of the tiny family are {known}")
    return pool


def _sized(pools: Mapping[str, list[Row]], size: int | None) -> Mapping[str, list[Row]]:
    if size is None:
        return pools
    if size < 1:
        raise UserError(f"prompts.size is {size}: it must be at least 1, or null for all")
    for domain, rows in pools.items():
        if len(rows) < size:
            raise UserError(
                f"prompts.size is {size}, but domain {domain!r} has {len(rows)} prompts; lower it, or author more"
            )
    return {domain: rows[:size] for domain, rows in pools.items()}


def _weights(config: AuthoredConfig, domains: Sequence[str]) -> Mapping[str, float]:
    if not config.proportions:
        return dict.fromkeys(domains, 1.0)
    for domain in sorted(set(config.proportions) - set(domains)):
        raise UserError(f"prompts.proportions.{domain}: no pool is of this domain, leave it out{nearest(domain, domains)}")
    for domain in sorted(set(domains) - set(config.proportions)):
        there = ", ".join(sorted(domains))
        raise UserError(f"prompts.proportions.{domain} is missing: each of the pools' domains needs one; these are {there}")
    for domain, weight in config.proportions.items():
        if not 0 < weight < math.inf:
            raise UserError(f"prompts.proportions.{domain} is {weight}: it must be a positive number")
    return config.proportions


def _refuse_repeated_ids(rows: Sequence[Row]) -> None:
    """Controllers know prompts by their ids."""
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise UserError(
                f"prompts: two prompts have the id {row.id!r}; give all of them new ids with "
                "opd prompts import POOL --renumber --out NEW.jsonl, and name that file"
            )
        seen.add(row.id)
