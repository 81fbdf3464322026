"""`opd eval`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def add_to(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    model: Annotated[str, typer.Option(help="A model folder, a checkpoint, a hub id, or tiny:student.")],
    data: Annotated[str, typer.Option(help="JSON lines with problems and answers.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    samples: Annotated[int, typer.Option(min=1, help="Completions a problem.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Default: 0 for one sample, else 0.7.")] = None,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Nucleus.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems.")] = None,
    prompt: Annotated[str, typer.Option(help="Column of the problem.")] = "problem",
    answer: Annotated[str, typer.Option(help="Column of the answer.")] = "answer",
    template: Annotated[str, typer.Option(help="Text around a problem; {prompt} stands for it.")] = "{prompt}",
    plain: Annotated[bool, typer.Option("--plain", help="No chat template: for base models.")] = False,
    reward: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION, a verifier of your own.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds to grade one answer.")] = 5.0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "auto",
    max_rows: Annotated[int, typer.Option(min=1, help="Completions decoded at once.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Fixes the sampling noise.")] = 0,
) -> None:
    """Measure accuracy: avg@k, with extraction failures, truncations and time-outs counted apart."""
    from opd.data import Columns, DatasetConfig, load_prompts
    from opd.locate import check_location

    check_location(model, "--model")
    source = DatasetConfig(data, columns=Columns(prompt=prompt, answer=answer), template=template, plain=plain, limit=limit)
    problems = load_prompts(source, "--data")
    from opd.evaluation import evaluate as run

    result = run(
        model,
        problems,
        out,
        samples=samples,
        temperature=(0.0 if samples == 1 else 0.7) if temperature is None else temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        reward=reward,
        time_limit_s=time_limit,
        dtype=dtype,
        max_rows=max_rows,
        seed=seed,
    )
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=2))
