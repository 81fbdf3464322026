"""What `opd eval` was asked: from its options to the model, the problems and how they are sampled."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd.data import Columns, DatasetConfig, load_prompts
from opd.errors import UserError
from opd.eval.options import EvalOptions
from opd.eval.protocols import Protocol, find_protocol
from opd.eval.suites import BOXED, EPISODES, Loaded, check_suite, load_suite, result_name
from opd.locate import check_location

DEFAULTS = {"top_p": 1.0, "top_k": 0, "presence_penalty": 0.0, "max_new_tokens": 1024, "samples": 1}


def evaluate_request(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs `opd eval` with these options, by their Python names. Raises `UserError`."""
    preset = find_protocol(given["protocol"]) if given["protocol"] else None
    names = _names(given, preset)
    style = _style(given, preset, boxed=bool(names))
    options = _options(given, preset)
    from opd.eval.provenance import find_checkpoint

    checkpoint = find_checkpoint(given["model"], given["checkpoint"])
    model = str(checkpoint.path) if checkpoint else given["model"]
    if checkpoint and not checkpoint.path.is_dir():
        raise UserError(f"--model: {model} is gone: a run deletes older checkpoints (checkpoint.keep)")
    check_location(model, "--model")
    if checkpoint is None and given["out"] is None:
        raise UserError("--out is missing: name a folder for the results")
    out = given["out"] or checkpoint.run / "eval" / f"step-{checkpoint.step}"  # type: ignore[union-attr]
    if names:
        for option in ("prompt", "answer"):
            if given[option] is not None:
                raise UserError(f"--{option} names a column of --data and has no effect on suites; leave it out")
        suites = [load_suite(name, style, given["suite_dir"], given["limit"]) for name in names]
    else:
        columns = Columns(given["prompt"] or "problem", given["answer"] or "answer")
        problems = load_prompts(replace(style, path=given["data"], columns=columns, limit=given["limit"]), "--data")
        suites = [Loaded(Path(given["data"].removeprefix("tiny:")).stem, problems)]
    from opd.evaluation import evaluate_suites

    return evaluate_suites(
        model,
        [_noted(suite, preset, given, options) for suite in suites],
        out,
        options,
        resume=given["resume"],
        overwrite=given["overwrite"],
        checkpoint=checkpoint,
        about=_about(given, style),
    )


def _names(given: Mapping[str, Any], preset: Protocol | None) -> list[str]:
    """The suites to evaluate on; none where `--data` was given. Looks at the names before anything is loaded."""
    if given["resume"] and given["overwrite"]:
        raise UserError("--resume and --overwrite exclude each other")
    if given["suite"] and given["data"]:
        raise UserError("--suite and --data exclude each other")
    names = given["suite"] or (list(preset.suites) if preset and not given["data"] else [])
    if not names and not given["data"]:
        raise UserError("--suite is missing: name a suite (see opd ls suites), give --data FILE.jsonl, or a --protocol")
    for name in names:
        check_suite(name, given["suite_dir"])
    stems = [result_name(name) for name in names]
    if len(set(stems)) < len(stems):
        raise UserError(f"--suite: {', '.join(stems)}: two have one name, and their results would have one file")
    for option in ("template", "plain"):
        if given[option] and names and all(name.startswith(EPISODES) for name in names):
            raise UserError(f"--{option} has no effect on episodes, which their environment opens; leave it out")
    return names


def _style(given: Mapping[str, Any], preset: Protocol | None, boxed: bool) -> DatasetConfig:
    """How a problem is put to the model; its path comes later."""
    thinking = given["thinking"] if given["thinking"] is not None or preset is None else preset.thinking
    return DatasetConfig(
        "",
        template=given["template"] or (BOXED if boxed else "{prompt}"),
        system=given["system"],
        plain=given["plain"],
        chat_template_kwargs={} if thinking is None else {"enable_thinking": thinking},
    )


def _options(given: Mapping[str, Any], preset: Protocol | None) -> EvalOptions:
    """The command line's values over the protocol's over the defaults."""
    if (given["sampler"] == "vllm") != (given["url"] is not None):
        raise UserError("--sampler vllm needs --url, and --url has no effect without it")
    chosen = {}
    for name in (*DEFAULTS, "temperature"):
        values = (given[name], getattr(preset, name) if preset else None, DEFAULTS.get(name))
        chosen[name] = next((value for value in values if value is not None), None)
    if chosen["temperature"] is None:
        chosen["temperature"] = 0.0 if chosen["samples"] == 1 else 0.7
    others = ("seed", "reward", "dtype", "max_rows", "url", "served_as", "token_file", "max_in_flight", "deadline_s")
    return EvalOptions(**chosen, time_limit_s=given["time_limit"], **{name: given[name] for name in others})


def _noted(suite: Loaded, preset: Protocol | None, given: Mapping[str, Any], options: EvalOptions) -> Loaded:
    """What a reader must know: that problems were left out, and where this is not the evaluation of the preset's paper."""
    if given["limit"] is not None:
        suite = replace(suite, notes=(*suite.notes, f"only the first {given['limit']} problems"))
    if preset is None:
        return suite
    stated = {name: getattr(preset, name) for name in (*DEFAULTS, "temperature")}
    used = {name: getattr(options, name) for name in stated}
    unstated = [f"{name} {used[name]}" for name in ("temperature", "top_p", "max_new_tokens") if stated[name] is None]
    other = [f"{name} {used[name]}, not {value}" for name, value in stated.items() if value not in (None, used[name])]
    parts = [
        f"protocol of {preset.paper}, {preset.metric}: {preset.caveat}",
        f"not stated there: {', '.join(unstated)}" if unstated else "",
        f"NOT as there: {', '.join(other)}" if other else "",
    ]
    return replace(suite, notes=(*suite.notes, "; ".join(part for part in parts if part)))


def _about(given: Mapping[str, Any], style: DatasetConfig) -> dict[str, Any]:
    """What else a reader of the result wants to know of its making."""
    about = {"protocol": given["protocol"], "template": style.template, "system": style.system, "plain": style.plain}
    return {**about, "chat_template_kwargs": dict(style.chat_template_kwargs), "limit": given["limit"]}
