"""The model card of a checkpoint: the `README.md` that Hugging Face shows, from the recipe and the results alone."""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from omegaconf import OmegaConf

from opd.config import RunConfig, to_mapping
from opd.registry import TERM_MAKERS
from opd.teachers.config import FrozenConfig, TeacherConfig, weak_name
from opd.tiny import is_tiny

PAPERS = {"2306.13649": "generalised knowledge distillation", "2306.08543": "MiniLLM"}  # of on-policy distillation as such
FILES = {".jsonl", ".json", ".csv", ".parquet", ".txt", ".py"}
PRIVATE = {"url", "token_file", "trackers"}  # of the machines a run used, not of the model
_ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#])")


def model_card(config: RunConfig, step: int, results: Sequence[Mapping[str, Any]]) -> str:
    """The card as Markdown with YAML metadata, for the checkpoint after `step` steps and its evaluations (any number).

    Files and folders appear by their base name only, servers and trackers not at all.
    """
    student = _Name(config.student.model)
    teachers = {name: _Name(teacher.model or f"the model served as {name}") for name, teacher in config.teachers.items()}
    named = " and ".join(dict.fromkeys(teacher.short for teacher in teachers.values()))
    title = f"{student.short}, distilled from {named}" if named else f"{student.short}, trained on its own rollouts"
    parts = [
        f"---\n{_metadata(config, results).to_yaml()}\n---",
        f"# {_text(title)}",
        _what(config, step, student, teachers),
        "## Method\n\n" + _method(config),
        "## Results\n\n" + _results(results),
        "## Use\n\n" + _use(config, student),
        "## Settings\n\n" + _settings(config),
        "## Limitations\n\n" + (_OF_TEACHERS if teachers else "") + _LIMITATIONS,
    ]
    return "\n\n".join(parts) + "\n"


@dataclasses.dataclass(frozen=True)
class _Name:
    """The name of a model or of data, without where it lies on this machine."""

    given: str

    @property
    def on_hub(self) -> bool:
        name, path = self.given, Path(self.given).expanduser()
        local = name.startswith(("/", "~", ".")) or path.exists() or path.suffix in FILES
        return name.count("/") == 1 and not local and not is_tiny(name)

    @property
    def public(self) -> str:
        return self.given if self.on_hub else Path(self.given).name or "model"

    @property
    def short(self) -> str:
        return self.public.rpartition("/")[2]

    @property
    def markdown(self) -> str:
        return f"[{_text(self.given)}](https://huggingface.co/{self.given})" if self.on_hub else _code(self.public)


def _metadata(config: RunConfig, results: Sequence[Mapping[str, Any]]) -> ModelCardData:
    student, data = _Name(config.student.model), _data_name(config)
    lora = config.student.lora is not None
    base: dict[str, Any] = {"base_model": student.given, "base_model_relation": "adapter" if lora else "finetune"}
    base = base if student.on_hub else {}  # the hub refuses any other name
    evaluations = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(result["suite"]),
            dataset_name=_suite(result),
            metric_type="accuracy",
            metric_name=f"avg@{_samples(result)}",
            metric_value=round(float(result["accuracy"]), 4),
        )
        for result in results
    ]
    return ModelCardData(
        model_name=f"{student.short}-opd",
        library_name="peft" if lora else "transformers",
        pipeline_tag="text-generation",
        tags=[*(["on-policy-distillation", "distillation"] if config.teachers else []), "opd", *(["lora"] if lora else [])],
        datasets=[data.given] if data.on_hub else None,
        eval_results=evaluations or None,
        **base,
    )


def _data_name(config: RunConfig) -> _Name:
    return _Name(str(getattr(config.prompts["config"], "path", config.prompts["type"])))


def _what(config: RunConfig, step: int, student: _Name, teachers: Mapping[str, _Name]) -> str:
    revision = f" at revision {_code(config.student.revision)}" if config.student.revision else ""
    lora = config.student.lora
    kind = f"A low-rank adapter (rank {lora.r}) over" if lora else "A fine-tuned"
    how = "on-policy distillation from" if teachers else "training on its own rollouts, without a teacher,"
    lines = [f"{kind} {student.markdown}{revision}, after step {step} of {config.steps} of {how}"]
    lines += [f"* {_teacher(name, teachers[name], teacher)}" for name, teacher in config.teachers.items()]
    weak = [(name, teacher.weak_reference) for name, teacher in config.teachers.items() if weak_name(name) in config.frozen]
    lines += [f"* compared with {_weak(name, reference)}" for name, reference in weak if reference is not None]
    data = _data_name(config)
    split = getattr(config.prompts["config"], "split", None)
    where = f" (split {_code(split)})" if data.on_hub and split else ""
    prompts = f"on the prompts of {data.markdown}{where}."
    return "\n".join([lines[0], "", *lines[1:], "", prompts] if teachers else [lines[0], prompts])


def _teacher(name: str, model: _Name, teacher: TeacherConfig) -> str:
    details = [f"revision {_code(teacher.revision)}"] if teacher.revision else []
    details += [f"adapter {_Name(teacher.adapter).markdown}"] if teacher.adapter else []
    details += [f"digest of the weights {_code(teacher.digest)}"] if teacher.digest else []
    return f"{model.markdown} (teacher {_code(name)}{''.join(f', {detail}' for detail in details)})"


def _weak(name: str, reference: FrozenConfig) -> str:
    if reference.model is None and reference.url is None:
        return f"teacher {_code(name)} itself with {reference.active_experts} active experts, its weak reference"
    model = _Name(reference.model or "a served model")
    return f"{model.markdown}, the weak reference of teacher {_code(name)}"


def _method(config: RunConfig) -> str:
    links = " and ".join(f"[{name}](https://arxiv.org/abs/{paper})" for paper, name in PAPERS.items())
    distilled = (
        f"On-policy distillation ({links}): the student samples completions, the frozen teacher scores the same tokens, and "
        "the student's distribution moves towards the teacher's on these."
    )
    alone = "The student samples completions and learns from these, without another model."
    lines = [f"{distilled if config.teachers else alone} The loss is a sum of:", ""]
    for name, term in config.terms.items():
        maker = TERM_MAKERS.load(name, f"terms.{name}")
        document = sys.modules[maker.__module__].__doc__ or ""
        papers = [paper for paper in dict.fromkeys(_ARXIV.findall(document)) if paper not in PAPERS]
        summary = (type(term).__doc__ or "").strip().partition("\n")[0].rstrip(".")
        chosen = [
            f"{field.name} {_code(getattr(term, field.name))}"
            for field in dataclasses.fields(term)
            if field.name in {"form", "divergence"} or getattr(term, field.name) != field.default
        ]
        cited = "".join(f", [arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        lines.append(f"* {_code(name)}: {summary}{cited}" + (f" ({', '.join(chosen)})" if chosen else ""))
    return "\n".join(lines)


def _results(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "This checkpoint was not evaluated."
    lines = ["| Suite | Metric | Value [95 % interval] | Problems x samples |", "|---|---|---|---|"]
    notes: list[str] = []
    for result in results:
        samples = _samples(result)
        names = {"accuracy": f"avg@{samples}"}
        names |= {f"{kind}@{samples}": f"{kind}@{samples}" for kind in ("pass", "maj") if samples > 1}
        size = f"{result['num_problems']} x {samples}"
        for key, shown in names.items():
            if key in result:
                lines.append(f"| {_text(_suite(result))} | {shown} | {_value(result, key)} | {size} |")
        notes += [f"* {_text(_suite(result))}: {_text(note)}" for note in result.get("notes") or []]
    about = "Intervals are bootstrapped over problems: they are about other problems of this kind, not other training seeds."
    return "\n".join([*lines, "", about, *([""] if notes else []), *notes])


def _value(result: Mapping[str, Any], key: str) -> str:
    limits = (result.get("intervals") or {}).get(key)
    return f"{result[key]:.3f}" + (f" [{limits[0]:.3f}, {limits[1]:.3f}]" if limits else "")


def _suite(result: Mapping[str, Any]) -> str:
    """The suite's name, which part of a suite must not pass for."""
    limit = (result.get("settings") or {}).get("limit")
    return str(result["suite"]) + (f" (first {limit})" if limit else "")


def _samples(result: Mapping[str, Any]) -> int:
    return int((result.get("settings") or {}).get("samples") or round(result["num_samples"] / result["num_problems"]))


def _use(config: RunConfig, student: _Name) -> str:
    model = "AutoModelForCausalLM.from_pretrained(name)"
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += ['name = "OWNER/NAME"  # this repository, or its folder']
    if config.student.lora is not None:
        lines = ["from peft import PeftModel", *lines, f"base = AutoModelForCausalLM.from_pretrained({student.public!r})"]
        model = "PeftModel.from_pretrained(base, name)"
    code = "\n".join([*lines, f"model = {model}", "tokenizer = AutoTokenizer.from_pretrained(name)"])
    template = getattr(config.prompts["config"], "template", "{prompt}")
    around = f"\n\nPrompts were put into this text:\n\n{_fenced(template)}" if template != "{prompt}" else ""
    return f"{_fenced(code, 'python')}{around}"


def _settings(config: RunConfig) -> str:
    sampling, batch, optimizer = config.sampling, config.batch, config.optimizer
    rows = {
        "Steps": config.steps,
        "Rollouts a step": f"{batch.prompts} prompts x {batch.rollouts_per_prompt}",
        "Sampling": f"temperature {sampling.temperature}, top-p {sampling.top_p}, top-k {sampling.top_k or 'all'}, "
        f"at most {sampling.max_new_tokens} tokens",
        "Optimizer": f"AdamW, learning rate {optimizer.lr}, {optimizer.schedule}, warm-up {optimizer.warmup_ratio}",
        "Precision": f"{config.objective.precision} (master weights {config.student.dtype})",
        "Seed": config.seed,
    }
    table = ["| Setting | Value |", "|---|---|", *(f"| {name} | {_text(value)} |" for name, value in rows.items())]
    recipe = OmegaConf.to_yaml(OmegaConf.create(_published(to_mapping(config))))
    details = f"<details><summary>The whole recipe</summary>\n\n{_fenced(recipe.rstrip(), 'yaml')}\n\n</details>"
    return "\n".join(table) + "\n\n" + details


def _published(value: Any) -> Any:
    """Plain configuration without what is private, and with base names for paths."""
    if isinstance(value, Mapping):
        return {key: _published(_named(key, item)) for key, item in value.items() if key not in PRIVATE}
    if isinstance(value, list | tuple):
        return [_published(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~/", "./", "../")) and not re.search(r"\s", value)
    return Path(value).name if is_path else value


def _named(key: str, value: Any) -> Any:
    return _Name(value).public if key in {"model", "path", "adapter", "reward"} and isinstance(value, str) else value


def _text(value: Any) -> str:
    """Literal text in Markdown, also in a table: on one line, its markup escaped."""
    return _MARKUP.sub(r"\\\1", " ".join(str(value).split()))


def _code(value: Any) -> str:
    """Literal text in a code span, in a table or not."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _fenced(text: str, language: str = "") -> str:
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


_OF_TEACHERS = """\
* Distillation moves the student towards its teacher: the teacher's mistakes and biases come along, and what the teacher
  cannot do is not learnt.
"""
_LIMITATIONS = """\
* It was measured on the suites above only, where any are listed; other tasks and languages may have become worse.
* The licences and terms of use of all models and prompts named above apply."""
