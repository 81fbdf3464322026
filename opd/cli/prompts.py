"""`opd prompts`: prompts, and a teacher's answers to them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opd.cli import authoring, inspecting, selecting
from opd.cli.asking import check_begin, check_model, interruptible
from opd.cli.evaluate import Template, Text, Thinking, option
from opd.errors import UserError

if TYPE_CHECKING:
    from opd.records import Prompt

FLAGS = {"--data.columns.prompt": "--prompt", "--data.template": "--template"}  # of fields; all others are --data's


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Prompts: those that a teacher writes, and its answers to any.", no_args_is_help=True)
    group.command("answer")(answer)
    authoring.add_to(group)
    inspecting.add_to(group)
    selecting.add_to(group)
    app.add_typer(group, name="prompts")


def answer(
    teacher: Annotated[str, option("A model folder, a hub id, or tiny:teacher; with --url only its tokenizer is read.")],
    data: Annotated[str, option("The prompts: a file, a hub id, or tiny:prompts.")],
    out: Annotated[Path, option("The .jsonl file of the answers.")],
    prompt: Annotated[str, option("Column of the prompt: text, or a list of chat messages.")] = "problem",
    split: Annotated[str, option("Split of a hub data set.")] = "train",
    limit: Annotated[int | None, option("Only the first so many prompts.", min=1)] = None,
    template: Template = None,
    system: Annotated[Text, option("A system message.")] = None,
    thinking: Thinking = None,
    samples: Annotated[int, option("Answers a prompt.", min=1)] = 1,
    temperature: Annotated[float | None, option("Default: 0 for one sample, else 0.7.", min=0.0)] = None,
    top_p: Annotated[float, option("Nucleus.", min=1e-6, max=1.0)] = 1.0,
    top_k: Annotated[int, option("Only the k most likely tokens; 0 keeps all.", min=0)] = 0,
    presence_penalty: Annotated[float, option("As in vLLM.", min=-2.0, max=2.0)] = 0.0,
    max_new_tokens: Annotated[int, option("Longest answer in tokens; longer ones are left out.", min=1)] = 1024,
    seed: Annotated[int, option("Fixes the sampling noise.", min=0, max=2**63 - 1)] = 0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], option("Type of the weights.")] = "auto",
    max_rows: Annotated[int, option("Answers decoded at once; --resume samples so many anew.", min=1, max=4096)] = 64,
    url: Annotated[Text, option("A vLLM server that runs and serves the teacher.")] = None,
    served_as: Annotated[Text, option("With --url: the model's name there.")] = None,
    token_file: Annotated[Text, option("With --url: file with the server's bearer token.")] = None,
    max_in_flight: Annotated[int, option("With --url: requests at once.", min=1)] = 256,
    deadline_s: Annotated[float, option("With --url: seconds for one answer.", min=1)] = 3600.0,
    resume: Annotated[bool, option("Go on where the command was interrupted.", "--resume")] = False,
    overwrite: Annotated[bool, option("Replace the file.", "--overwrite")] = False,
) -> None:
    """Let a teacher answer prompts, for opd sft. Only answers that ended normally are kept.

    Beside the file lie its making (.about.json) and every completion (.samples.jsonl).
    """
    given = dict(locals())
    from opd.data_free.answer import answer_prompts
    from opd.eval.options import EvalOptions

    check_begin(given)
    check_model(teacher, "--teacher", "--url")
    numbers = ("samples", "top_p", "top_k", "presence_penalty", "max_new_tokens", "seed", "dtype", "max_rows")
    server = ("url", "served_as", "token_file", "max_in_flight", "deadline_s")
    warmth = temperature if temperature is not None else 0.0 if samples == 1 else 0.7
    options = EvalOptions(temperature=warmth, **{name: given[name] for name in (*numbers, *server)})
    about = {"template": template or "{prompt}", "system": system, "thinking": thinking}
    start = {"data": data, "resume": resume, "overwrite": overwrite, "about": about}
    with interruptible():
        facts = answer_prompts(teacher, _prompts(given), out, options, **start)
    print(json.dumps(facts))


def _prompts(given: dict[str, Any]) -> "list[Prompt]":
    """Those that the options name. Raises `UserError` in the words of the command line."""
    from opd.data import Columns, DatasetConfig, load_prompts

    style = DatasetConfig(
        given["data"],
        split=given["split"],
        columns=Columns(prompt=given["prompt"]),
        template=given["template"] or "{prompt}",
        system=given["system"],
        chat_template_kwargs={} if given["thinking"] is None else {"enable_thinking": given["thinking"]},
        limit=given["limit"],
    )
    try:
        return load_prompts(style, "--data")
    except UserError as error:
        field, colon, what = str(error).partition(":")
        if not field.startswith("--data."):
            raise
        raise UserError(f"{FLAGS.get(field, '--data')}{colon}{what}") from None
