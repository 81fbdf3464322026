"""`opd.evaluate`: the accuracy of a model on problems with answers."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd.errors import UserError
from opd.files import explain_unwritable, write_text
from opd.records import Prompt, Sampling


def evaluate(
    model: str,
    problems: Sequence[Prompt],
    out: str | Path,
    *,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int = 1024,
    reward: str | None = None,
    time_limit_s: float = 5.0,
    dtype: str = "auto",
    max_rows: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """Samples `samples` completions a problem and grades them; writes `out/results.json` and returns its content.

    `accuracy` is avg@k; `rows` holds the problem x sample matrix of verdicts with the responses. Raises `UserError`.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from opd.eval.evaluate import accuracy
    from opd.eval.grading import Grader
    from opd.models import context_limit, load_causal_lm, output_head
    from opd.rollouts import Contexts
    from opd.students.hf_sampler import HFSampler
    from opd.tokenization import eos_ids, load_tokenizer

    _check(problems, samples, temperature, reward)
    with explain_unwritable(Path(out)):
        Path(out).mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(model, "--model")
    with Grader(time_limit_s, verifier=reward) as grader:
        student = load_causal_lm(model, "--model", dtype=dtype)
        student = student.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
        vocab = min(max(tokenizer.get_vocab().values()) + 1, output_head(student).weight.shape[0])
        sampler = HFSampler(student, vocab, eos_ids(model, "--model", tokenizer), max_rows=max_rows)
        contexts = Contexts(tokenizer, context_limit(student.config.get_text_config()), max_new_tokens)
        sampling = Sampling(temperature, top_p)
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("sampling", total=len(problems) * samples)

            def done(count: int) -> None:
                bar.advance(task, count)

            work = accuracy(sampler, problems, contexts, grader, sampling, samples=samples, seed=seed, done=done)
            result = asyncio.run(work)
    settings = {"model": model, "samples": samples, "temperature": temperature, "top_p": top_p}
    result = {**settings, "max_new_tokens": max_new_tokens, "seed": seed, **result}
    write_text(Path(out) / "results.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return result


def _check(problems: Sequence[Prompt], samples: int, temperature: float, reward: str | None) -> None:
    if samples > 1 and temperature == 0.0:
        raise UserError("--samples above 1 repeats the same greedy completion: set --temperature")
    if reward is None and any(problem.answer is None for problem in problems):
        raise UserError("--answer: a problem has no answer; name the column, or set --reward")
