"""`opd prompts author | export | import`: prompts that a teacher writes, and their exchange with other toolkits."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opd.cli.asking import Overwrite, Pool, check_begin, interruptible, pool_file
from opd.cli.evaluate import Text, Thinking, option
from opd.errors import UserError

if TYPE_CHECKING:
    from opd.eval.options import EvalOptions

HERE = ("dtype", "max_rows")  # options of a model in this process
THERE = ("token_file", "max_in_flight", "deadline_s")  # of one behind a server


def add_to(group: typer.Typer) -> None:
    group.command("author")(author)
    group.command("export")(export)
    group.command("import")(import_)


def author(
    teacher: Annotated[str, option("A model folder, a hub id, tiny:NAME, or the addresses of opd serve teacher.")],
    n: Annotated[int, option("Prompts to write.", "--n", min=1)],
    out: Annotated[Path, option("The .jsonl file of the pool.")],
    domain: Annotated[Text, option("What they are about: the name of the teacher that will score them.")] = None,
    instruction: Annotated[Path | None, option("File with what the teacher is told; {domain} is filled in.")] = None,
    system: Annotated[Text, option("A system message.")] = None,
    thinking: Thinking = None,
    temperature: Annotated[float, option("Of the sampling.", min=0.0, max=100.0)] = 1.0,
    top_p: Annotated[float, option("Nucleus.", min=1e-6, max=1.0)] = 1.0,
    top_k: Annotated[int, option("Only the k most likely tokens; 0 keeps all.", min=0)] = 0,
    max_new_tokens: Annotated[int, option("Longest draft in tokens, thinking included.", min=1)] = 1024,
    max_prompt_tokens: Annotated[int, option("Longest prompt in tokens.", min=1)] = 1024,
    max_attempts: Annotated[int, option("Drafts a prompt, until one is usable.", min=1)] = 8,
    allow_short: Annotated[bool, option("Leave out prompts without a usable draft.", "--allow-short")] = False,
    seed: Annotated[int, option("Fixes the sampling noise.", min=0, max=2**63 - 1)] = 0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"] | None, option("Type of the weights. Default: auto.")] = None,
    max_rows: Annotated[int | None, option("Drafts decoded at once, always. Default: 16.", min=1, max=4096)] = None,
    url: Annotated[Text, option("A vLLM server that runs and serves the teacher.")] = None,
    served_as: Annotated[Text, option("With --url: the model's name there.")] = None,
    token_file: Annotated[Text, option("With a server: file with its bearer token.")] = None,
    max_in_flight: Annotated[int | None, option("With a server: requests at once. Default: 256.", min=1)] = None,
    deadline_s: Annotated[float | None, option("With a server: seconds for one draft. Default: 3600.", min=1)] = None,
    resume: Annotated[bool, option("Go on where the command was interrupted, or write more.", "--resume")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Let a teacher write prompts, from an instruction alone. Only drafts that cannot be used are drawn again.

    The file appears when it is whole; beside it lie the drafts (.drafts.jsonl), from which --resume goes on.
    """
    given = dict(locals())
    options = _options(given)  # before torch is loaded
    template = None if instruction is None else _text(instruction)

    from opd.data_free.author import Request, author_prompts, instruction_text
    from opd.records import DEFAULT_DOMAIN

    asked = {name: given[name] for name in ("system", "thinking", "max_prompt_tokens", "max_attempts", "allow_short")}
    request = Request(teacher, n, options, instruction_text(template, domain), domain or DEFAULT_DOMAIN, **asked)
    with interruptible():
        facts = author_prompts(request, out, source=instruction, resume=resume, overwrite=overwrite)
    print(json.dumps(facts))


def export(
    pool: Pool,
    out: Annotated[Path, option("The .jsonl file to write.")],
    to: Annotated[Literal["trl", "jsonl"], option("TRL's conversational prompts, or plain problems.", "--format")] = "trl",
    overwrite: Overwrite = False,
) -> None:
    """Write a pool's prompts for other toolkits."""
    from opd.data_free.exchange import export_pool

    print(json.dumps(export_pool(pool_file(pool), out, to, overwrite=overwrite)))


def import_(
    file: Annotated[Path, typer.Argument(help="JSON lines: prompts as TRL has them, or text.", show_default=False)],
    out: Annotated[Path, option("The .jsonl file of the pool.")],
    prompt: Annotated[Text, option("Column of the prompt. Default: prompt or problem, whichever is there.")] = None,
    domain: Annotated[Text, option("Domain of all rows. Default: their own, else default.")] = None,
    renumber: Annotated[bool, option("New ids, DOMAIN-0 and so on, as for joined pools.", "--renumber")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make a pool of prompts from elsewhere, or of pools that were joined."""
    _check_domain(domain)
    from opd.data_free.exchange import import_pool

    facts = import_pool(file, out, column=prompt, domain=domain, renumber=renumber, overwrite=overwrite)
    print(json.dumps(facts))


def _options(given: dict[str, Any]) -> "EvalOptions":
    """How the teacher samples, and where. Raises `UserError` for options that cannot work or have no effect."""
    from opd.eval.options import EvalOptions
    from opd.locate import check_location
    from opd.teachers.client.addresses import check_addresses, is_address
    from opd.teachers.config import FrozenConfig

    check_begin(given)
    if given["temperature"] == 0:
        raise UserError("--temperature is 0: every prompt would be the same; set it above 0")
    _check_domain(given["domain"])
    teacher, url = given["teacher"], given["url"]
    if is_address(teacher):
        if url is not None or given["served_as"] is not None:
            raise UserError("--url and --served-as are of vLLM; with the address of opd serve teacher leave them out")
        check_addresses(FrozenConfig(url=teacher).urls, "--teacher")
        url = teacher
    else:
        check_location(teacher, "--teacher")
    for name in THERE if url is None else HERE:
        if given[name] is not None:
            where = "in this process" if url is None else "on a server"
            raise UserError(f"--{name.replace('_', '-')} has no effect on a teacher {where}; leave it out")
    names = ("temperature", "top_p", "top_k", "max_new_tokens", "seed", "served_as", *HERE, *THERE)
    chosen = {"max_rows": 16, **{name: given[name] for name in names if given[name] is not None}}
    return EvalOptions(url=url, **chosen)


def _check_domain(domain: str | None) -> None:
    from opd.data_free.pool import check_domain

    if domain is not None:
        check_domain(domain, "--domain")


def _text(instruction: Path) -> str:
    """What the file says. Raises `UserError`."""
    try:
        return instruction.expanduser().read_text("utf-8")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--instruction: {instruction} cannot be read: {why}") from None
