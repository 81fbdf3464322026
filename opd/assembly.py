"""From a recipe to the objects that a run consists of. The only place that knows them all."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, broadcast_object_list
from torch import nn
from transformers import PreTrainedTokenizerBase

from opd.clock import Clock
from opd.config import RunConfig
from opd.contexts import Contexts
from opd.data import load_prompts
from opd.doctor import examine_models
from opd.envs.config import load_tasks
from opd.envs.formats import tool_format
from opd.errors import UserError
from opd.eval.grading import Grader
from opd.eval.overlap import problem_key
from opd.eval.provenance import overlap_notes, overlap_with
from opd.kernels.head import OutputHead
from opd.models import context_limit, output_head
from opd.objective.learner import Learner
from opd.pairing import Pairing, pair, unaligned_terms
from opd.plugins import Mask, PromptSource, TermMaker
from opd.records import Prompt, Sampling
from opd.registry import CONTROLLERS, MASKS, TERM_MAKERS
from opd.reward.rewards import Rewards
from opd.rollouts import InPlay, Player
from opd.served_terms import check_abilities
from opd.steering import Steering
from opd.student_side import StudentSide
from opd.students.client.sampler import RemoteSampler
from opd.students.hf_sampler import HFSampler
from opd.students.loading import load_student
from opd.students.sampler import Sampler
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import START, weak_name
from opd.teachers.digest import head_digest, tokens_digest
from opd.teachers.hf import HFTeacher
from opd.teachers.opening import TeacherFacts, connect, facts_of, open_teachers
from opd.teachers.pool import Teacher, TeacherPool
from opd.tokenization import eos_ids, load_tokenizer
from opd.validation import check_domains, open_prompts
from opd.watch import Watch

SWITCH_S = 5e-4


@dataclass(frozen=True)
class Parts:
    """Everything the engine drives."""

    accelerator: Accelerator
    clock: Clock
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    player: Player
    sampler: Sampler
    teachers: TeacherPool
    steering: Steering
    makers: list[TermMaker]
    masks: dict[str, Mask]
    rewards: Rewards | None
    learner: Learner
    heldout: list[Prompt]
    selection: list[Prompt]  # by whose accuracy the best checkpoint is chosen
    overlap: dict[str, Any] | None  # of training prompts with the held-out problems
    eval_notes: list[str]  # what a reader of the evaluations must know
    grader: Grader | None
    notes: list[str]  # what the user should know about this combination
    update_thread: ThreadPoolExecutor | None  # where updates run while other machines sample and score; None: in line
    chunk_tokens: int  # of a single answer, after which controllers are asked

    def watch(self, prompt: Prompt, slot: int) -> Watch | None:
        """What shows a rollout to the controllers, where the recipe has any."""
        if not self.steering:
            return None
        scoring = None
        if self.steering.needs_scores:
            teacher = self.teachers.teacher_for(prompt)
            scoring = self.teachers.growing(teacher, prompt, self.learner.spec.temperature)
        chunk = self.chunk_tokens if prompt.single_turn else None
        return Watch(list(self.steering.controllers.values()), prompt, slot, chunk, scoring)

    @property
    def compares_groups(self) -> bool:
        """Whether the rollouts of a prompt are looked at together, so that one process must have all of them."""
        return self.rewards is not None or any(maker.compares_groups for maker in self.makers)

    def close(self) -> None:
        """Ends the sampler's connections, the graders' workers and the update's thread."""
        self.sampler.close()
        for one in (self.grader, self.rewards):
            if one is not None:
                one.close()
        if self.update_thread is not None:
            self.update_thread.shutdown()


def make_accelerator() -> Accelerator:
    """One process, or one of those that `--processes` or `accelerate launch` started."""
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)  # rotary tables: the same everywhere, from the start
    cpu = not torch.cuda.is_available()
    return Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=[ddp])  # autocast is the learner's


def assemble(
    config: RunConfig, accelerator: Accelerator, checkpoint: Path | None = None, prompts: PromptSource | None = None
) -> Parts:
    """Loads prompts first (cheap mistakes show early), then tokenizers, then models. Raises `UserError`."""
    prompts = open_prompts(config) if prompts is None else prompts
    heldout, selection, grader = _problems(config)
    makers: list[TermMaker] = [TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()]
    masks = {name: MASKS.load(name, "masks")(section, config) for name, section in config.masks.items()}
    controllers = {name: CONTROLLERS.load(name, "rollout")(section, config) for name, section in config.rollout.items()}

    tokenizer = load_tokenizer(config.student.model, "student.model", config.student.revision)
    _check_calls(tokenizer, [*prompts.at(0, 0, 1), *heldout[:1]])
    served = connect(config.frozen)
    facts = {name: facts_of(name, model, served) for name, model in config.frozen.items()}
    ends = eos_ids(config.student.model, "student.model", tokenizer, config.student.revision)
    pairing = pair(tokenizer, ends, facts, config.teachers, config.alignment)
    for reason in unaligned_terms(dict(zip(config.terms, makers)), pairing, facts):
        raise UserError(reason)
    notes = [*_examined(config, facts, pairing, tokenizer, ends, prompts), *pairing.notes, *_unused_references(config)]
    notes += check_abilities(config, makers, {name: one.abilities for name, one in served.items()})
    overlap = overlap_with(prompts, heldout) if heldout and accelerator.is_main_process else None
    eval_notes = [*_shared(heldout, selection), *overlap_notes(overlap)]

    clock, device = Clock(), accelerator.device
    student = load_student(config.student, checkpoint).to(device)
    vocab = min(pairing.vocab, output_head(student).num_rows)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    sampler = _sampler(config, student, tokenizer, vocab, ends, clock, accelerator, copied=sharded)
    contexts = Contexts(tokenizer, _longest(config, student), config.sampling.max_new_tokens, ends)
    _refuse_long_prompts(config, prompts, contexts)
    num_topk, drawn = max(maker.num_student_topk for maker in makers), config.sampling
    player = Player(sampler, contexts, Sampling(drawn.temperature, drawn.top_p, drawn.top_k, num_topk), InPlay())
    adapted = student if config.student.lora is not None and not sharded else None
    teachers = _teachers(config, served, pairing, vocab, player, adapted, device, clock)
    steering = Steering(controllers, _identity(tokenizer, facts, teachers.teachers))
    heads = any(maker.needs_hidden for maker in makers) or bool(heldout and config.eval.kl_prompts and config.teachers)
    learner = _learner(config, student, accelerator, makers, teachers.heads(device) if heads else {}, vocab)
    return Parts(
        accelerator,
        clock,
        tokenizer,
        prompts,
        player,
        sampler,
        teachers,
        steering,
        makers,
        masks,
        Rewards(config.reward, contexts) if config.reward is not None else None,
        learner,
        heldout,
        selection,
        overlap,
        eval_notes,
        grader,
        [*notes, *steering.notes, *eval_notes],
        _update_thread(device) if config.lookahead and (sampler.concurrent or len(served) == len(facts)) else None,
        config.sampler.chunk_tokens,
    )


def _check_calls(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """Refuses episodes with calls in a form that is not known."""
    episodes = [prompt for prompt in prompts if prompt.task is not None]
    if episodes:
        tool_format(tokenizer, tools=any(prompt.tools for prompt in episodes))


def _longest(config: RunConfig, student: nn.Module) -> int:
    """The most tokens that a prompt with what follows may have."""
    limit = context_limit(student.config.get_text_config())  # type: ignore[union-attr,operator]
    return min(config.sampling.max_context or limit, limit)


def _teachers(
    config: RunConfig,
    served: Mapping[str, ServedTeacher],
    pairing: Pairing,
    vocab: int,
    player: Player,
    adapted: nn.Module | None,
    device: torch.device,
    clock: Clock,
) -> TeacherPool:
    """All frozen models. `adapted` is a student with adapters, beneath which its start is."""
    samplers: dict[str, Sampler] = {"student": player.sampler}
    side = StudentSide(player.contexts, samplers)
    vocabs = {name: vocab if name not in pairing.aligners else size for name, size in pairing.vocabs.items()}
    chunk_bytes = config.objective.max_logits_mib * 2**20
    opened = open_teachers(
        config.frozen, served, vocabs, device, chunk_bytes, lambda: player.busy or side.busy, clock, adapted
    )
    if START in opened:
        samplers[START] = _start_sampler(config, opened[START], vocab, player.contexts.eos_ids, clock)
    if config.masks or START in opened:
        side.spell([])  # a tokenizer that cannot be spelt shows now
    floor = config.alignment.min_byte_coverage
    return TeacherPool(opened, config.teachers, pairing.aligners, floor, clock, player.contexts.read, side)


def _identity(tokenizer: PreTrainedTokenizerBase, facts: dict[str, TeacherFacts], teachers: Mapping[str, Teacher]) -> str:
    """Changes with what earlier scores depend on: tokens and templates of all models, and the teachers' weights, of which
    those in process are told apart by name and output head."""
    parts = [tokens_digest(tokenizer.get_vocab()), str(tokenizer.chat_template)]
    for name, one in sorted(facts.items()):
        weights = teachers[name].digest or one.weights + head_digest(teachers[name].head)
        parts += [name, tokens_digest(one.tokenizer.get_vocab()), str(one.tokenizer.chat_template), weights]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _examined(
    config: RunConfig,
    facts: dict[str, TeacherFacts],
    pairing: Pairing,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    prompts: PromptSource,
) -> list[str]:
    """What the user should know about the teachers; refuses one that cannot teach this student."""
    notes, first = [], prompts.at(0, 0, config.batch.prompts)
    for finding in examine_models(config, facts, pairing, tokenizer, ends, first):
        if finding.level == "error":
            raise UserError(f"{finding.subject}: {finding.text}; {finding.fix}")
        if finding.level == "warn":
            notes.append(f"{finding.subject}: {finding.text}; {finding.fix}")
    return notes


def _unused_references(config: RunConfig) -> list[str]:
    """A note for each weak reference that is not loaded."""
    return [
        f"teachers.{weak_name(name)}: no term of this recipe uses it, so it is not loaded"
        for name, teacher in config.teachers.items()
        if teacher.weak_reference is not None and weak_name(name) not in config.frozen
    ]


def _learner(
    config: RunConfig,
    student: nn.Module,
    accelerator: Accelerator,
    makers: Sequence[TermMaker],
    heads: dict[str, OutputHead],
    vocab: int,
) -> Learner:
    return Learner(
        student,
        config.objective,
        config.optimizer,
        accelerator=accelerator,
        num_steps=config.steps,
        heads=heads,
        vocab=vocab,
        temperature=config.loss_temperature,
        reference=_reference(config, accelerator.device) if any(maker.needs_reference for maker in makers) else None,
        by_domain=len(config.teachers) > 1,
        max_mismatch=_max_mismatch(config),
    )


def _max_mismatch(config: RunConfig) -> float | None:
    """None where sampler and student are not to agree: other weights, or another distribution."""
    sampling, objective = config.sampling, config.objective
    stale = bool(config.lookahead) or objective.updates_per_batch > 1
    truncated = sampling.top_p < 1.0 or sampling.top_k > 0
    same = config.loss_temperature == sampling.temperature > 0.0
    return config.sampler.max_mismatch if config.sampler.urls and same and not stale and not truncated else None


def _reference(config: RunConfig, device: torch.device) -> nn.Module | Literal["adapters off"]:
    """The student's frozen start: the recipe's model whatever was learned since, or the base under the adapters."""
    if config.student.lora is not None:
        return "adapters off"
    return load_student(replace(config.student, gradient_checkpointing=False)).to(device)


def _update_thread(device: torch.device) -> ThreadPoolExecutor:
    """One thread, whose current device is the trainer's: a new thread would begin with the first.

    After each of its many small operations it asks for the interpreter again, and would wait up to Python's usual 5 ms for
    whoever reads answers meanwhile.
    """
    sys.setswitchinterval(SWITCH_S)
    enter = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
    return ThreadPoolExecutor(1, "update", initializer=enter)


def _refuse_long_prompts(config: RunConfig, prompts: PromptSource, contexts: Contexts) -> None:
    """Refuses a run whose first steps would all be empty. A single long prompt is skipped and counted instead."""
    soon = [prompt for step in range(min(config.steps, 8)) for prompt in prompts.at(step, 0, config.batch.prompts)]
    if all(contexts(prompt) is None for prompt in soon):
        raise UserError(
            f"sampling.max_context: every prompt of the first steps is longer than the context of {contexts.max_context} "
            "tokens; raise it, or choose shorter prompts"
        )


def _problems(config: RunConfig) -> tuple[list[Prompt], list[Prompt], Grader | None]:
    """The held-out problems, those of the selection set, and what grades them, where the recipe has any."""
    found: list[list[Prompt]] = []
    for key, source in (("eval.prompts", config.eval.prompts), ("eval.selection", config.eval.selection)):
        problems = load_prompts(source, key) if source is not None else []
        if config.eval.reward is None and any(problem.answer is None for problem in problems):
            raise UserError(f"{key}.columns.answer: a held-out problem has no answer; name the column, or set eval.reward")
        found.append(problems)
    if config.eval.environment is not None:
        found[0] = load_tasks(config.eval.environment, "eval.environment")
    asked = "eval.prompts" if config.eval.environment is None else "eval.environment"
    check_domains(config, found[0][: config.eval.kl_prompts], asked)
    grader = Grader(config.eval.time_limit_s, verifier=config.eval.reward) if any(found) else None
    return found[0], found[1], grader


def _shared(heldout: list[Prompt], selection: list[Prompt]) -> list[str]:
    """A note where the best checkpoint is chosen on problems that are reported."""
    num = len({problem_key(one.problem) for one in heldout} & {problem_key(one.problem) for one in selection})
    if not num:
        return []
    return [f"WARNING: eval.selection shares {num} problems with eval.prompts: the chosen checkpoint's accuracy is too high"]


def _sampler(
    config: RunConfig,
    student: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    vocab: int,
    ends: tuple[int, ...],
    clock: Clock,
    accelerator: Accelerator,
    *,
    copied: bool,
) -> Sampler:
    """Processes decode unequally many tokens, so under FSDP each needs whole weights of its own: a sharded student would
    have the others wait for ever."""
    dtype = config.objective.precision if config.sampler.dtype == "auto" else config.sampler.dtype
    if config.sampler.urls:
        return RemoteSampler(
            config.sampler,
            student,
            getattr(torch, dtype),
            vocab,
            ends,
            tokens_digest(tokenizer.get_vocab()),
            share=_from_first,
            writes=accelerator.is_main_process,
        )
    return HFSampler(
        student,
        vocab,
        ends,
        max_rows=config.sampler.max_rows,
        chunk_tokens=config.sampler.chunk_tokens,
        dtype=getattr(torch, dtype),
        copy_weights=copied,
        max_kept_bytes=config.sampler.kept_mib * 2**20,
        clock=clock,
    )


def _from_first(value: str | None) -> str:
    """What the first process has, on all of them."""
    shared = [value]
    broadcast_object_list(shared)
    assert shared[0] is not None
    return shared[0]


def _start_sampler(config: RunConfig, start: Teacher, vocab: int, ends: Sequence[int], clock: Clock) -> Sampler:
    """What the student's frozen start writes with."""
    assert isinstance(start, HFTeacher)
    model = start.model
    return HFSampler(
        model.model,
        vocab,
        ends,
        max_rows=config.sampler.max_rows,
        chunk_tokens=config.sampler.chunk_tokens,
        within=model.frozen,
        clock=clock,
    )
