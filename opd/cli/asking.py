"""Options of the commands that put pools of prompts to models or hold them against suites, and what these options mean."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opd.cli.evaluate import Text, option
from opd.errors import UserError

if TYPE_CHECKING:
    from opd.data import DatasetConfig
    from opd.data_free.inspection import Problems
    from opd.eval.options import EvalOptions

SUITE = "A suite (opd ls suites) or FILE.jsonl with a column problem; may be repeated."
Pool = Annotated[Path, typer.Argument(metavar="POOL", help="A pool that opd prompts author or import wrote, or tiny:NAME.")]
Suites = Annotated[list[str] | None, option(SUITE)]
Seed = Annotated[int, option("Fixes what is drawn, and the sampling noise.", min=0, max=2**63 - 1)]
Temperature = Annotated[float, option("Of the sampling; 0 is greedy.", min=0.0)]
TopP = Annotated[float, option("Nucleus.", min=1e-6, max=1.0)]
Longest = Annotated[int, option("Longest answer in tokens.", min=1)]
Boxed = Annotated[Text, option("Text around a prompt; {prompt} stands for it. Default: asks for a boxed answer.")]
System = Annotated[Text, option("A system message.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], option("Type of the weights.")]
MaxRows = Annotated[int, option("Answers decoded at once; --resume samples so many anew.", min=1, max=4096)]
Url = Annotated[Text, option("A vLLM server that runs and serves the model.")]
ServedAs = Annotated[Text, option("With --url: the model's name there.")]
TokenFile = Annotated[Text, option("With --url: file with the server's bearer token.")]
MaxInFlight = Annotated[int, option("With --url: requests at once.", min=1)]
Deadline = Annotated[float, option("With --url: seconds for one answer.", min=1)]
Resume = Annotated[bool, option("Go on where the command was interrupted.", "--resume")]
Overwrite = Annotated[bool, option("Replace the file.", "--overwrite")]


def pool_file(pool: Path) -> Path:
    """The file of a pool that may be a member of the tiny family. Raises `UserError` for one that is unknown."""
    from opd.tiny import check_name, is_tiny, resolve

    if not is_tiny(str(pool)):
        return pool
    check_name(str(pool))
    return Path(resolve(str(pool)))


def refuse_without(ctx: typer.Context, names: Sequence[str], without: str) -> None:
    """Refuses those of these options that were given and do nothing without another. Raises `UserError`."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')} has no effect without {without}; leave it out")


def check_begin(given: Mapping[str, Any]) -> None:
    """Raises `UserError` where a command is to go on and to begin anew."""
    if given["resume"] and given["overwrite"]:
        raise UserError("--resume and --overwrite exclude each other")


def check_model(name: str, field: str, url_flag: str) -> None:
    """Refuses what names no model, among it the address of a server. Raises `UserError` naming `field`."""
    from opd.locate import check_location
    from opd.teachers.client.addresses import is_address

    if is_address(name):
        raise UserError(f"{field}: {name} is an address; name a model folder, and a vLLM server of it with {url_flag}")
    check_location(name, field)


def eval_options(given: Mapping[str, Any]) -> "EvalOptions":
    """How the model is sampled."""
    from opd.eval.options import EvalOptions

    names = ("samples", "temperature", "top_p", "max_new_tokens", "seed", "dtype", "max_rows", "url", "served_as")
    return EvalOptions(**{name: given[name] for name in (*names, "token_file", "max_in_flight", "deadline_s")})


def wording(given: Mapping[str, Any]) -> "DatasetConfig":
    """How a prompt is put to the model. Raises `UserError` for a template without the prompt, or with another name."""
    from opd.data import DatasetConfig
    from opd.eval.suites import BOXED
    from opd.templates import check_template

    template = given["template"] or BOXED
    if "{prompt}" not in template:
        raise UserError("--template: it must contain {prompt}, where the problem goes")
    thinking = {} if given["thinking"] is None else {"enable_thinking": given["thinking"]}
    check_template("--template", template, ("prompt",))
    return DatasetConfig("", template=template, system=given["system"], chat_template_kwargs=thinking)


def suite_problems(names: Sequence[str], folder: Path | None, field: str = "--suite") -> "dict[str, Problems]":
    """(id, text) of the problems of each suite."""
    if folder is not None and not names:
        raise UserError(f"--suite-dir has no effect without {field}; leave it out")
    if not names:
        return {}
    from opd.data import DatasetConfig
    from opd.eval.suites import load_suite

    found = {}
    for name in names:
        try:
            suite = load_suite(name, DatasetConfig(""), folder)
        except UserError as error:
            what = re.sub(r"^--suite(\.\w+)*", "", str(error))
            what = what.replace("name it with --data FILE --prompt NAME", "a suite needs one")
            raise UserError(f"{field}{what}") from None
        if suite.name in found:
            raise UserError(f"{field}: two suites are called {suite.name}; leave one out, or rename its file")
        found[suite.name] = [(problem.id, problem.problem) for problem in suite.problems if problem.problem]
    return found


@contextmanager
def interruptible() -> Iterator[None]:
    """What is sampled stays on disk."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; go on with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
