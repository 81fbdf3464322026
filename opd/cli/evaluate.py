"""`opd eval`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def option(help: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, **limits)


Path_ = Path | None
Text = str | None
SUITE = "A suite (opd ls suites), FILE.jsonl, reasoning_gym:TASK[@SEED] or environment:NAME[@SEED]; may be repeated."
Suites = Annotated[list[str] | None, option(SUITE)]
SuiteDir = Annotated[Path_, option("Folder with SUITE.jsonl files, read instead of the hub.")]
Out = Annotated[Path_, option("Folder for the results. Default, for a run: RUN/eval/step-N.")]
Template = Annotated[Text, option("Text around a problem; {prompt} stands for it. Suites ask for a boxed answer.")]
Thinking = Annotated[bool | None, option("Sets the chat template's enable_thinking.", "--thinking/--no-thinking")]
Checkpoint = Annotated[str, option("Of a run: last, best (on eval.selection) or a step.")]


def add_to(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    model: Annotated[str, option("A model folder, a run or one of its checkpoints, a hub id, or tiny:student.")],
    suite: Suites = None,
    suite_dir: SuiteDir = None,
    protocol: Annotated[Text, option("A paper's: compass, df-opd, nsd, stride or endpoint.")] = None,
    data: Annotated[Text, option("Instead of a suite: any data, asked as it is (no request for a boxed answer).")] = None,
    prompt: Annotated[Text, option("With --data: column of the problem. Default: problem.")] = None,
    answer: Annotated[Text, option("With --data: column of the answer. Default: answer.")] = None,
    out: Out = None,
    resume: Annotated[bool, option("Go on with what is in the folder.", "--resume")] = False,
    overwrite: Annotated[bool, option("Replace what is in the folder.", "--overwrite")] = False,
    checkpoint: Checkpoint = "last",
    limit: Annotated[int | None, option("Only the first so many problems.", min=1)] = None,
    samples: Annotated[int | None, option("Completions a problem. Default: 1.", min=1)] = None,
    temperature: Annotated[float | None, option("Default: 0 for one sample, else 0.7.", min=0.0)] = None,
    top_p: Annotated[float | None, option("Nucleus. Default: 1.", min=1e-6, max=1.0)] = None,
    top_k: Annotated[int | None, option("Only the k most likely tokens. Default: all.", min=0)] = None,
    presence_penalty: Annotated[float | None, option("As in vLLM. Default: 0.", min=-2.0, max=2.0)] = None,
    max_new_tokens: Annotated[int | None, option("Longest completion. Default: 1024 tokens.", min=1)] = None,
    template: Template = None,
    system: Annotated[Text, option("A system message.")] = None,
    thinking: Thinking = None,
    plain: Annotated[bool, option("No chat template: for base models.", "--plain")] = False,
    sampler: Annotated[Literal["hf", "vllm"], option("In this process, or a vLLM server that runs.")] = "hf",
    url: Annotated[Text, option("With --sampler vllm: the server's address.")] = None,
    served_as: Annotated[Text, option("With --sampler vllm: the model's name there.")] = None,
    token_file: Annotated[Text, option("With --sampler vllm: file with the server's bearer token.")] = None,
    max_in_flight: Annotated[int, option("With --sampler vllm: requests at once.", min=1)] = 256,
    deadline_s: Annotated[float, option("With --sampler vllm: seconds for one completion.", min=1)] = 3600.0,
    reward: Annotated[Text, option("FILE.py:FUNCTION, a verifier of your own.")] = None,
    time_limit: Annotated[float, option("Seconds to grade one answer.", min=0.1)] = 5.0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], option("Type of the weights.")] = "auto",
    max_rows: Annotated[int, option("Completions decoded at once; --resume samples so many anew.", min=1)] = 64,
    seed: Annotated[int, option("Fixes the sampling noise.", min=0, max=2**63 - 1)] = 0,
) -> None:
    """Measure accuracy: avg@k, pass@k and maj@k with intervals; what went wrong is counted by kind.

    Prints one JSON line a suite; the rows of all problems are in the files.
    """
    given = dict(locals())
    from opd.eval.request import evaluate_request

    try:
        results = evaluate_request(given)
    except KeyboardInterrupt:
        print("interrupted; go on with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    for result in results:
        print(json.dumps({name: value for name, value in result.items() if name != "rows"}))
