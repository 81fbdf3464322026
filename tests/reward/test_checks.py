"""What the section `reward:` may hold, and what it needs of prompts and files."""

from dataclasses import replace

import pytest

from opd.cli import main
from opd.config import build_config
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.records import Prompt
from opd.reward.checks import check_answers, check_reward_files
from opd.reward.config import RewardConfig

RAW = {
    "student": {"model": "tiny:student"},
    "teachers": {"default": {"model": "tiny:teacher"}},
    "prompts": {"path": "tiny:prompts"},
    "terms": {"reverse_kl": {}},
}


def run(reward, **sections):
    """A checked recipe with this reward."""
    return build_config({**RAW, "reward": reward, "batch": {"rollouts_per_prompt": 4}, **sections})


def test_without_a_term_that_compares_it_only_counts_successes():
    assert build_config({**RAW, "reward": {}}).reward == RewardConfig()
    assert build_config({**RAW, "reward": None}).reward is None
    own = "rewards.py:judge"
    assert build_config({**RAW, "reward": {"outcome": own}}).reward == RewardConfig(outcome=own)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"length_cost": -0.1}, "reward.length_cost is -0.1: it must be 0 or more"),
        ({"length_cost": float("nan")}, "reward.length_cost is nan"),
        ({"time_limit_s": 0}, "reward.time_limit_s is 0.0: it must be above 0"),
        ({"outcome": "majorty"}, "'majorty': it must be answer, majority or FILE.py:FUNCTION; did you mean 'majority'?"),
        ({"outcom": "answer"}, "unknown key 'reward.outcom'; did you mean 'outcome'?"),
    ],
)
def test_values_that_cannot_work_are_refused(reward, message):
    with pytest.raises(UserError) as error:
        build_config({**RAW, "reward": reward})
    assert message in str(error.value)


def test_an_environment_needs_no_outcome():
    prompts = {"type": "environment", "name": "calculator"}
    assert build_config({**RAW, "prompts": prompts, "reward": {"outcome": "answer"}}).reward == RewardConfig()
    with pytest.raises(UserError, match=r"reward\.outcome: of an episode its environment says what came of it"):
        build_config({**RAW, "prompts": prompts, "reward": {"outcome": "majority"}})


@pytest.mark.parametrize("field", ["outcome", "score"])
def test_functions_are_looked_for_and_not_run(tmp_path, field):
    def naming(function: str) -> RewardConfig:
        return replace(RewardConfig(), **{field: function})

    (tmp_path / "own.py").write_text("raise RuntimeError('it was run')\ndef judge(response, answer, row): ...\n")
    (tmp_path / "folder.py").mkdir()
    check_reward_files(naming(f"{tmp_path}/own.py:judge"))
    for missing in ("other", "folder"):
        with pytest.raises(UserError, match=rf"^reward\.{field}: there is no file .*{missing}\.py"):
            check_reward_files(naming(f"{tmp_path}/{missing}.py:judge"))
    with pytest.raises(UserError, match=rf"^reward\.{field}: 'own:judge' is not of the form FILE\.py:FUNCTION"):
        check_reward_files(naming("own:judge"))
    with pytest.raises(UserError, match=rf"^reward\.{field}: .*own\.py defines no 'juge'; did you mean 'judge'\?"):
        check_reward_files(naming(f"{tmp_path}/own.py:juge"))


@pytest.mark.parametrize(
    "source",
    [
        "judge = max",
        "judge: object = max",
        "first, (judge, *rest) = 1, (2, 3)",
        "from operator import eq as judge",
        "import judge.fast",
        "from operator import *",
        "class judge: ...",
        "async def judge(): ...",
        "try:\n    import fast as judge\nexcept ImportError:\n    judge = None",
        "if (judge := max): ...",
        "def __getattr__(name): ...",
    ],
)
def test_whatever_binds_a_name_defines_it(tmp_path, source):
    (tmp_path / "own.py").write_text(source)
    check_reward_files(RewardConfig(outcome=f"{tmp_path}/own.py:judge"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", r"own\.py defines no 'judge'$"),
        ("def other():\n    judge = 1\nclass Of:\n    def judge(self): ...", r"defines no 'judge'; known: Of, other"),
        ("other = judge", r"defines no 'judge'"),
        ("x = 1\ndef judge(:", r"own\.py is not Python: .*\(own\.py, line 2\)"),
        ("judge = '\0'", "is not Python"),
        (b"judge = '\xff'", "is not Python"),
    ],
)
def test_a_file_that_does_not_bind_the_name_is_refused(tmp_path, source, message):
    (tmp_path / "own.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    with pytest.raises(UserError, match=rf"^reward\.score: .*{message}") as error:
        check_reward_files(RewardConfig(score=f"{tmp_path}/own.py:judge"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", ["validate", "train"])
def test_the_commands_look_for_the_function_before_they_load_a_model(tmp_path, monkeypatch, capsys, command):
    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("opd.training.train", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def judge(response, answer, row): ...\n")
    (tmp_path / "recipe.yaml").write_text("defaults: gate-quickstart\nreward: {outcome: own.py:juge}\n")
    monkeypatch.setattr("sys.argv", ["opd", command, "recipe.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "own.py defines no 'juge'; did you mean 'judge'?" in capsys.readouterr().err


def test_prompts_need_answers_where_these_decide():
    with_one, without = Prompt(id="a", answer="1"), Prompt(id="b")
    episode = Prompt(id="e", task=EnvironmentTask("calculator", {}, 0))
    check_answers(run({"outcome": "answer"}), [with_one, episode])
    check_answers(run({"outcome": "majority"}), [without])
    check_answers(run({"outcome": "own.py:judge"}), [without])
    check_answers(run(None), [without])
    with pytest.raises(UserError, match=r"prompt b has no answer .*; name the column .* or set reward\.outcome to m"):
        check_answers(run({"outcome": "answer"}), [with_one, without])
    told = run(None, terms={"self_distillation": {}})
    check_answers(told, [with_one])
    with pytest.raises(UserError, match=r"no answer for terms\.self_distillation; name the column of the answers$"):
        check_answers(told, [with_one, without])


def test_scores_that_nobody_reads_are_refused():
    for field, value in {"length_cost": 0.1, "score": "own.py:judge"}.items():
        with pytest.raises(UserError, match=rf"^reward\.{field}: no term of this recipe reads scores"):
            run({"outcome": "answer", field: value}, terms={"reverse_kl": {}})


def test_one_answer_has_no_majority():
    with pytest.raises(UserError, match=r"^batch\.rollouts_per_prompt is 1: "):
        build_config({**RAW, "reward": {"outcome": "majority"}})
    build_config({**RAW, "reward": {"outcome": "majority"}, "batch": {"rollouts_per_prompt": 3}})
