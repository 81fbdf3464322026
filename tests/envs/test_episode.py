"""One rollout's way through its task: limits, restored prefixes, and what an environment may not do."""

import copy
import hashlib
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from opd.contexts import Contexts
from opd.envs.environment import Observation
from opd.envs.episode import Episode
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.records import Prompt, Start, Turn
from opd.registry import ENVIRONMENTS

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
EOS = 2
OPENING = {"role": "user", "content": "go"}


class Silent(Exception):
    """What a broken environment raises."""


@dataclass(frozen=True)
class LadderConfig:
    said: str = "text"
    """What it says: text, or something that is no plain JSON."""
    opens: str = "go"
    fails_at: int = 0
    """The turn at which it raises; 0: never."""
    outcome: str = "float"


class Ladder:
    """Counts turns in letters; a reply with an x is a mistake. The task says how many turns there are."""

    Config = LadderConfig
    single_turn, restores = False, True
    tools = ()
    max_turns = 6

    def __init__(self, config):
        self.config = config

    def tasks(self):
        return []

    def reset(self, data, seed):
        self.length, self.said = data["length"], [str(seed)]
        return [{"role": "user", "content": self.config.opens}]

    def step(self, reply):
        self.said.append(reply.content)
        number = len(self.said) - 1
        if number == self.config.fails_at:
            raise Silent("no rung here")
        if self.config.said == "exit":
            raise SystemExit(3)
        text = "abcdefgh"[number - 1] * 2
        message = {"role": "user", "content": text}
        messages = {
            "text": (message,),
            "list": [message],
            "proxy": (types.MappingProxyType(message),),
            "number": ({"role": "user", "content": 7},),
            "nan": ({**message, "rung": float("nan")},),
            "object": ({**message, "rung": object()},),
            "letters": "ab",
            "empty": (),
            "student": ({"role": "assistant", "content": "a"},),
        }.get(self.config.said, (message,))
        if self.config.said == "nothing":
            return None
        done = number == self.length
        mistake = "maybe" if self.config.said == "mistake" else np.bool_("x" in reply.content)
        return Observation(() if done else messages, done=done, mistake=mistake)  # type: ignore[arg-type]

    def outcome(self):
        known = {"float": 0.25, "int": 1, "array": np.float32(0.5), "none": None}
        return known.get(self.config.outcome, self.config.outcome)

    def state_hash(self):
        if self.config.said == "no hash":
            raise Silent("no rung here")
        if self.config.said == "number as hash":
            return 7
        return hashlib.sha256("|".join(self.said).encode()).hexdigest()


class Riddle(Ladder):
    """Takes one reply."""

    single_turn = True
    max_turns = 1


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    module = types.ModuleType("a_third_partys_ladder")
    for kind in (Ladder, Riddle):
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(ENVIRONMENTS.builtin, kind.__name__.lower(), f"{module.__name__}:{kind.__name__}")
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def contexts(micro_tokenizer):
    tokenizer = copy.deepcopy(micro_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return Contexts(tokenizer, max_context=200, max_new_tokens=20, eos_ids=(EOS,))


def prompt_of(name="ladder", length=5, most=None, context: Any = "append_only", system=(), **options):
    task = EnvironmentTask(name, {"length": length}, 3, options, context, most, name == "riddle")
    return Prompt(id="rung-0", messages=(*system, OPENING), task=task)


@pytest.fixture
def begin(contexts):
    """`begin(prompt, max_turns, max_context)`: the episode of a prompt at its beginning."""

    def build(prompt, max_turns=None, max_context=200):
        own = replace(contexts, max_context=max_context)
        opening_ids = contexts(prompt)
        return Episode(prompt, opening_ids, own, max_turns)

    return build


@pytest.fixture
def say(contexts):
    """`say(episode, text, finish)`: takes a turn of these letters; returns what the episode says of it."""

    def take(episode, text, finish: Any = "eos"):
        ids = contexts.tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled = np.array([*ids, EOS] if finish == "eos" else ids, np.int32)
        return episode.take(Turn(episode.context_ids, sampled, -np.ones(len(sampled), np.float32), finish))

    return take


@pytest.fixture
def earlier(begin, say):
    """`earlier(prompt, texts)`: the turns of an episode in which the student said this."""

    def play(prompt, texts=("k", "lx", "mmm", "n"), **options):
        episode = begin(prompt, **options)
        for text in texts:
            say(episode, text)
        return tuple(episode.turns)

    return play


def text_of(contexts, ids):
    return contexts.tokenizer.decode(ids)


# --- Turns ---


def test_what_is_seen_is_appended_and_noted(begin, say, contexts):
    episode = begin(prompt_of())
    assert say(episode, "k") is None
    assert say(episode, "lx") is None
    assert text_of(contexts, episode.context_ids) == (
        "<bos><user>go<eos><assistant>k<eos><user>aa<eos><assistant>lx<eos><user>bb<eos><assistant>"
    )
    first, second = episode.turns
    assert (first.mistake, second.mistake) == (False, True)
    assert type(first.mistake) is bool
    assert second.observations == ({"role": "user", "content": "bb"},)
    assert first.state_hash == hashlib.sha256(b"3|k").hexdigest()
    assert second.state_hash == hashlib.sha256(b"3|k|lx").hexdigest()
    assert [turn.finish for turn in episode.turns] == ["eos", "eos"]
    rollout = episode.rollout(4, "")
    assert (rollout.slot, rollout.outcome, rollout.restart, len(rollout.turns)) == (4, 0.25, "", 2)


def test_the_environment_ends_it(begin, say):
    episode = begin(prompt_of(length=2))
    assert [say(episode, text) for text in "kl"] == [None, "env"]
    assert [turn.finish for turn in episode.turns] == ["eos", "env"]
    assert episode.turns[-1].observations == ()


@pytest.mark.parametrize(
    ("most", "max_turns", "expected"),
    [
        (None, None, ("length", 4)),  # the environment's own number
        (3, None, ("length", 3)),  # the recipe's
        (3, 2, ("stopped", 2)),  # a controller's
        (3, 3, ("length", 3)),  # one that allows what the recipe does has not stopped it
        (2, 5, ("length", 2)),
        (None, 9, ("length", 4)),
    ],
)
def test_the_least_limit_ends_it_and_tells_whose_it_was(begin, say, monkeypatch, most, max_turns, expected):
    monkeypatch.setattr(Ladder, "max_turns", 4)
    episode = begin(prompt_of(length=9, most=most), max_turns)
    ends = []
    while not ends or ends[-1] is None:
        ends.append(say(episode, "k"))
    assert (ends[-1], len(episode.turns)) == expected
    assert episode.turns[-1].finish == ends[-1]
    assert episode.turns[-1].observations  # it was answered all the same


def test_a_turn_cut_at_its_limit_ends_the_episode_unanswered(begin, say):
    episode = begin(prompt_of())
    say(episode, "k")
    assert say(episode, "lm", finish="length") == "length"
    assert episode.turns[-1].finish == "length"
    assert episode.turns[-1].observations == ()
    assert episode.turns[-1].state_hash is None


def test_a_full_context_ends_it(begin, say, contexts):
    size = len(contexts(prompt_of()))
    episode = begin(prompt_of(), max_context=size + 2 + 5)  # `k`, EOS, and the five tokens behind them
    assert say(episode, "k") == "length"
    assert begin(prompt_of(), max_context=size + 2 + 6).contexts.max_context > size
    wider = begin(prompt_of(), max_context=size + 2 + 6)
    assert say(wider, "k") is None


def test_without_an_environment_there_is_one_turn(begin, say):
    for finish in ("eos", "length", "stopped"):
        episode = begin(Prompt(id="p", messages=(OPENING,)))
        assert episode.single
        assert say(episode, "k", finish) == finish
        assert len(episode.turns) == 1
        assert episode.rollout(0, "").outcome is None


def test_a_single_turn_is_answered_and_keeps_its_eos(begin, say):
    episode = begin(prompt_of("riddle", length=1))
    assert episode.single
    assert say(episode, "kx") == "eos"
    (turn,) = episode.turns
    assert turn.mistake is True
    assert turn.state_hash == hashlib.sha256(b"3|kx").hexdigest()
    assert episode.rollout(0, "").outcome == 0.25


def test_a_truncated_single_answer_is_judged(begin, say):
    episode = begin(prompt_of("riddle", length=1))
    assert say(episode, "kx", "length") == "length"
    (turn,) = episode.turns
    assert turn.finish == "length"
    assert turn.mistake is True
    assert turn.state_hash == hashlib.sha256(b"3|kx").hexdigest()


def test_one_that_a_controller_stopped_is_not(begin, say):
    """Nobody knows what would have come of it."""
    episode = begin(prompt_of("riddle", length=1))
    assert say(episode, "kx", "stopped") == "stopped"
    (turn,) = episode.turns
    assert (turn.finish, turn.mistake, turn.state_hash) == ("stopped", None, None)


# --- Restored prefixes ---


def restored(episode, turns):
    restart = episode.restore(Start(turns=turns))
    assert all(turn.num_reused == len(turn.sampled_ids) for turn in episode.turns)
    return restart, len(episode.turns)


@pytest.mark.parametrize(
    ("most", "max_turns", "expected"),
    [(None, None, 3), (6, None, 4), (3, None, 2), (4, 2, 1), (2, 4, 1), (None, 3, 2), (1, None, 0), (None, 1, 0)],
)
def test_a_prefix_leaves_a_turn_to_be_sampled(begin, earlier, monkeypatch, most, max_turns, expected):
    """Whoever limits the turns: the environment (4), the recipe or a controller."""
    turns = earlier(prompt_of(length=9))
    monkeypatch.setattr(Ladder, "max_turns", 4)
    episode = begin(prompt_of(length=9, most=most), max_turns)
    assert restored(episode, turns) == ("restored" if expected else "", expected)


def test_it_goes_on_from_there(begin, earlier, say, contexts):
    turns = earlier(prompt_of())
    episode = begin(prompt_of())
    assert restored(episode, turns[:2]) == ("restored", 2)
    assert np.array_equal(episode.context_ids, turns[2].context_ids)
    assert say(episode, "mmm") is None
    assert episode.turns[2].state_hash == turns[2].state_hash
    assert episode.turns[2].observations == turns[2].observations
    assert episode.turns[2].num_reused == 0
    assert [turn.mistake for turn in episode.turns] == [False, True, False]
    assert episode.rollout(0, "restored").restart == "restored"


def test_a_restart_counts_towards_a_controllers_limit(begin, earlier, say):
    episode = begin(prompt_of(length=9), 3)
    assert restored(episode, earlier(prompt_of(length=9))) == ("restored", 2)
    assert say(episode, "z") == "stopped"
    assert len(episode.turns) == 3


@pytest.mark.parametrize("context", ["append_only", "rerender"])
def test_contexts_of_a_restored_episode_are_those_it_had(begin, earlier, say, context):
    """Rendered again, a reply is text: what its tokens were makes no difference."""
    prompt = prompt_of(context=context)
    turns = earlier(prompt)
    episode = begin(prompt)
    assert restored(episode, turns[:3]) == ("restored", 3)
    say(episode, "n")
    for mine, other in zip(episode.turns, turns, strict=True):
        assert np.array_equal(mine.context_ids, other.context_ids)
        assert mine.state_hash == other.state_hash


def test_a_restored_conversation_is_rendered_whole(begin, earlier, contexts):
    """Each render needs the replies and the observations of all turns before it, restored ones included."""
    prompt = prompt_of(context="rerender")
    episode = begin(prompt)
    episode.restore(Start(turns=earlier(prompt)[:2]))
    assert text_of(contexts, episode.context_ids) == (
        "<bos><user>go<eos><assistant>k<eos><user>aa<eos><assistant>lx<eos><user>bb<eos><assistant>"
    )


def other_hash(turns):
    return replace(turns[1], state_hash="0" * 64)


def other_observation(turns):
    return replace(turns[1], observations=({"role": "user", "content": "zz"},))


def other_context(turns):
    return replace(turns[1], context_ids=np.append(turns[1].context_ids[:-1], np.int32(9)))


def other_reply(turns):
    return replace(turns[1], sampled_ids=turns[2].sampled_ids)


def at_its_beginning(episode, say, prompt, begin):
    """Whether the episode is as if nothing had been tried."""
    fresh = begin(prompt)
    assert episode.turns == []
    assert np.array_equal(episode.context_ids, fresh.context_ids)
    for one in (episode, fresh):
        say(one, "k")
    assert episode.turns[0].state_hash == fresh.turns[0].state_hash
    assert episode.turns[0].num_reused == 0
    assert np.array_equal(episode.context_ids, fresh.context_ids)


@pytest.mark.parametrize("context", ["append_only", "rerender"])
@pytest.mark.parametrize("changed", [other_hash, other_observation, other_context, other_reply])
def test_what_is_not_as_it_was_begins_anew(begin, earlier, say, changed, context):
    prompt = prompt_of(context=context)
    turns = earlier(prompt)
    episode = begin(prompt)
    assert episode.restore(Start(turns=(turns[0], changed(turns), turns[2]))) == "failed"
    at_its_beginning(episode, say, prompt, begin)


@pytest.mark.parametrize("length", [1, 2])
def test_an_episode_that_now_ends_inside_the_prefix_begins_anew(begin, earlier, say, length):
    prompt = prompt_of(length=length)
    episode = begin(prompt)
    assert episode.restore(Start(turns=earlier(prompt_of())[:3])) == "failed"
    at_its_beginning(episode, say, prompt, begin)


def test_an_environment_that_raises_while_it_is_restored_begins_anew(begin, earlier, say):
    prompt = prompt_of(fails_at=2)
    episode = begin(prompt)
    assert episode.restore(Start(turns=earlier(prompt_of())[:3])) == "failed"
    at_its_beginning(episode, say, prompt, begin)


def test_a_prefix_that_fills_the_context_is_too_long(begin, earlier, say):
    turns = earlier(prompt_of())
    full = len(turns[2].context_ids)
    for max_context, expected in ((full + 1, ("restored", 2)), (full, ("too long", 0))):
        episode = begin(prompt_of(), max_context=max_context)
        assert restored(episode, turns[:2]) == expected
    at_its_beginning(episode, say, prompt_of(), begin)


def test_a_prefix_without_turns(begin):
    assert restored(begin(prompt_of()), ()) == ("", 0)


def test_of_one_turn_nothing_can_be_restored(begin, earlier):
    assert restored(begin(prompt_of(), max_turns=1), earlier(prompt_of())) == ("", 0)


# --- What an environment may not do ---

BOTH = r"(?s)^(?=.*ladder)(?=.*rung-0)"


@pytest.mark.parametrize("said", ["text", "list", "proxy"])
def test_observations_are_plain(begin, say, said):
    episode = begin(prompt_of(said=said))
    assert say(episode, "k") is None
    (turn,) = episode.turns
    assert turn.observations == ({"role": "user", "content": "aa"},)
    assert type(turn.observations) is tuple
    assert type(turn.observations[0]) is dict


@pytest.mark.parametrize("said", ["number", "nan", "object"])
def test_observations_that_are_no_plain_text_are_refused(begin, say, said):
    with pytest.raises(UserError, match=BOTH):
        say(begin(prompt_of(said=said)), "k")


@pytest.mark.parametrize(("outcome", "expected"), [("int", 1.0), ("array", 0.5), ("none", None)])
def test_an_outcome_is_a_float(begin, say, outcome, expected):
    episode = begin(prompt_of(outcome=outcome))
    say(episode, "k")
    found = episode.rollout(0, "").outcome
    assert found == expected
    assert found is None or type(found) is float


def test_an_environment_that_raises_is_named(begin, say):
    episode = begin(prompt_of(fails_at=2))
    say(episode, "k")
    with pytest.raises(Exception, match=f"{BOTH}(?=.*no rung here)"):
        say(episode, "l")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("nothing", r"step\(\) must return an `Observation`, not None"),
        ("letters", "its messages must be a list of mappings"),
        ("no hash", r"failed: Silent: no rung here \(.*test_episode\.py, line"),
        ("number as hash", "its state_hash is 7; it must be text"),
        ("mistake", "its mistake is 'maybe'; it must be True, False or None"),
        ("empty", "it answers nothing and is not done"),
        ("student", "it answers as 'assistant'"),
        ("exit", "failed: SystemExit: 3"),
    ],
)
def test_an_environment_that_answers_nonsense_is_named(begin, say, said, reason):
    with pytest.raises(UserError, match=f"{BOTH}(?=.*{reason})"):
        say(begin(prompt_of(said=said)), "k")


def test_a_single_answer_needs_no_word_back(begin, say):
    assert say(begin(prompt_of("riddle", length=3, said="empty")), "k") == "eos"


def test_a_text_as_outcome_is_named(begin, say):
    episode = begin(prompt_of(outcome="won"))
    say(episode, "k")
    with pytest.raises(UserError, match=f"{BOTH}(?=.*its outcome is 'won'; it must be a number from 0 to 1)"):
        episode.rollout(0, "")


@pytest.mark.parametrize("outcome", ["nan", "-0.1", "1.5"])
def test_an_outcome_is_a_share(begin, say, outcome):
    episode = begin(prompt_of(outcome=outcome))
    say(episode, "k")
    with pytest.raises(UserError, match=f"{BOTH}(?=.*from 0 to 1)"):
        episode.rollout(0, "")


def test_a_single_answer_that_was_stopped_has_no_outcome(begin, say):
    episode = begin(prompt_of(name="riddle"))
    assert say(episode, "k", finish="stopped") == "stopped"
    assert episode.rollout(0, "").outcome is None


def test_it_must_open_as_its_prompt_does(begin):
    with pytest.raises(UserError, match=BOTH):
        begin(prompt_of(opens="away"))
    begin(prompt_of(system=({"role": "system", "content": "b"},)))  # a system message stands before its own
