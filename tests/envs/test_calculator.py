import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.envs.calculator import Calculator, CalculatorConfig
from opd.episodes import Reply, ToolCall
from opd.errors import UserError

DATA = {"start": 7, "steps": ["+5", "*3", "-9"]}  # 7+5 = 2, 2*3 = 6, 6-9 = 7
CHAIN = ["7+5", "2*3", "6-9"]


def call(*expressions: str, name: str = "calculator") -> Reply:
    return Reply("", tuple(ToolCall(name, {"expression": expression}) for expression in expressions))


def begun(length: int = 3, **options) -> Calculator:
    environment = Calculator(CalculatorConfig(length=length, **options))
    environment.reset(DATA, seed=0)
    return environment


def played(replies) -> tuple[Calculator, list[str], list[str]]:
    """The environment after the replies, its state hashes, and the first of the messages that answered each reply."""
    environment = begun()
    hashes, answers = [environment.state_hash()], []
    for reply in replies:
        messages = environment.step(reply).messages
        hashes.append(environment.state_hash())
        answers.append(messages[0]["content"] if messages else "")
    return environment, hashes, answers


RIGHT = [*(call(expression) for expression in CHAIN), Reply("7")]


def test_an_episode_without_a_mistake():
    environment = begun()
    seen = [environment.step(reply) for reply in RIGHT]
    assert [observation.messages for observation in seen[:3]] == [({"role": "tool", "content": r},) for r in "267"]
    assert [observation.done for observation in seen] == [False, False, False, True]
    assert not any(observation.mistake for observation in seen)
    assert seen[-1].messages == ()
    assert environment.outcome() == 1.0


def test_the_opening_message_is_the_chain():
    environment = begun()
    assert environment.reset(DATA, seed=0) == [{"role": "user", "content": "7+5*3-9"}]
    told = begun(instruction="{braces} Compute {steps}, digit by digit.")
    assert told.reset(DATA, seed=0)[0]["content"] == "{braces} Compute 7+5*3-9, digit by digit."


@pytest.mark.parametrize("answer", ["8", "", "7.", "the answer is 7", "77"])
def test_another_answer_is_a_mistake_and_no_success(answer):
    environment, *_ = played(RIGHT[:3])
    seen = environment.step(Reply(answer))
    assert (seen.done, seen.mistake, environment.outcome()) == (True, True, 0.0)


def test_an_early_answer_that_is_right_is_a_success():
    environment = begun()
    seen = environment.step(Reply(" 7\n"))
    assert (seen.done, seen.mistake, environment.outcome()) == (True, False, 1.0)


def test_what_comes_after_the_answer_changes_nothing():
    environment, hashes, _ = played(RIGHT)
    assert environment.step(call("1+1")).done
    assert (environment.state_hash(), environment.outcome()) == (hashes[-1], 1.0)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("9+9", "8"), ("0-1", "9"), ("9*7", "3"), (" 7 + 5\n", "2"), ("2*0", "0")],
)
def test_the_tool_computes_modulo_10(expression, result):
    assert begun().step(call(expression)).messages[0]["content"] == result


def test_only_the_next_operation_of_the_true_chain_is_no_mistake():
    environment = begun()
    mistakes = [environment.step(call(e)).mistake for e in ("7+5", "2*7", "4-9", "7+5", "2*3", " 6 - 9 ", "7+5")]
    assert mistakes == [False, True, True, True, False, False, True]
    assert environment.outcome() == 0.0
    assert environment.step(Reply("7")).mistake is False
    assert environment.outcome() == 1.0


def test_several_calls_in_one_reply_are_answered_in_order():
    environment = begun()
    seen = environment.step(call("7+5", "2*3"))
    assert ([message["content"] for message in seen.messages], seen.mistake) == (["2", "6"], False)
    seen = environment.step(call("6-9", "oops"))
    assert ([message["content"] for message in seen.messages], seen.mistake) == (["7", "error"], True)


BROKEN = [
    Reply("<|call|>7+", error="an unclosed call"),
    call("7+5", name="python"),
    *(call(expression) for expression in ("", "7", "7+", "7+5+1", "12+1", "7/5", "7+5=2", "७+५", "7 5")),
    Reply("", (ToolCall("calculator", {}),)),
    Reply("", (ToolCall("calculator", {"expression": 12}),)),
    Reply("", (ToolCall("calculator", {"expression": ["7+5"]}),)),
]


@pytest.mark.parametrize("reply", BROKEN)
def test_a_broken_call_gets_an_error_and_the_episode_goes_on(reply):
    environment = begun()
    seen = environment.step(reply)
    assert seen.messages == ({"role": "tool", "content": "error"},)
    assert (seen.done, seen.mistake) == (False, True)
    assert [environment.step(right).mistake for right in RIGHT] == [False] * 4
    assert environment.outcome() == 1.0


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.text(max_size=3), max_size=2))
EXPRESSIONS = st.sampled_from([*CHAIN, "7+4", "2*7", "6-8"]) | st.text("0123456789+-* ", max_size=5) | VALUES
CALLS = st.builds(
    ToolCall,
    st.sampled_from(["calculator"] * 5 + ["python"]),
    st.fixed_dictionaries({}, optional={"expression": EXPRESSIONS, "other": VALUES}),
)
REPLIES = st.one_of(
    *[st.builds(Reply, st.just(""), st.lists(CALLS, min_size=1, max_size=2).map(tuple))] * 3,
    st.builds(Reply, st.text(max_size=4) | st.just("7")),
    st.builds(Reply, st.text(max_size=4), error=st.text(max_size=4)),
)


@given(st.lists(REPLIES, max_size=6))
def test_any_replies_are_answered_and_replayed_alike(replies):
    environment, hashes, answers = played(replies)
    again, same_hashes, same_answers = played(replies)
    assert (hashes, answers, environment.outcome()) == (same_hashes, same_answers, again.outcome())
    assert environment.outcome() in (0.0, 1.0)
    ended = next((i for i, reply in enumerate(replies) if not reply.calls and reply.error is None), len(replies) - 1)
    assert len(set(hashes)) == ended + 2  # every reply up to the end changes the state, and none after it


@given(st.lists(REPLIES, min_size=1, max_size=4), st.lists(REPLIES, min_size=1, max_size=4))
def test_states_that_differ_have_different_hashes(one, other):
    """Two states are one when they cannot be told apart from what was called and answered so far."""
    (first, *_), (second, *_) = played(one), played(other)
    assert (first.state_hash() == second.state_hash()) == (first.history == second.history)


def test_the_hash_names_the_task_and_is_that_of_a_fresh_start_after_a_reset():
    environment = begun()
    fresh = environment.state_hash()
    environment.step(RIGHT[0])
    environment.reset(DATA, seed=0)
    assert environment.state_hash() == fresh
    environment.reset({**DATA, "start": 8}, seed=0)
    assert environment.state_hash() != fresh
    int(fresh, 16)


def test_calls_with_the_same_result_lead_to_different_states():
    (one, *_), (other, *_) = played([call("7+5")]), played([call("6+6")])
    assert one.state_hash() != other.state_hash()


def test_tasks_are_the_same_each_time_and_of_more_tasks_the_first_are_the_same():
    tasks = Calculator(CalculatorConfig(tasks=40)).tasks()
    assert tasks == Calculator(CalculatorConfig(tasks=60)).tasks()[:40]
    assert len({task.id for task in tasks}) == len({json.dumps(task.data) for task in tasks}) == 40
    assert [task.id for task in tasks[:2]] == ["calculator-0-0", "calculator-0-1"]
    assert [task.seed for task in tasks] == list(range(40))
    assert all(len(task.data["steps"]) == 10 for task in tasks)
    other = Calculator(CalculatorConfig(tasks=40, seed=1)).tasks()
    assert not {task.id for task in tasks} & {task.id for task in other}
    assert tasks[0].data != other[0].data


def test_tasks_never_change():
    (task,) = Calculator(CalculatorConfig(tasks=1)).tasks()
    assert task.data == {"start": 1, "steps": ["-4", "*3", "-9", "+1", "+2", "+8", "+5", "*9", "+1", "-3"]}


def test_results_are_spread_over_all_digits():
    """So chance is 10 %, for the answer as for each result on the way."""
    environment = Calculator(CalculatorConfig(tasks=2000))
    answers, results = Counter(), Counter()
    for task in environment.tasks():
        environment.reset(task.data, task.seed or 0)
        answers[environment.value] += 1
        results.update(expression[0] for expression in environment.calls)
    for counts in (answers, results):
        assert set(counts) == set("0123456789")
        assert max(counts.values()) / sum(counts.values()) < 0.125
        assert min(counts.values()) / sum(counts.values()) > 0.075


@pytest.mark.parametrize(
    ("field", "value"), [("tasks", 0), ("length", 0), ("length", -1), ("instruction", "Compute {step}.")]
)
def test_an_option_that_cannot_work_is_refused(field, value):
    with pytest.raises(UserError, match=rf"prompts\.options\.{field}"):
        Calculator(CalculatorConfig(**{field: value}))


def test_there_is_a_turn_for_each_operation_one_for_the_answer_and_a_few_to_spare():
    assert Calculator(CalculatorConfig(length=8)).max_turns == 11
    assert (Calculator.restores, Calculator.single_turn) == (True, False)


def test_the_tool_has_a_json_schema():
    (tool,) = Calculator.tools
    assert tool["function"]["name"] == "calculator"
    assert tool["function"]["parameters"]["required"] == ["expression"]
    assert json.loads(json.dumps(tool)) == tool


def test_it_imports_no_torch():
    code = "import sys, opd.envs.calculator\nprint({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
