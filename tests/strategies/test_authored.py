"""Pools as prompts: their domains, sizes and proportions, and what is refused."""

from collections import Counter

import pytest

from opd.data_free.pool import Row, pool_digest, write_pool
from opd.errors import UserError
from opd.strategies.authored import AuthoredConfig, AuthoredPrompts

MATHS = [Row(f"maths-{i}", f"problem {i}", "maths") for i in range(8)]
CODE = [Row(f"code-{i}", f"program {i}", "code") for i in range(4)]
PLAIN = [Row(f"default-{i}", f"problem {i}") for i in range(8)]


@pytest.fixture
def pool(tmp_path):
    """`pool(rows, name)`: the path of a pool file."""

    def write(rows, name="pool.jsonl") -> str:
        write_pool(tmp_path / name, rows)
        return str(tmp_path / name)

    return write


def source(seed=0, **config) -> AuthoredPrompts:
    return AuthoredPrompts(AuthoredConfig(**config), seed)


def test_a_pool_becomes_prompts(pool):
    rows = [*PLAIN[:1], Row("m", [{"role": "user", "content": "chat"}], further={"answer": "4"})]
    config = {"template": "{prompt} Think.", "system": "Be brief.", "chat_template_kwargs": {"enable_thinking": False}}
    text, chat = source(path=pool(rows), **config).known()
    system = {"role": "system", "content": "Be brief."}
    assert text.messages == (system, {"role": "user", "content": "problem 0 Think."})
    assert chat.messages == (system, {"role": "user", "content": "chat Think."})
    assert (text.id, text.problem, text.domain, chat.answer) == ("default-0", "problem 0", "default", "4")
    assert text.chat_template_kwargs == {"enable_thinking": False}


def test_only_the_prompts_depend_on_the_pool(pool):
    """Steps ask for the same number of any pool; each is repeated evenly."""
    for size in (1, 3, 8):
        prompts = source(path=pool(PLAIN), size=size)
        assert [prompt.id for prompt in prompts.known()] == [f"default-{i}" for i in range(size)]
        times = Counter(prompt.id for step in range(5) for prompt in prompts.at(step, 0, 8))
        assert sum(times.values()) == 40
        assert max(times.values()) - min(times.values()) <= 1
        assert len(times) == size


def test_a_step_depends_on_nothing_before_it(pool):
    path = pool(MATHS + CODE)
    whole = [[prompt.id for prompt in source(path=path).at(step, 0, 6)] for step in range(9)]
    resumed = source(path=path)
    assert [[prompt.id for prompt in resumed.at(step, 0, 6)] for step in reversed(range(9))] == whole[::-1]
    assert whole != [[prompt.id for prompt in source(1, path=path).at(step, 0, 6)] for step in range(9)]


def test_pools_by_domain_and_proportions(pool):
    pools = {"maths": pool(MATHS, "m.jsonl"), "code": pool(CODE, "c.jsonl")}
    equal = source(pools=pools).at(3, 0, 10)
    assert Counter(prompt.domain for prompt in equal) == {"maths": 5, "code": 5}
    uneven = source(pools=pools, size=4, proportions={"maths": 1, "code": 4}).at(3, 0, 10)
    assert Counter(prompt.domain for prompt in uneven) == {"maths": 2, "code": 8}
    assert [p.id for p in source(path=pool(MATHS + CODE), size=4).known()] == [
        *(f"maths-{i}" for i in range(4)),
        *(f"code-{i}" for i in range(4)),
    ]


def test_rows_without_a_domain_take_the_key_and_stay_apart(pool):
    """The same text of two teachers is two prompts, and controllers, which know prompts by id, do not confuse them."""
    path = pool(PLAIN[:2])
    known = source(pools={"a": path, "b": path}).known()
    assert [(one.id, one.domain) for one in known] == [(f"{d}/default-{i}", d) for d in "ab" for i in range(2)]
    assert len({one.problem for one in known}) == 2


def test_the_digest_is_of_what_is_used(pool):
    first = source(path=pool(PLAIN), size=4).digest
    assert first == pool_digest(PLAIN[:4])
    assert source(path=pool(PLAIN[:5]), size=4).digest == first
    assert source(path=pool([*PLAIN[:3], Row("default-3", "other")]), size=4).digest != first
    assert source(path=pool(PLAIN), size=5).digest != first


WRONG = {
    "none": ({}, "prompts: name one pool"),
    "both": ({"path": "P", "pools": {"maths": "M"}}, "prompts: name one pool"),
    "missing": ({"path": "no.jsonl"}, "prompts.path: no such file 'no.jsonl'"),
    "another domain": ({"pools": {"code": "M"}}, "prompts.pools.code: prompt maths-0 of"),
    "too few": ({"path": "P", "size": 9}, "prompts.size is 9, but domain 'default' has 8 prompts"),
    "size": ({"path": "P", "size": 0}, "prompts.size is 0"),
    "proportions": (
        {"path": "P", "proportions": {"maths": 1.0}},
        "prompts.proportions.maths: no pool is of this domain, leave it out; known: default",
    ),
    "misspelt proportion": (
        {"pools": {"maths": "M"}, "proportions": {"math": 1.0}},
        "prompts.proportions.math: no pool is of this domain, leave it out; did you mean 'maths'?",
    ),
    "missing proportion": (
        {"pools": {"maths": "M", "other": "P"}, "proportions": {"maths": 1.0}},
        "prompts.proportions.other is missing: each of the pools' domains needs one; these are maths, other",
    ),
    "weight": ({"path": "P", "proportions": {"default": 0.0}}, "prompts.proportions.default is 0.0: it must be a positive"),
    "template": ({"path": "P", "template": "Solve."}, "prompts.template"),
    "twice": ({"path": "T"}, "prompts: two prompts have the id 'default-0'; give all of them new ids with opd"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(pool, name):
    paths = {"P": pool(PLAIN, "p.jsonl"), "M": pool(MATHS, "m.jsonl"), "T": pool(2 * PLAIN, "t.jsonl")}
    config, message = WRONG[name]
    named = {key: paths.get(value, value) if isinstance(value, str) else value for key, value in config.items()}
    if "pools" in named:
        named["pools"] = {domain: paths[path] for domain, path in named["pools"].items()}
    with pytest.raises(UserError) as refusal:
        source(**named)
    assert str(refusal.value).startswith(message)


def test_reshuffling_needs_a_pool_that_fills_a_batch(pool):
    prompts = source(path=pool(PLAIN), order="reshuffle")
    assert len(prompts.at(0, 0, 8)) == 8
    with pytest.raises(
        UserError, match=r"prompts.order: reshuffle .* of 9 prompts of domain 'default' a step its pool has 8"
    ):
        prompts.at(0, 0, 9)


ADDITION = {"addition": "tiny:addition-pool"}
WRONG_TINY = {
    "both": ({"path": "P", "pools": ADDITION}, "prompts: name one pool"),
    "no member": (
        {"path": "tiny:addition-pol"},
        "no tiny member is called 'tiny:addition-pol': did you mean tiny:addition-pool?",
    ),
    "no pool": (
        {"path": "tiny:heldout"},
        "prompts.path: tiny:heldout is not a pool of prompts; those of the tiny family are",
    ),
    "model": ({"pools": {"a": "tiny:teacher"}}, "prompts.pools.a: tiny:teacher is not a pool of prompts"),
    "another domain": (
        {"pools": {"maths": "tiny:addition-pool@1"}},
        "prompts.pools.maths: prompt addition-0 of tiny:addition-pool@1 is of domain 'addition'",
    ),
    "too few": ({"path": "tiny:addition-pool", "size": 513}, "prompts.size is 513, but domain 'addition' has 512 prompts"),
    "weight": (
        {"pools": ADDITION, "proportions": {"addition": float("inf")}},
        "prompts.proportions.addition is inf: it must be a positive number",
    ),
    "proportions": (
        {"path": "tiny:addition-pool", "proportions": {"adition": 1.0}},
        "prompts.proportions.adition: no pool is of this domain, leave it out; did you mean 'addition'?",
    ),
    "ordinary file": ({"pools": {**ADDITION, "code": "no.jsonl"}}, "prompts.pools.code: no such file 'no.jsonl'"),
    "its size": (
        {"pools": {**ADDITION, "default": "P"}, "size": 9},
        "prompts.size is 9, but domain 'default' has 8 prompts",
    ),
    "template": ({"path": "tiny:addition-pool", "template": "Solve."}, "prompts.template"),
}


@pytest.mark.parametrize("name", WRONG_TINY)
def test_a_preview_refuses_the_same_without_writing_tiny_pools(pool, name, tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    config, message = WRONG_TINY[name]
    file = pool(PLAIN)
    named = {key: file if value == "P" else value for key, value in config.items()}
    if "pools" in named:
        named["pools"] = {domain: file if path == "P" else path for domain, path in named["pools"].items()}
    with pytest.raises(UserError) as refusal:
        AuthoredPrompts.preview(AuthoredConfig(**named), 0)
    assert str(refusal.value).startswith(message)
    assert not (tmp_path / "cache").exists()


def test_a_preview_knows_domains_and_sizes(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    config = AuthoredConfig(pools={**ADDITION, "default": pool(PLAIN)}, order="reshuffle")
    prompts = AuthoredPrompts.preview(config, 0)
    assert Counter(prompt.domain for prompt in prompts.known()) == {"addition": 512, "default": 8}
    prompts.at(0, 0, 16)
    with pytest.raises(UserError, match=r"prompts.order: reshuffle .* of domain 'default'"):
        prompts.at(0, 0, 18)
    assert not (tmp_path / "cache").exists()


def test_what_is_no_tiny_pool_is_refused_in_a_run_too():
    with pytest.raises(UserError, match=r"^prompts\.path: tiny:heldout is not a pool of prompts"):
        source(path="tiny:heldout")
