"""Run directories with made-up figures, in the shape that training and `opd eval` write: for `benchmarks.report` and tests.

A variant's held-out accuracy rises from `START` to `level` along one curve with noise of its own in each seed; a problem is
as hard in every run, so that paired tests have something to pair.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

START = 0.25
NONE: Mapping[str, Any] = {}
WRONG = ("wrong", "wrong", "no_answer", "truncated", "timeout")
WORDS = "the sum of these two numbers is so we carry one and write down seven then add to get 12 30 45".split()  # noqa: SIM905


def result(
    suite: str, accuracy: float, *, problems: int = 60, samples: int = 1, seed: int = 0, step: int | None = None
) -> dict[str, Any]:
    """One evaluation of one suite whose expected accuracy is `accuracy`."""
    rng = np.random.default_rng([seed, step or 0, problems, len(suite)])
    hardness = np.random.default_rng(99).normal(0, 1.5, problems)  # of the problems: the same in every run
    chance = 1 / (1 + np.exp(hardness - np.log(accuracy / (1 - accuracy)) * 1.35))
    rows = [_row(f"{suite}-{index}", chance[index], samples, rng) for index in range(problems)]
    flat = [verdict for row in rows for verdict in row["verdicts"]]
    tokens = [count for row in rows for count in row["num_tokens"]]
    found: dict[str, Any] = {
        "suite": suite,
        "model": "made-up",
        "step": step,
        "settings": {"samples": samples, "temperature": 0.7, "max_new_tokens": 64, "seed": 0},
        "accuracy": float(np.mean([row["verdicts"].count("correct") / samples for row in rows])),
        "num_problems": problems,
        "num_samples": len(flat),
    }
    for verdict in ("correct", "wrong", "no_answer", "truncated", "timeout"):
        found |= {f"num_{verdict}": flat.count(verdict), f"{verdict}_rate": flat.count(verdict) / len(flat)}
    found[f"pass@{samples}"] = float(np.mean(["correct" in row["verdicts"] for row in rows]))
    found |= {"at_limit_rate": found["truncated_rate"], "repetitive_rate": 0.01, "mean_tokens": float(np.mean(tokens))}
    note = f"{problems} problems x {samples} samples separate differences above about 9.5 points (80 % power)"
    return {**found, "intervals": {}, "notes": [note], "overlap": None, "rows": rows}


def _row(name: str, chance: float, samples: int, rng: np.random.Generator) -> dict[str, Any]:
    verdicts = ["correct" if right else WRONG[rng.integers(5)] for right in rng.random(samples) < chance]
    classes = [{"correct": 0, "wrong": 1 + int(rng.integers(3))}.get(verdict) for verdict in verdicts]
    lengths = [int(length) for length in rng.integers(20, 64, samples)]
    return {
        "id": name,
        "key": hashlib.sha256(name.encode()).hexdigest()[:32],
        "answer": "0",
        "verdicts": verdicts,
        "extracted": [None if value is None else str(value) for value in classes],
        "scores": [float(verdict == "correct") for verdict in verdicts],
        "classes": classes,
        "num_tokens": lengths,
        "finish": ["length" if verdict == "truncated" else "eos" for verdict in verdicts],
        "repetitive": [False] * samples,
        "responses": [" ".join(rng.choice(WORDS, length)) for length in lengths],
    }


def write_run(
    path: Path,
    *,
    level: float = 0.9,
    speed: float = 4.0,
    seed: int = 0,
    steps: int = 40,
    every: int = 10,
    problems: int = 60,
    samples: int = 1,
    kl: str = "reverse_kl",
    suites: Mapping[str, int] = NONE,
    config: Mapping[str, Any] = NONE,
    ended: int | None = None,
) -> Path:
    """A run's directory. `suites`: name -> samples a problem. `ended`: the step whose line of metrics a kill cut in half."""
    rng = np.random.default_rng([seed, steps])
    done = steps if ended is None else ended
    settings = {"steps": steps, "seed": seed, "optimizer": {"lr": 0.002}, "terms": {"reverse_kl": {"form": "full"}}}
    _write(path / "config.yaml", {**settings, **config})
    _write(path / "env.json", {"python": "3.11.7"})
    lines = [json.dumps(_metrics(step, steps, speed, kl, rng)) for step in range(1, done + 1)]
    text = "".join(f"{line}\n" for line in lines)
    (path / "metrics.jsonl").write_text(text if ended is None else text[: -len(lines[-1]) // 2], encoding="utf-8")
    for step in range(0, done + 1, every):
        progress = 1 - np.exp(-speed * step / steps)
        accuracy = START + (level - START) * progress + rng.normal(0, 0.01) * (step > 0)
        chance, noise = float(np.clip(accuracy, 0.02, 0.98)), seed * (step > 0)
        figures = result("heldout", chance, problems=problems, samples=samples, seed=noise, step=step)
        _write(path / f"eval/step-{step}.json", {"reverse_kl": _divergence(step / steps, speed), **figures})
        if step:
            _write_rollouts(path / f"rollouts/step-{step}.jsonl", seed, step, np.random.default_rng(int(1e6 * level) + step))
    for name, count in suites.items():
        for step, accuracy in {0: START, done: level}.items():
            scores = result(name, accuracy, problems=40, samples=count, seed=seed * (step > 0), step=step)
            _write(path / f"eval/step-{step}/{name}.json", scores)
    if ended is None:
        _write(path / "summary.json", {"steps": steps, "wall_s": 0.4 * steps, "sampled_tokens": 2000 * steps, "eval": {}})
    return path


def write_results(path: Path, accuracies: Mapping[str, float], *, problems: int = 60, samples: int = 1) -> Path:
    """What `opd eval --out PATH` leaves: a file a suite."""
    for name, accuracy in accuracies.items():
        _write(path / f"{name}.json", result(name, accuracy, problems=problems, samples=samples, seed=7))
        (path / f"{name}.samples.jsonl").write_text("", encoding="utf-8")
    return path


def _metrics(step: int, steps: int, speed: float, kl: str, rng: np.random.Generator) -> dict[str, float]:
    value = _divergence(step / steps, speed) * float(np.exp(rng.normal(0, 0.15)))
    figures = {"loss": value, "grad_norm": 1.0, "entropy": 1.2, kl: value, "sampled_tokens": int(rng.integers(1800, 2200))}
    return {"step": step, **figures, "truncated_rate": 0.1, "perf/step_s": float(rng.uniform(0.35, 0.45))}


def _divergence(progress: float, speed: float) -> float:
    return float(2.5 * np.exp(-1.2 * speed * progress) + 0.02)


def _write_rollouts(path: Path, seed: int, step: int, rng: np.random.Generator) -> None:
    rows = [_rollout(f"prompt-{seed}-{step}-{slot}", slot, rng) for slot in range(4)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _rollout(prompt: str, slot: int, rng: np.random.Generator) -> dict[str, Any]:
    tokens = [f" {word}" for word in rng.choice(WORDS, 60)]
    logps = [round(float(value), 5) for value in -rng.exponential(0.5, 60)]
    return {
        "id": prompt,
        "slot": slot,
        "prompt": f"Add the numbers of {prompt}, step by step, and write the answer in \\boxed{{}}.",
        "response": "".join(tokens),
        "finish": "eos",
        "sampled_ids": list(range(60)),
        "sampler_logps": logps,
        "tokens": tokens,
        "advantages": [round(float(value), 4) for value in rng.normal(0, 0.3, 60) * rng.choice([0.2, 1, 4], 60)],
    }


def _write(path: Path, content: Any) -> None:
    """JSON is YAML too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
