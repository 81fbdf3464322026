"""What a recipe as a whole must satisfy, beyond names and types."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from opd.data import DatasetConfig, check_options, check_path
from opd.envs.config import EnvironmentConfig, check_environment
from opd.errors import UserError, refuse_unused
from opd.eval.config import MAX_ROUNDS
from opd.locate import check_location
from opd.objective.config import OptimizerConfig
from opd.plugins import PromptSource
from opd.records import DEFAULT_DOMAIN, Prompt
from opd.registry import CONTROLLERS, MASKS, PROMPT_SOURCES, TERM_MAKERS
from opd.reward.checks import check_answers, check_reward, check_reward_files
from opd.teachers.client.addresses import check_addresses
from opd.teachers.config import START, FrozenConfig, TeacherConfig, field_of, frozen_models, teacher_of

if TYPE_CHECKING:
    from opd.config import RunConfig


def check(config: "RunConfig") -> None:
    """Refuses values out of range and combinations that cannot work, with the reason. Raises `UserError`."""
    _check_ranges(config)
    _check_sampler(config)
    if config.loss_temperature <= 0.0:
        raise UserError(
            f"objective.temperature is {config.loss_temperature}: the loss needs one above 0; set it when sampling is greedy"
        )
    if config.student.dtype == "bfloat16" and config.objective.precision == "float32":
        raise UserError("student.dtype: bfloat16 weights need objective.precision=bfloat16")
    if config.objective.updates_per_batch > config.batch.prompts * config.batch.rollouts_per_prompt:
        raise UserError("objective.updates_per_batch is larger than the number of rollouts in a batch")
    if config.eval.environment is not None and (config.eval.prompts or config.eval.selection) is not None:
        raise UserError("eval.environment: episodes take the place of eval.prompts and eval.selection; set these to null")
    if config.eval.selection is not None and config.eval.prompts is None:
        raise UserError("eval.selection needs eval.prompts: a checkpoint is chosen on the one and reported on the other")
    if config.eval.selection is not None and config.eval.every == 0:
        raise UserError("eval.selection needs eval.every above 0: only evaluated steps can be chosen")
    if config.eval.samples > 1 and config.eval.temperature == 0.0:
        raise UserError("eval.samples above 1 repeats the same greedy completion: set eval.temperature")
    _check_collapse(config)
    if not config.terms:
        raise UserError(f"terms: name at least one of {', '.join(TERM_MAKERS.names())}")
    if config.lookahead not in (0, 1):
        raise UserError(f"lookahead is {config.lookahead}: it must be 0 or 1")
    if config.reward is not None:
        check_reward(config.reward, config)
    for name, controller in config.rollout.items():
        CONTROLLERS.load(name, "rollout").check(controller, config)
    for name, term in config.terms.items():
        TERM_MAKERS.load(name, "terms").check(term, config)
    for name, mask in config.masks.items():
        MASKS.load(name, "masks").check(mask, config)
    if not config.teachers:
        _check_without_teachers(config)


def _check_collapse(config: "RunConfig") -> None:
    options, longest = config.eval, config.sampling.max_new_tokens
    if not (wanted := options.collapse_tokens):
        refuse_unused(options, ["collapse_prompts"], "eval", "without eval.collapse_tokens")
        return
    if options.prompts is None and options.environment is None:
        raise UserError("eval.collapse_tokens needs eval.prompts: the student answers held-out problems")
    if config.sampling.temperature == 0.0:
        raise UserError("eval.collapse_tokens repeats the same greedy answers: set sampling.temperature, or leave it out")
    if wanted < 4:
        raise UserError(f"eval.collapse_tokens is {wanted}: 4-grams need at least 4 tokens; 0 is off")
    most = options.collapse_prompts * MAX_ROUNDS * longest
    if options.environment is None and wanted > most:  # episodes may have any number of turns
        raise UserError(
            f"eval.collapse_tokens is {wanted}, but eval.collapse_prompts={options.collapse_prompts} problems answered "
            f"{MAX_ROUNDS} times with sampling.max_new_tokens={longest} give at most {most}; lower it, or raise one of these"
        )


def _check_without_teachers(config: "RunConfig") -> None:
    """A recipe may do without a teacher where nothing asks one."""
    makers = {f"terms.{name}": TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()}
    steering = {f"rollout.{name}": CONTROLLERS.load(name, "rollout")(one, config) for name, one in config.rollout.items()}
    asking = [name for name, maker in makers.items() if maker.needs_teacher]
    asking += [name for name, controller in steering.items() if controller.needs_scores]
    if asking:
        raise UserError(f"teachers: {asking[0]} asks one: name it, as in teachers.default.model=FOLDER")


def controller_notes(config: "RunConfig") -> list[str]:
    """What the user should know about the settings of the rollout controllers."""
    steering = (CONTROLLERS.load(name, "rollout")(one, config) for name, one in config.rollout.items())
    return [note for controller in steering for note in controller.notes]


def check_files(config: "RunConfig") -> None:
    """Refuses models, files and environments that do not exist, without loading a model. Raises `UserError` naming the
    field."""
    check_location(config.student.model, "student.model")
    for name, teacher in config.frozen.items():
        if teacher.model is not None and not teacher.urls:  # the folder may be on the server's machine alone
            check_location(teacher.model, field_of(name))
            if teacher.adapter is not None:
                check_location(teacher.adapter, f"teachers.{name}.adapter")
    if config.reward is not None:
        check_reward_files(config.reward)
    sources = {"prompts": config.prompts["config"], "eval.prompts": config.eval.prompts}
    for key, source in {**sources, "eval.selection": config.eval.selection}.items():
        if isinstance(source, DatasetConfig):
            check_options(source, key)
            check_path(source.path, key)
    _check_prompts(config)
    for key, tasks in {"prompts": config.prompts["config"], "eval.environment": config.eval.environment}.items():
        if isinstance(tasks, EnvironmentConfig):
            check_environment(tasks, key)
    for name, term in config.terms.items():
        TERM_MAKERS.load(name, "terms").check_files(term)


def _check_prompts(config: "RunConfig") -> None:
    """Looks at them where that costs nothing."""
    kind = PROMPT_SOURCES.load(config.prompts["type"], "prompts.type")
    if (source := kind.preview(config.prompts["config"], config.seed)) is not None:
        _check_known(config, source).at(0, 0, config.batch.prompts)


def open_prompts(config: "RunConfig") -> PromptSource:
    """The recipe's prompts, of which all that are known fit its teachers and rewards. Raises `UserError`."""
    kind = PROMPT_SOURCES.load(config.prompts["type"], "prompts.type")
    return _check_known(config, kind(config.prompts["config"], config.seed))


def _check_known(config: "RunConfig", source: PromptSource) -> PromptSource:
    check_answers(config, source.known())
    check_domains(config, source.known(), "prompts")
    return source


def check_domains(config: "RunConfig", prompts: Sequence[Prompt], key: str) -> None:
    """Refuses prompts of domains without a teacher, where there are teachers. Raises `UserError` naming `key`."""
    domains = {prompt.domain for prompt in prompts} if config.teachers else set()
    if without := sorted(domain for domain in domains if teacher_of(domain, config.teachers) is None):
        fix = f"name teachers by the domains, or call a single one {DEFAULT_DOMAIN}"
        fix += ", or set eval.kl_prompts=0" if key.startswith("eval.") else ""
        raise UserError(
            f"{key}: no teacher is called {', '.join(without)}: the domains are {', '.join(sorted(domains))} and "
            f"the teachers {', '.join(sorted(config.teachers))}; {fix}"
        )


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuses what AdamW or its schedule cannot work with. Raises `UserError` naming the field of `optimizer`."""
    for name in ("lr", "eps", "weight_decay", "max_grad_norm", "warmup_ratio"):
        if not 0 <= (value := getattr(optimizer, name)) < math.inf:
            raise UserError(f"optimizer.{name} is {value}: it must be 0 or more, and finite")
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise UserError(f"optimizer.betas is {optimizer.betas}: it must be two numbers, each at least 0 and below 1")
    if optimizer.warmup_ratio > 1:
        raise UserError(f"optimizer.warmup_ratio is {optimizer.warmup_ratio}: it is a share of the updates, at most 1")


def _check_sampler(config: "RunConfig") -> None:
    sampler = config.sampler
    if sampler.url is not None:
        check_addresses(sampler.urls, "sampler.url")
    elif sampler.token_file is not None:
        raise UserError("sampler.token_file has no effect without sampler.url; leave it out, or set it to null")
    if not 0 < sampler.timeout_s <= sampler.deadline_s < math.inf:
        raise UserError("sampler: timeout_s must be positive and at most deadline_s")
    if not sampler.max_mismatch >= 0:
        raise UserError(f"sampler.max_mismatch is {sampler.max_mismatch}: it must be 0 or more")
    if sampler.max_in_flight < 1:
        raise UserError(f"sampler.max_in_flight is {sampler.max_in_flight}: it must be at least 1")


def _check_ranges(config: "RunConfig") -> None:
    at_least_1 = {
        "steps": config.steps,
        "batch.prompts": config.batch.prompts,
        "batch.rollouts_per_prompt": config.batch.rollouts_per_prompt,
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
        "sampling.max_context": config.sampling.max_context,
        "sampler.max_rows": config.sampler.max_rows,
        "sampler.chunk_tokens": config.sampler.chunk_tokens,
        "objective.updates_per_batch": config.objective.updates_per_batch,
        "objective.micro_batch_tokens": config.objective.micro_batch_tokens,
        "objective.max_logits_mib": config.objective.max_logits_mib,
        "objective.max_nonfinite_steps": config.objective.max_nonfinite_steps,
        "checkpoint.keep": config.checkpoint.keep,
        "eval.samples": config.eval.samples,
        "eval.collapse_prompts": config.eval.collapse_prompts,
        "eval.max_new_tokens": config.eval.max_new_tokens,
        "student.lora.r": config.student.lora.r if config.student.lora else None,
    }
    not_negative = {
        "seed": config.seed,
        "sampling.temperature": config.sampling.temperature,
        "sampling.top_k": config.sampling.top_k,
        "eval.temperature": config.eval.temperature,
        "eval.every": config.eval.every,
        "eval.kl_prompts": config.eval.kl_prompts,
        "eval.collapse_tokens": config.eval.collapse_tokens,
        "checkpoint.every": config.checkpoint.every,
        "trackers.rollouts_every": config.trackers.rollouts_every,
        "sampler.kept_mib": config.sampler.kept_mib,
    }
    shares = {"sampling.top_p": config.sampling.top_p, "eval.top_p": config.eval.top_p}
    for key, value in at_least_1.items():
        if value is not None and not value >= 1:
            raise UserError(f"{key} is {value}: it must be at least 1")
    for key, value in not_negative.items():
        if not 0 <= value < math.inf:
            raise UserError(f"{key} is {value}: it must be 0 or more, and finite")
    if config.seed >= 2**63:
        raise UserError(f"seed is {config.seed}: it must be below 2**63")
    check_optimizer(config.optimizer)
    for key, value in shares.items():
        if not 0 < value <= 1:
            raise UserError(f"{key} is {value}: it must be above 0 and at most 1")
    if not 0 <= config.alignment.min_byte_coverage <= 1:
        raise UserError(f"alignment.min_byte_coverage is {config.alignment.min_byte_coverage}: it is a share, from 0 to 1")
    if START in config.teachers:
        raise UserError(f"teachers.{START}: this is what the student's own start is called; choose another name")
    for name, teacher in config.teachers.items():
        _check_weak_reference(f"teachers.{name}.weak_reference", teacher)
    for name, model in frozen_models(config.teachers, weak=True).items():
        _check_frozen(f"teachers.{name}", model)


def _check_weak_reference(field: str, teacher: TeacherConfig) -> None:
    """A weak reference without a model of its own is the teacher with fewer experts, and takes everything else from it."""
    weak = teacher.weak_reference
    if weak is None or weak.model is not None or weak.url is not None:
        return
    if weak.active_experts is None:
        raise UserError(
            f"{field}.model is missing: set it in the recipe or as {field}.model=VALUE, or {field}.active_experts for the "
            "teacher with fewer experts"
        )
    others = [one.name for one in fields(FrozenConfig) if one.name not in ("active_experts", "served_as")]
    refuse_unused(weak, others, field, f"without {field}.model, where the teacher's is used")


def _check_frozen(field: str, teacher: FrozenConfig) -> None:
    if teacher.model is None and not teacher.urls:
        raise UserError(f"{field}.model is missing: set it in the recipe or as {field}.model=VALUE, or give {field}.url")
    if teacher.urls:
        check_addresses(teacher.urls, f"{field}.url")
    if teacher.model is None and teacher.adapter is not None:
        raise UserError(f"{field}.adapter needs {field}.model; to ask a server for one of its models, set {field}.served_as")
    for key in ("served_as", "token_file", "digest"):
        if getattr(teacher, key) is not None and not teacher.urls:
            raise UserError(f"{field}.{key} has no effect without {field}.url; leave it out, or set it to null")
    if teacher.digest is not None and not re.fullmatch(r"[0-9a-fA-F]{32}", teacher.digest):
        raise UserError(f"{field}.digest is {teacher.digest!r}: it must be the 32 hex digits that the server prints")
    at_least = {"max_batch_tokens": 1, "max_in_flight": 1, "active_experts": 1}
    for key, least in at_least.items():
        if (value := getattr(teacher, key)) is not None and value < least:
            raise UserError(f"{field}.{key} is {getattr(teacher, key)}: it must be at least {least}")
    if not teacher.logp_floor < 0 or not math.isfinite(teacher.logp_floor):
        raise UserError(f"{field}.logp_floor is {teacher.logp_floor}: it must be negative, and finite")
    if not 0 < teacher.timeout_s <= teacher.deadline_s < math.inf:
        raise UserError(f"{field}: timeout_s must be positive and at most deadline_s")
