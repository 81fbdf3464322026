"""Recipes: shipped ones load, mistakes are named, inheritance and overrides merge, values survive a round trip."""

import dataclasses

import pytest

from opd.config import RunConfig, build_config, load_config, to_mapping, to_yaml
from opd.data import Columns
from opd.errors import UserError
from opd.recipes import copy_recipe, find_recipe, read_recipe, shipped_recipes
from opd.strategies.reverse_kl import ReverseKLConfig
from opd.students.config import LoraConfig

BASE = """\
# A recipe of the tests
student: {model: some/student}
teachers: {default: {model: some/teacher}}
prompts: {path: some/data, columns: {prompt: problem}}
terms: {reverse_kl: {form: full}}
"""


@pytest.fixture
def recipe(tmp_path):
    """`recipe(text, name)`: a file with BASE and `text`, or with `text` alone under a name of its own."""

    def write(text: str = "", name: str | None = None) -> str:
        path = tmp_path / f"{name or 'recipe'}.yaml"
        path.write_text(text if name else BASE + text)
        return str(path)

    return write


def left_open(raw: dict, key: str = "") -> list[str]:
    """The dotted keys whose value the user must give."""
    keys = [f"{key}{name}" for name, value in raw.items() if value == "???"]
    for name, value in raw.items():
        keys += left_open(value, f"{key}{name}.") if isinstance(value, dict) else []
    return keys


@pytest.mark.parametrize(("name", "description"), list(shipped_recipes()))
def test_shipped_recipes_load(name, description):
    given = left_open(read_recipe(find_recipe(name)))
    config = load_config(name, [f"{key}=some/name" for key in given])
    assert build_config(to_mapping(config)) == config
    for key in given:
        assert key in description
        with pytest.raises(UserError, match=rf"^{key} is missing: set it in the recipe or as {key}=VALUE(, |$)"):
            load_config(name, [f"{other}=some/name" for other in given if other != key])


def test_shipped_recipes_are_described():
    assert all(description for _, description in shipped_recipes())
    assert "quickstart" in dict(shipped_recipes())


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("stepz=1", "stepz", "steps"),
        ("student.modle=x", "student.modle", "model"),
        ("student.lora.rr=1", "student.lora.rr", "r"),
        ("teachers.default.revison=x", "teachers.default.revison", "revision"),
        ("prompts.pathh=x", "prompts.pathh", "path"),
        ("prompts.columns.promt=x", "prompts.columns.promt", "prompt"),
        ("eval.prompts.columns.anwser=x", "eval.prompts.columns.anwser", "answer"),
        ("terms.reverse_kl.taill=x", "terms.reverse_kl.taill", "tail"),
        ("optimizer.learning=1", "optimizer.learning", None),
    ],
)
def test_unknown_keys_name_the_nearest(recipe, override, key, hint):
    with pytest.raises(UserError) as error:
        load_config(recipe(), [override])
    message = str(error.value)
    assert f"unknown key {key!r}" in message
    assert (f"did you mean {hint!r}?" if hint else "known: betas, eps, lr") in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("terms.reverse_kk.k=1", "terms: no term maker is called 'reverse_kk'; did you mean 'reverse_kl'?"),
        ("prompts.type=datasets", "prompts.type: no prompt source is called 'datasets'; did you mean 'dataset'?"),
        ("steps=abc", "steps: Value 'abc' of type 'str' could not be converted to Integer"),
        ("steps=1.5", "steps: Value '1.5' of type 'float' could not be converted to Integer"),
        ("batch.prompts=true", "batch.prompts: Value 'True' of type 'bool' could not be converted to Integer"),
        ("optimizer.lr=fast", "optimizer.lr: Value 'fast' of type 'str' could not be converted to Float"),
        ("student.dtype=float16", "student.dtype: Invalid value 'float16', expected one of ['float32', 'bfloat16']"),
        ("student.gradient_checkpointing=maybe", "student.gradient_checkpointing: Value 'maybe' is not a valid bool"),
        ("terms.reverse_kl.form=half", "terms.reverse_kl.form: Invalid value 'half'"),
        ("prompts.limit=all", "prompts.limit: Value 'all'"),
        ("seed=null", "seed: give a value in place of null"),
        ("teachers.default=3", "teachers.default: expected a mapping of names to values, found 3"),
        ("terms.reverse_kl=5", "terms.reverse_kl: expected a mapping of names to values, found 5"),
        ("teachers=3", "teachers: expected a mapping of names to values, found 3"),
        ("eval.prompts.split=test", "eval.prompts.path is missing: set it in the recipe or as eval.prompts.path=VALUE"),
        ("terms=[]", "terms: expected a mapping of names to values, found []"),
        ("prompts=[1]", "prompts: expected a mapping of names to values, found [1]"),
        ("student=[1]", "student: expected a mapping of names to values, found [1]"),
        ("optimizer.betas=3", "optimizer.betas: expected a list"),
        ("optimizer.betas=null", "optimizer.betas: give a value in place of null"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected 2 values, found 1"),
        ("terms.reverse_kl.form=", "terms.reverse_kl.form has no value: write terms.reverse_kl.form=VALUE, or terms.rev"),
        ("prompts.template={prompt} please", "prompts.template: {prompt} please is not YAML; put text in quotes of its own"),
        ("prompts.template=Solve: this: now", "prompts.template: Solve: this: now is not YAML; put text in quotes"),
        ("prompts.template=[x", "prompts.template: [x is not YAML; put text in quotes"),
        ("prompts.template={prompt}", "prompts.template: expected text, found a mapping; quote it if it is text"),
        ("prompts.template=[a]", "prompts.template: expected text, found a list; quote it if it is text"),
        ("prompts.template=a ${b}", "prompts.template: nothing in the recipe is called ${b}; of text write \\${ for ${"),
        ("prompts.template=a ${b", "prompts.template: a ${b holds a broken reference; of text write \\${ for ${"),
        ("optimizer.lr=.inf", "optimizer.lr is inf: it must be 0 or more, and finite"),
        ("optimizer.betas=[0.9,a]", "optimizer.betas: a value could not be converted to Float"),
        ("optimizer.lr=.nan", "optimizer.lr is nan"),
        ("seed=-1", "seed is -1"),
        ("student.dtype=bfloat16", "student.dtype: bfloat16 weights need"),
        ("steps=0", "steps is 0: it must be at least 1"),
        ("sampling.top_p=0", "sampling.top_p is 0.0: it must be above 0 and at most 1"),
        ("sampling.temperature=-1", "sampling.temperature is -1.0: it must be 0 or more"),
        ("sampling.temperature=0", "objective.temperature is 0.0: the loss needs one above 0"),
        ("objective.updates_per_batch=65", "larger than the number of rollouts in a batch"),
        ("eval.samples=2", "set eval.temperature"),
        ("terms.reverse_kl=null", "terms: name at least one of compass, "),
        ("terms.reverse_kl.beta=2", "terms.reverse_kl.beta is 2.0"),
        ("steps", "override 'steps': write it as key.sub=value"),
        ("=3", "override '=3': write it as key.sub=value"),
    ],
)
def test_mistakes_are_named(recipe, override, message):
    with pytest.raises(UserError) as error:
        load_config(recipe(), [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["student.model", "prompts.path"])
def test_missing_values_are_named(recipe, key):
    section = key.partition(".")[0]
    lines = [line for line in BASE.splitlines() if not line.startswith(section)]
    with pytest.raises(UserError, match=rf"^{key} is missing: set it in the recipe or as {key}=VALUE(, |$)"):
        load_config(recipe("\n".join(lines), "incomplete"))


@pytest.mark.parametrize(("section", "reason"), [("teachers", "terms.reverse_kl asks one"), ("terms", "name at least one")])
def test_a_recipe_needs_terms_and_the_teachers_they_ask(recipe, section, reason):
    lines = [line for line in BASE.splitlines() if not line.startswith(section)]
    with pytest.raises(UserError, match=f"^{section}: {reason}"):
        load_config(recipe("\n".join(lines), "incomplete"))


def test_overrides_and_defaults_of_fields(recipe):
    config = load_config(
        recipe("steps: 7\n"), ["optimizer.betas=[0.8,0.9]", "student.lora.r=4", "teachers.other.model=a/b", "steps=9"]
    )
    assert config.steps == 9
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.student.lora == LoraConfig(r=4)
    assert {name: teacher.model for name, teacher in config.teachers.items()} == {
        "default": "some/teacher",
        "other": "a/b",
    }
    assert config.terms == {"reverse_kl": ReverseKLConfig()}
    assert config.loss_temperature == config.sampling.temperature == 1.0
    assert load_config(recipe(), ["objective.temperature=0.5"]).loss_temperature == 0.5


def test_a_recipe_is_frozen(recipe):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(recipe()).steps = 3  # type: ignore[misc]


def test_every_value_survives_a_round_trip(recipe, tmp_path):
    config = load_config(
        recipe("trackers: {wandb: {project: p}}\n"),
        [
            "student.lora.r=4",
            "eval.prompts.path=a/b",
            "eval.samples=3",
            "eval.temperature=0.5",
            "prompts.chat_template_kwargs.enable_thinking=false",
            "teachers.default.quantization.quant_method=bitsandbytes",
            "terms.reverse_kl.form=topk",
            "optimizer.betas=[0.8,0.9]",
        ],
    )
    assert build_config(to_mapping(config)) == config
    path = tmp_path / "resolved.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert isinstance(config, RunConfig)


def test_inheritance(recipe):
    recipe(BASE + "steps: 5\nbatch: {prompts: 8, rollouts_per_prompt: 2}\n", "base")
    recipe("optimizer: {lr: 0.5}\nbatch: {prompts: 4}\n", "fast")
    config = load_config(recipe("defaults: [base, fast]\nsteps: 6\n", "child"))
    assert (config.steps, config.batch.prompts, config.batch.rollouts_per_prompt) == (6, 4, 2)
    assert config.optimizer.lr == 0.5
    assert load_config(recipe("defaults: child\nsteps: 8\n", "grandchild")).steps == 8


def test_a_shipped_recipe_can_be_inherited(recipe):
    config = load_config(recipe("defaults: quickstart\nsteps: 3\n", "mine"))
    assert config.steps == 3
    assert config.student == load_config("quickstart").student


def test_null_removes_what_is_inherited(recipe):
    parent = BASE.replace("some/student", "some/student, lora: {r: 8}") + "eval: {prompts: {path: a/b}}\n"
    assert load_config(recipe(parent, "base")).student.lora == LoraConfig(r=8)
    removed = "terms: {reverse_kl: null}\neval: {prompts: null}\nstudent: {lora: null}\n"
    child = recipe("defaults: base\n" + removed, "child")
    with pytest.raises(UserError, match=r"^terms: name at least one"):
        load_config(child)
    config = load_config(child, ["terms.reverse_kl.form=sampled"])
    assert config.terms == {"reverse_kl": ReverseKLConfig(form="sampled")}
    assert config.eval.prompts is config.student.lora is None


def test_recipes_that_inherit_in_a_circle(recipe):
    recipe("defaults: two\n", "one")
    path = recipe("defaults: one\n", "two")
    with pytest.raises(UserError, match=r"defaults: two\.yaml inherits from itself"):
        load_config(path)
    with pytest.raises(UserError, match=r"defaults: self\.yaml inherits from itself"):
        load_config(recipe("defaults: self\n", "self"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1\n", "not valid YAML"),
        (
            "steps: 1\nprompts:\n  template: Solve: {prompt}\n",
            "bad.yaml: not valid YAML in line 3, at template: mapping values",
        ),
        (
            "terms: {reverse_kl: {form: {a} b}}\n",
            "in line 1, at terms: did not find expected ',' or '}'; quote text that holds",
        ),
        ("- 1\n", "a recipe is a mapping of names to values"),
        ("steps: 1\nsteps: 2\n", "not valid YAML"),
        ("defaults: nowhere\n", "'nowhere' is neither a file nor shipped"),
    ],
)
def test_files_that_are_no_recipes(recipe, text, message):
    with pytest.raises(UserError) as error:
        load_config(recipe(text, "bad"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_other_bytes(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"bad\.yaml: "):
        load_config(path)


def test_recipes_are_found_by_name_or_path(recipe, tmp_path):
    assert find_recipe("quickstart").name == "quickstart.yaml"
    assert str(find_recipe(recipe())) == recipe()
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        find_recipe("quikstart")
    with pytest.raises(UserError, match="no such file"):
        find_recipe(tmp_path / "none.yaml")


def test_a_copy_never_overwrites(tmp_path):
    copied = copy_recipe("quickstart", tmp_path)
    assert read_recipe(copied) == read_recipe(find_recipe("quickstart"))
    with pytest.raises(UserError, match="exists: choose another name"):
        copy_recipe("quickstart", copied)
    assert copy_recipe("quickstart", tmp_path / "new" / "mine.yaml").is_file()


def test_a_section_set_to_null_is_removed(recipe):
    text = "rollout: {early_stop: {stop_below: -2.0}}\neval: {every: 3}\n"
    assert load_config(recipe(text)).rollout
    config = load_config(recipe(text), ["rollout=null", "eval=null"])
    assert not config.rollout
    assert config.eval == RunConfig().eval
    assert load_config(recipe(), ["prompts.columns=null"]).prompts["config"].columns == Columns(prompt="prompt")
    with pytest.raises(UserError, match=r"^prompts\.path: give a value in place of null"):
        load_config(recipe(), ["prompts.path=null"])
    with pytest.raises(UserError, match="unknown key 'rolout'"):
        load_config(recipe(text), ["rolout=null"])


def test_an_entry_set_to_null_is_removed(recipe):
    """Of mappings from names to values of one kind, in a recipe above another and on the command line."""
    pools = "prompts: {type: authored, pools: {a: a.jsonl, b: b.jsonl}, proportions: {a: 1, b: 2}}\n"
    base = recipe(f"defaults: recipe\n{pools}", "pools")
    recipe()
    above = "teachers: {default: null, b: {model: some/other}}\nprompts: {pools: {a: null}, proportions: {a: null}}\n"
    words = ["teachers.default=null", "teachers.b.model=some/other", "prompts.pools.a=null", "prompts.proportions.a=null"]
    for config in (load_config(recipe(f"defaults: pools\n{above}", "child")), load_config(base, words)):
        assert {name: teacher.model for name, teacher in config.teachers.items()} == {"b": "some/other"}
        source = config.prompts["config"]
        assert (source.pools, source.proportions) == ({"b": "b.jsonl"}, {"b": 2.0})
    anything = load_config(base, ["prompts.chat_template_kwargs.thinking=null"]).prompts["config"]
    assert anything.chat_template_kwargs == {"thinking": None}


def test_a_section_set_to_null_is_cleared_for_what_follows(recipe):
    base = recipe("rollout: {stride: {}}\n")
    assert list(load_config(base, ["rollout=null", "rollout.early_stop.stop_below=-1"]).rollout) == ["early_stop"]
    assert load_config(base, ["rollout.early_stop.stop_below=-1", "rollout=null"]).rollout == {}
    cleared = load_config(base, ["prompts.columns=null", "prompts.columns.answer=gold", "steps=3"])
    assert (cleared.prompts["config"].columns.prompt, cleared.prompts["config"].columns.answer) == ("prompt", "gold")
    with pytest.raises(UserError, match="leave early_stop out"):
        load_config(base, ["rollout.early_stop.stop_below=-1"])


def test_another_environment_leaves_the_options_of_the_old_one(recipe):
    text = "defaults: recipe\nprompts: {type: environment, name: calculator, context: rerender, options: {length: 4}}\n"
    recipe()
    base = recipe(text, "episodes")
    other = load_config(base, ["prompts.options.told=0.5", "prompts.name=returns_desk"]).prompts["config"]
    assert (other.name, other.options, other.context) == ("returns_desk", {"told": 0.5}, "rerender")
    same = load_config(base, ["prompts.name=calculator", "prompts.options.tasks=3"]).prompts["config"]
    assert same.options == {"length": 4, "tasks": 3}
    heldout = [f"eval.environment.{key}" for key in ("name=calculator", "options.tasks=3")]
    kept = recipe("defaults: episodes\neval: {environment: {name: returns_desk, options: {told: 1.0}}}\n", "held")
    assert load_config(kept, heldout).eval.environment.options == {"tasks": 3}  # type: ignore[union-attr]


def test_another_type_of_prompts_leaves_the_old_section(recipe):
    other = load_config(recipe(), ["prompts.type=environment", "prompts.name=calculator"]).prompts
    assert (other["type"], other["config"].name) == ("environment", "calculator")
    assert load_config(recipe(), ["prompts.type=dataset"]).prompts["config"].path == "some/data"


def test_quoted_overrides_are_text(recipe):
    for text in ("Solve: {prompt}", "{prompt} [now]", "\\frac{1}{2} {prompt}"):
        value = "'" + text + "'"
        assert load_config(recipe(), [f"prompts.template={value}"]).prompts["config"].template == text


def test_a_sweep_is_no_recipe(recipe):
    path = recipe("recipe: quickstart\nvariants: {one: {}}\n", "several")
    with pytest.raises(UserError, match=r"several\.yaml is a sweep: run opd sweep .*several\.yaml"):
        load_config(path)
