"""`opd prompts inspect`: what pools of prompts are like."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opd.cli.asking import (
    Boxed,
    Deadline,
    Dtype,
    Longest,
    MaxInFlight,
    MaxRows,
    Overwrite,
    Resume,
    Seed,
    ServedAs,
    Suites,
    System,
    Temperature,
    TokenFile,
    TopP,
    Url,
    check_begin,
    check_model,
    eval_options,
    interruptible,
    pool_file,
    refuse_without,
    suite_problems,
    wording,
)
from opd.cli.evaluate import SuiteDir, Text, Thinking, option
from opd.errors import UserError

if TYPE_CHECKING:
    from opd.data_free.pool import Row

Pools = Annotated[list[Path], typer.Argument(metavar="POOL...", help="Pools, compared at equal numbers of tokens.")]
ANSWERING = ("samples", "temperature", "top_p", "max_new_tokens", "template", "system", "thinking", "dtype", "max_rows")
ANSWERING += ("url", "served_as", "token_file", "max_in_flight", "deadline_s", "resume")


def add_to(group: typer.Typer) -> None:
    group.command("inspect")(inspect)


def inspect(
    ctx: typer.Context,
    pools: Pools,
    suite: Suites = None,
    suite_dir: SuiteDir = None,
    tokenizer: Annotated[Text, option("Measure in this model's tokens, not in words.")] = None,
    show: Annotated[int, option("So many prompts of each pool, drawn at random.", min=0)] = 0,
    out: Annotated[Path | None, option("Write one HTML page too.")] = None,
    as_json: Annotated[bool, option("Print one JSON object instead of tables.", "--json")] = False,
    seed: Seed = 0,
    teacher: Annotated[Text, option("Let this model answer each prompt: does it agree with itself? Needs --out.")] = None,
    samples: Annotated[int, option("With --teacher: answers a prompt.", min=2)] = 4,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    max_new_tokens: Longest = 1024,
    template: Boxed = None,
    system: System = None,
    thinking: Thinking = None,
    dtype: Dtype = "auto",
    max_rows: MaxRows = 64,
    url: Url = None,
    served_as: ServedAs = None,
    token_file: TokenFile = None,
    max_in_flight: MaxInFlight = 256,
    deadline_s: Deadline = 3600.0,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Tell what pools are like: duplicates, overlap with suites, u4, lengths, solutions inside. Nothing is left out."""
    given = dict(locals())
    if teacher is None:
        refuse_without(ctx, ANSWERING, "--teacher")
    elif url is None:
        refuse_without(ctx, ("max_in_flight", "deadline_s"), "--url")
    _check(given)
    from opd.data_free.inspection import inspect_pools, lengths

    rows = _read(pools)
    problems = suite_problems(suite or (), suite_dir)
    model = _tokenizer(tokenizer)
    facts = inspect_pools(rows, problems, model, show=show, seed=seed)
    if teacher is not None:
        _answer(facts, rows, given)
    if out is not None:
        measured = {name: lengths(found, model) for name, found in rows.items()}
        _write_page(out, facts, measured, "tokens" if model else "words")
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        _print(facts)


def _check(given: Mapping[str, Any]) -> None:
    """Looks at the teacher, at --out and at what lies beside it before anything is loaded."""
    check_begin(given)
    out, teacher = given["out"], given["teacher"]
    if teacher is not None:
        check_model(teacher, "--teacher", "--url")
        eval_options(given)
        wording(given)
    if out is None:
        if teacher is not None:
            raise UserError("--out is missing: name an .html file; the teacher's answers are kept beside it, for --resume")
        if given["overwrite"]:
            raise UserError("--overwrite has no effect without --out; leave it out")
        return
    if out.suffix != ".html" or out.is_dir():
        raise UserError(f"--out: {out}{' is a folder' if out.is_dir() else ''}: name a file that ends in .html")
    for file in (out, *(_samples(out, number) for number in range(len(given["pools"])))):
        if file.exists() and any(pool.exists() and pool.samefile(file) for pool in given["pools"]):
            raise UserError(f"--out: {file} is a pool that is read and would be overwritten; name another file")
    if out.exists() and not (given["overwrite"] or given["resume"]):
        raise UserError(f"--out: {out} exists; replace it with --overwrite, or name another file")
    try:
        import opd.data_free.inspection_page  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"--out: the page needs {error.name}: pip install 'opd[report]', or leave it out") from None


def _samples(out: Path, number: int) -> Path:
    """Where the answers to the prompts of the pool with this number are kept."""
    return out.with_suffix(f".{number + 1}.samples.jsonl")


def _read(pools: Sequence[Path]) -> "dict[str, list[Row]]":
    """The rows by the names that tables give the pools: those of the files, with the folder where two have one name."""
    from opd.data_free.pool import read_pool

    stems = Counter(pool.stem for pool in pools)
    names = [pool.stem if stems[pool.stem] == 1 else str(pool) for pool in pools]
    if len(set(names)) < len(names):
        raise UserError(f"POOL: {next(name for name in names if names.count(name) > 1)} is given twice; leave one out")
    return {name: read_pool(pool_file(pool), "POOL") for name, pool in zip(names, pools)}


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from opd.locate import check_location
    from opd.tokenization import load_tokenizer

    check_location(name, "--tokenizer")
    return load_tokenizer(name, "--tokenizer")


def _answer(facts: dict[str, Any], rows: "Mapping[str, Sequence[Row]]", given: Mapping[str, Any]) -> None:
    """Adds to the facts about each pool what the teacher answers."""
    from opd.data_free.agreement import pool_prompts, solvability

    options, style = eval_options(given), wording(given)
    begin = {"resume": given["resume"], "overwrite": given["overwrite"]}
    with interruptible():
        for number, (name, found) in enumerate(rows.items()):
            file = _samples(given["out"], number)
            prompts = pool_prompts(found, style, "POOL")
            facts[name]["solvability"] = solvability(given["teacher"], prompts, file, options, begin, f"POOL {name}")


def _write_page(out: Path, facts: Mapping[str, Any], lengths: Mapping[str, Sequence[int]], unit: str) -> None:
    from opd.data_free.inspection_page import render
    from opd.files import explain_unwritable, write_text

    with explain_unwritable(out.parent):
        write_text(out, render(facts, lengths, unit))


def _print(facts: Mapping[str, Any]) -> None:
    from rich.text import Text

    from opd.cli.tables import print_tables, wide_console
    from opd.data_free.inspection_tables import findings, tables
    from opd.report.text import visible

    console = wide_console()
    print_tables(console, tables(facts))
    for name, pool in facts.items():
        for prompt in pool["examples"]:
            console.print(Text(f"\n{visible(name)} {visible(prompt['id'])}", style="bold"))
            console.print(Text(visible(prompt["text"])))
    console.print(Text("\nFindings", style="bold"))
    for line in findings(facts):
        console.print(Text(f"- {line}"))
