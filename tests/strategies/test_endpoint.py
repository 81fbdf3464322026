"""Mask `endpoint`: what is reasoning, which of its tokens are masked, and what is never masked."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opd.config import build_config
from opd.contexts import Contexts
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.masking import masked
from opd.objective.batching import counted
from opd.records import Finish, Prompt, Rollout, Term, Turn
from opd.rollout_counts import counts_of, figures_of
from opd.strategies.endpoint import Endpoint, EndpointConfig, middle_steps, middle_tokens, reasoning_of
from opd.student_side import StudentSide
from opd.teachers.pool import Tally, TeacherPool
from opd.tiny.tokenizer import END_ID, build_tokenizer

TOKENIZER: Any = build_tokenizer("characters", max_tokens=256)  # `####` is a token, everything else a byte
MODELS = Tally(TeacherPool({}, student=StudentSide(Contexts(TOKENIZER, 256, 256, [END_ID]), {})))


@pytest.fixture(scope="module")
def endpoint(raw_recipe):
    """`endpoint(seed=0, **settings)`: the mask of a recipe; `sections` are further ones of the recipe."""

    def build(seed: int = 0, sections: dict[str, Any] | None = None, **settings) -> Endpoint:
        run = build_config(raw_recipe(seed=seed, masks={"endpoint": settings}, **(sections or {})))
        return Endpoint(run.masks["endpoint"], run)

    return build


@pytest.fixture(scope="module")
def raw_recipe():
    def build(**sections):
        recipe = {
            "student": {"model": "some/student"},
            "teachers": {"default": {"model": "some/teacher"}},
            "prompts": {"path": "some/data"},
            "terms": {"reverse_kl": {}},
        }
        return {**recipe, **sections}

    return build


def turn_of(text: str, finish: Finish = "eos", num_reused: int = 0) -> Turn:
    ids = TOKENIZER(text).input_ids + ([END_ID] if finish in ("eos", "env") else [])
    return Turn(
        np.array([1], np.int32), np.array(ids, np.int32), np.zeros(len(ids), np.float32), finish, num_reused=num_reused
    )


def rollout_of(*turns: Turn, name: str = "p", slot: int = 0) -> Rollout:
    return Rollout(Prompt(name), slot, turns)


def hidden(mask: Endpoint, *turns: Turn, **options) -> list[str]:
    """The masked text of each turn; `.` where a token is not masked."""
    weights = mask.weights(rollout_of(*turns, **options), MODELS)
    assert weights.dtype == np.float32
    assert set(weights.tolist()) <= {0.0, 1.0}
    texts, start = [], 0
    for turn in turns:
        ids = turn.sampled_ids.tolist()
        parts = [TOKENIZER.decode([i]) if not w else "." for i, w in zip(ids, weights[start : start + len(ids)])]
        texts.append("".join(parts))
        start += len(ids)
    return texts


def num_masked(mask: Endpoint, *turns: Turn, **options) -> int:
    return int((mask.weights(rollout_of(*turns, **options), MODELS) == 0).sum())


# --- geometry


@pytest.mark.parametrize("size", [*range(30), 99, 100, 101, 1000])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.2, 0.29, 1 / 3, 0.5, 0.99])
def test_middle_tokens_are_the_floor_and_centred(size, fraction):
    start, end = middle_tokens(size, fraction)
    exact = math.floor(round(fraction * size, 6))
    assert end - start == exact
    assert start == math.ceil((size - exact) / 2)
    assert 0 <= start <= end <= size


def test_a_tenth_of_ten_is_one_although_floating_point_has_it_otherwise():
    assert 0.29 * 100 < 29
    assert middle_tokens(100, 0.29) == (36, 65)


def by_search(sizes: list[int], fraction: float, budget: str) -> tuple[int, int]:
    """Every block of whole steps, the first and the last left out: the definition."""
    masses = sizes if budget == "token_mass" else [1] * len(sizes)
    most, total = math.floor(fraction * sum(masses) + 1e-9), sum(masses)
    blocks = [
        (-sum(masses[i:j]), abs(sum(masses[:i]) + sum(masses[:j]) - total), i, j)
        for i in range(1, len(sizes) - 1)
        for j in range(i + 1, len(sizes))
        if sum(masses[i:j]) <= most
    ]
    if not blocks:
        return 0, 0
    *_, first, last = min(blocks)
    return sum(sizes[:first]), sum(sizes[:last])


@pytest.mark.parametrize("budget", ["token_mass", "step_count"])
def test_the_middle_steps_are_those_of_an_exhaustive_search(budget):
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = rng.integers(1, rng.integers(2, 12), rng.integers(1, 15))
        fraction = float(rng.choice([0.0, 0.1, 0.2, 0.3, 0.5, 0.9]))
        start, end = middle_steps(sizes, fraction, budget)
        assert (start, end) == by_search(sizes.tolist(), fraction, budget)
        if budget == "token_mass":
            assert end - start <= fraction * sizes.sum() + 1e-9


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([5] * 10, (20, 30)),  # two of ten in the middle
        ([5] * 11, (20, 30)),  # two of eleven: as close before the middle as after it, so the earlier
        ([10, 4, 30, 6, 10], (44, 50)),  # the largest that fits, not the most central
        ([10, 6, 18, 6, 10], (10, 16)),  # equally large and equally central: the earlier
        ([10, 50, 10], (0, 0)),  # the only step is too large
        ([10, 10], (0, 0)),
        ([10], (0, 0)),
    ],
)
def test_ties_and_small_numbers_of_steps(sizes, expected):
    assert middle_steps(np.array(sizes), 0.2, "token_mass") == expected


# --- regions


def regions(text: str, region: Any = "think") -> str:
    spelled = [TOKENIZER.decode([i]).encode() for i in TOKENIZER(text).input_ids]
    inside, steps = reasoning_of(spelled, region, b"\n\n")
    assert list(steps) == sorted(steps)
    return "".join(piece.decode() for piece, there in zip(spelled, inside) if there)


@pytest.mark.parametrize(
    ("text", "think", "response"),
    [
        ("<think>abc</think>so 5", "abc", "<think>abc"),
        ("Hm<think>abc</think>so 5", "abc", "Hm<think>abc"),
        ("abc</think>so 5", "abc", "abc"),
        ("<think>abc", "abc", "<think>abc"),
        ("abc\n#### 5", "abc\n", "abc\n"),
        ("abc\nso \\boxed{5}\nbye", "abc\nbye", "abc\nbye"),
        ("<think>a \\boxed{1} b</think>c", "a \\boxed{1} b", "<think>a \\boxed{1} b"),  # not the final answer
        ("abc", "abc", "abc"),
    ],
)
def test_reasoning(text, think, response):
    assert regions(text) == think
    assert regions(text, "response") == response


def test_a_token_that_ends_a_step_belongs_to_it_and_one_that_is_partly_reasoning_does_not_count():
    spelled = [b"<thi", b"nk>a", b"b", b".\n\nc", b"d\n", b"\n", b"e", b"", b"f</", b"think>", b"g"]
    inside, steps = reasoning_of(spelled, "think", b"\n\n")
    assert inside.tolist() == [False, False, True, True, True, True, True, False, False, False, False]
    assert steps[2:7].tolist() == [0, 0, 1, 1, 2]


def test_two_delimiters_in_one_token_make_one_boundary():
    inside, steps = reasoning_of([b"a", b"\n\nb\n\n", b"c"], "think", b"\n\n")
    assert inside.all()
    assert steps.tolist() == [0, 0, 1]


# --- the mask

STEPS = "".join(f"s{i}..\n\n" for i in range(10))  # ten steps of six tokens
ANSWER = STEPS + "#### 5"


def test_two_of_ten_steps_in_the_middle(endpoint):
    assert hidden(endpoint(), turn_of(ANSWER)) == ["." * 24 + "s4..\n\ns5..\n\n" + "." * (24 + 4)]


def test_by_token_exactly_the_share_is_masked(endpoint):
    for text in ("abcdefghij", "abcdefghijklmn", "abcd", ANSWER, "<think>abcdefghijk</think>5"):
        reasoning = len(regions(text))
        for fraction in (0.0, 0.2, 0.5, 0.9):
            assert num_masked(endpoint(by="token", fraction=fraction), turn_of(text)) == math.floor(fraction * reasoning)
    assert hidden(endpoint(by="token"), turn_of("abcdefghij")) == ["....ef....."]
    assert hidden(endpoint(by="token"), turn_of("abcdefghijk")) == [".....fg....."]  # ceil(9 / 2) before them


def test_masks_are_built_on_the_sampled_ids(endpoint):
    """The same text in other tokens than the tokenizer would have made: offsets follow those that were sampled."""
    turn = turn_of(ANSWER)
    hashes = TOKENIZER.convert_tokens_to_ids("#")
    mark = TOKENIZER.convert_tokens_to_ids("####")
    ids = [token for i in turn.sampled_ids.tolist() for token in ([hashes] * 4 if i == mark else [i])]
    other = replace(turn, sampled_ids=np.array(ids, np.int32), sampler_logps=np.zeros(len(ids), np.float32))
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(turn.sampled_ids)
    for mask in (endpoint(), endpoint(by="token"), endpoint(place="tail")):
        plain, split = (mask.weights(rollout_of(one), MODELS) for one in (turn, other))
        assert split.tolist() == [*plain[:60], *[1.0] * 3, *plain[60:]]


@pytest.mark.parametrize("by", ["step", "token"])
def test_controls_mask_as_many_tokens_and_never_the_answer(endpoint, by):
    turn = turn_of(ANSWER)
    masks = {place: hidden(endpoint(by=by, place=place), turn)[0] for place in ("middle", "random", "head", "tail")}
    assert masks["head"] == "s0..\n\ns1..\n\n" + "." * 52
    assert masks["tail"] == "." * 48 + "s8..\n\ns9..\n\n" + "." * 4
    assert len(set(masks.values())) == 4
    assert {num_masked(endpoint(by=by, place=place), turn) for place in masks} == {12}


def test_random_steps_stay_together_and_random_tokens_need_not(endpoint):
    steps = {hidden(endpoint(seed, place="random"), turn_of(ANSWER))[0] for seed in range(20)}
    assert len(steps) > 10
    for text in steps:
        assert sum(f"s{i}..\n\n" in text for i in range(10)) == 2
    tokens = endpoint(by="token", place="random").weights(rollout_of(turn_of(ANSWER)), MODELS)
    assert len(np.flatnonzero(np.diff(tokens))) > 4


def test_what_is_random_follows_from_run_prompt_and_slot(endpoint):
    def drawn(seed=0, **options):
        return tuple(hidden(endpoint(seed, by="token", place="random"), turn_of(ANSWER), turn_of(ANSWER), **options))

    assert drawn() == drawn()
    assert drawn()[0] != drawn()[1]  # each turn has its own
    assert len({drawn(), drawn(seed=1), drawn(name="q"), drawn(slot=1)}) == 4


def test_random_steps_of_unlike_size_mask_exactly_as_many_tokens(endpoint):
    text = "".join(f"{'x' * size}\n\n" for size in (9, 3, 2, 7, 1, 8, 4, 6))
    middle = num_masked(endpoint(fraction=0.3), turn_of(text))
    assert middle > 0
    assert {num_masked(endpoint(seed, fraction=0.3, place="random"), turn_of(text)) for seed in range(10)} == {middle}


def test_without_a_delimiter(endpoint):
    turn = turn_of("abcdefghij")
    assert num_masked(endpoint(), turn) == 0
    assert hidden(endpoint(no_delimiter="token"), turn) == ["....ef....."]
    assert num_masked(endpoint(no_delimiter="token"), turn_of("abcd\n\nefgh")) == 0  # two steps: the ends alone
    assert num_masked(endpoint(no_delimiter="token", place="random"), turn) == 2


def test_another_delimiter_and_a_budget_of_steps(endpoint):
    text = ",".join("abcdefghij")
    assert hidden(endpoint(delimiter=","), turn_of(text)) == ["........e,.........."]  # two of nineteen, floor(3.8) = 3
    long = ",".join(["a", "b", "c", "dddddddd", "e", "f"])
    assert num_masked(endpoint(delimiter=","), turn_of(long)) == 2
    counted_steps = endpoint(delimiter=",", fraction=0.34, step_budget="step_count")
    assert hidden(counted_steps, turn_of(long)) == ["....c,dddddddd,...."]


def test_cut_off_turns(endpoint):
    turn = turn_of(STEPS, finish="length")
    assert num_masked(endpoint(), turn) == 12
    assert num_masked(endpoint(mask_truncated=False), turn) == 0
    assert num_masked(endpoint(mask_truncated=False), turn_of(STEPS)) == 12


def test_the_turn_at_which_an_episode_was_stopped_is_never_masked(endpoint):
    turns = turn_of(STEPS), turn_of(STEPS, finish="stopped")
    episode = Rollout(Prompt("e", task=EnvironmentTask("calculator", {}, 0)), 0, turns)
    for mask in (endpoint(), endpoint(by="token"), endpoint(place="random"), endpoint(place="tail")):
        assert num_masked(mask, turns[0]) > 0
        weights = mask.weights(episode, MODELS)
        assert (weights[len(turns[0].sampled_ids) :] == 1).all()
        assert (weights[: len(turns[0].sampled_ids)] == 0).sum() == 12


@pytest.mark.parametrize(("chunk", "spared"), [(1, 1), (7, 4), (16, 12), (59, 1), (60, 60), (64, 60)])
def test_of_a_single_answer_that_was_stopped_the_last_chunk_is_not_masked(endpoint, chunk, spared):
    """Of 60 tokens in chunks; the rest of the reasoning is masked as if it were all."""
    stopped = turn_of(STEPS, finish="stopped")
    rest = turn_of(STEPS[: 60 - spared], finish="length")
    for settings in ({}, {"by": "token"}, {"place": "random"}, {"place": "tail"}, {"place": "tail", "by": "token"}):
        mask = endpoint(sections={"sampler": {"chunk_tokens": chunk}}, **settings)
        weights = mask.weights(rollout_of(stopped), MODELS)
        assert (weights[60 - spared :] == 1).all()
        assert weights[: 60 - spared].tolist() == mask.weights(rollout_of(rest), MODELS).tolist()
        assert ((weights == 0).sum() > 0) == (spared < 60)


def test_chunks_are_counted_from_the_answers_beginning_whatever_is_reused(endpoint):
    mask = endpoint(by="token", sections={"sampler": {"chunk_tokens": 25}})
    assert hidden(mask, turn_of("x" * 60, "stopped", 25)) == ["." * 35 + "x" * 5 + "." * 20]  # a fifth of the second chunk
    assert num_masked(mask, turn_of("x" * 50, "stopped", 25)) == 0


def test_each_turn_of_an_episode_for_itself(endpoint):
    turns = turn_of(STEPS), turn_of("hi"), turn_of(ANSWER), turn_of(STEPS, finish="env")
    weights = endpoint().weights(rollout_of(*turns), MODELS)
    alone = [endpoint().weights(rollout_of(turn), MODELS) for turn in turns]
    assert weights.tolist() == np.concatenate(alone).tolist()
    assert [int((one == 0).sum()) for one in alone] == [12, 0, 12, 12]


def test_reused_tokens_do_not_count(endpoint):
    turn = turn_of(STEPS, num_reused=30)  # five of ten steps
    assert hidden(endpoint(), turn) == ["." * 42 + "s7..\n\n" + "." * 13]  # of the five new steps the middle one
    assert num_masked(endpoint(by="token"), turn) == 6
    whole = turn_of(STEPS, num_reused=61)
    assert num_masked(endpoint(by="token"), whole) == 0


def test_eos_is_kept_whatever_it_is_to_the_tokenizer(endpoint):
    tail = endpoint(by="token", place="tail", fraction=0.5)
    assert hidden(tail, turn_of("abcd")) == ["..cd."]
    text_eos = replace(turn_of("abcde", finish="length"), finish="eos")  # a model whose EOS is the letter e
    assert hidden(tail, text_eos) == ["..cd."]


def test_small_turns_are_left_alone(endpoint):
    turn = turn_of("abcdefghij")
    assert num_masked(endpoint(by="token", min_tokens=10), turn) == 2
    assert num_masked(endpoint(by="token", min_tokens=11), turn) == 0
    assert num_masked(endpoint(by="token", fraction=0.9), turn_of("")) == 0
    assert endpoint().weights(Rollout(Prompt("p"), 0, ()), MODELS).tolist() == []


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.999999])
def test_never_everything(endpoint, fraction):
    for place in ("middle", "random", "head", "tail"):
        for text in ("a", "ab", "abcdefghij", ANSWER):
            turn = turn_of(text, finish="length")
            assert num_masked(endpoint(by="token", place=place, fraction=fraction), turn) < len(turn.sampled_ids)


# --- beside the terms


def test_rewards_and_scores_are_those_of_the_whole_rollout(endpoint):
    """What a term holds of the rollout is untouched; only weights change, and with `live` what counts."""
    rollout = rollout_of(turn_of(ANSWER))
    reward = np.full(rollout.num_tokens, 0.7, np.float32)
    term = Term("policy_gradient", rollout.trainable, {"reward": reward})
    (kept,) = masked({"endpoint": endpoint()}, rollout, [term], MODELS)
    assert kept.inputs is term.inputs
    assert kept.mask is term.mask
    (live,) = masked({"endpoint": endpoint(normalizer="live")}, rollout, [term], MODELS)
    assert live.inputs is term.inputs
    assert (live.weight == kept.weight).all()
    assert counted(rollout, [kept]).sum() - counted(rollout, [live]).sum() == 12


def test_the_share_of_masked_tokens_is_a_metric(endpoint):
    rollout = rollout_of(turn_of(ANSWER))
    terms = [Term("policy_gradient", rollout.trainable, {}) for _ in range(2)]
    for normalizer in ("all", "live"):
        taught = masked({"endpoint": endpoint(normalizer=normalizer)}, rollout, terms, MODELS)
        figures = figures_of(counts_of(1, [(rollout, taught)], 8), steered=False)
        assert figures["masked_share"] == pytest.approx(12 / rollout.num_tokens)
    assert "masked_share" not in figures_of(counts_of(1, [(rollout, terms)], 8), steered=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "one of at most 0.2 of it; set masks.endpoint.by=token, a larger fraction, or another delimiter than '\\n\\n'"),
        ({"by": "token"}, "no reasoning is so long that 0.2 of it is a token; raise masks.endpoint.fraction"),
        ({"min_tokens": 9}, "or none has 9 tokens; set masks.endpoint.by=token"),
        ({"mask_truncated": False}, "or set masks.endpoint.mask_truncated=true"),
    ],
)
def test_it_warns_where_nothing_is_masked(endpoint, settings, said):
    text = endpoint(**settings).warning({"masked_share": 0.0})
    assert text is not None
    assert said in text
    assert endpoint(**settings).warning({"masked_share": 0.01}) is None
    assert endpoint(fraction=0.0, **settings).warning({"masked_share": 0.0}) is None


# --- configuration


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fraction": 1.0}, r"masks\.endpoint\.fraction is 1\.0: it is a share, at least 0 and below 1"),
        ({"fraction": -0.1}, r"masks\.endpoint\.fraction is -0\.1"),
        ({"fraction": float("nan")}, r"masks\.endpoint\.fraction is nan"),
        ({"delimiter": ""}, r"masks\.endpoint\.delimiter is empty"),
        ({"min_tokens": -1}, r"masks\.endpoint\.min_tokens is -1"),
        ({"by": "token", "delimiter": ","}, r"masks\.endpoint\.delimiter: has no effect with by: token"),
        ({"by": "token", "step_budget": "step_count"}, r"masks\.endpoint\.step_budget: has no effect"),
        ({"by": "token", "no_delimiter": "token"}, r"masks\.endpoint\.no_delimiter: has no effect"),
        ({"by": "word"}, r"masks\.endpoint\.by"),
        ({"fractoin": 0.2}, "did you mean 'fraction'"),
    ],
)
def test_bad_values_are_named(endpoint, settings, expected):
    with pytest.raises(UserError, match=expected):
        endpoint(**settings)


def test_a_mean_advantage_that_the_mask_would_move_is_refused(endpoint):
    sections = {"terms": {"reverse_kl": {"form": "sampled", "baseline": "mean"}}}
    with pytest.raises(UserError, match=r"terms\.reverse_kl\.baseline: the mean is taken over the tokens"):
        endpoint(sections=sections)
    assert not endpoint(sections=sections, normalizer="live").counted


def test_defaults_are_the_papers():
    config = EndpointConfig()
    assert (config.fraction, config.by, config.region, config.place) == (0.2, "step", "think", "middle")
    assert Endpoint.counted
