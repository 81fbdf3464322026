"""From a recipe to the objects that a run consists of. The only place that knows them all."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from transformers import PreTrainedTokenizerBase

from opd.alignment.vocabulary import shared_vocabulary
from opd.clock import Clock
from opd.config import RunConfig
from opd.data import load_prompts
from opd.doctor import examine_teacher
from opd.errors import UserError
from opd.eval.grading import Grader
from opd.models import context_limit, output_head
from opd.objective.learner import Learner
from opd.plugins import PromptSource, TermMaker
from opd.records import Prompt, Sampling
from opd.registry import PROMPT_SOURCES, TERM_MAKERS
from opd.rollouts import Contexts
from opd.students.hf_sampler import HFSampler
from opd.students.loading import load_student
from opd.students.sampler import Sampler
from opd.teachers.hf import HFTeacher
from opd.teachers.pool import TeacherPool
from opd.tokenization import eos_ids, load_tokenizer


@dataclass(frozen=True)
class Parts:
    """Everything the engine drives."""

    accelerator: Accelerator
    clock: Clock
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    contexts: Contexts
    sampling: Sampling
    sampler: Sampler
    teachers: TeacherPool
    makers: list[TermMaker]
    learner: Learner
    heldout: list[Prompt]
    grader: Grader | None
    notes: list[str]  # what the user should know about this combination

    def close(self) -> None:
        """Ends the grader's workers."""
        if self.grader is not None:
            self.grader.close()


def make_accelerator() -> Accelerator:
    """One process, or one of those that `--processes` or `accelerate launch` started."""
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)  # rotary tables: the same everywhere, from the start
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=[ddp])  # autocast is the learner's
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UserError(
            "sampler: the Hugging Face sampler would hang under FSDP, whose processes must decode equally many tokens; "
            "train with DDP (opd train --processes N), or through a vLLM sampler"
        )
    return accelerator


def assemble(config: RunConfig, accelerator: Accelerator, checkpoint: Path | None = None) -> Parts:
    """Loads prompts first (cheap mistakes show early), then tokenizers, then models. Raises `UserError`."""
    prompts = PROMPT_SOURCES.load(config.prompts["type"], "prompts.type")(config.prompts["config"], config.seed)
    heldout, grader = _heldout(config)
    makers: list[TermMaker] = [TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()]

    tokenizer = load_tokenizer(config.student.model, "student.model", config.student.revision)
    vocab, notes = common_vocabulary(config, tokenizer), list[str]()
    ends = eos_ids(config.student.model, "student.model", tokenizer, config.student.revision)
    first = prompts.at(0, 0, config.batch.prompts)
    for finding in (found for name in config.teachers for found in examine_teacher(config, name, tokenizer, ends, first[0])):
        if finding.level == "error":
            raise UserError(f"{finding.subject}: {finding.text}; {finding.fix}")
        if finding.level == "warn":
            notes.append(f"{finding.subject}: {finding.text}; {finding.fix}")

    clock, device = Clock(), accelerator.device
    student = load_student(config.student, checkpoint).to(device)
    vocab = min(vocab, output_head(student).weight.shape[0])
    sampler = _sampler(config, student, vocab, ends, clock)
    chunk_bytes = config.objective.max_logits_mib * 2**20
    teachers = TeacherPool(
        {
            name: HFTeacher(name, teacher, vocab, device, chunk_bytes, busy=lambda: sampler.busy, clock=clock)
            for name, teacher in config.teachers.items()
        }
    )
    learner = Learner(
        student,
        config.objective,
        config.optimizer,
        accelerator=accelerator,
        num_steps=config.steps,
        heads=teachers.heads,
        vocab=vocab,
        temperature=config.loss_temperature,
    )
    limit = context_limit(student.config.get_text_config())  # type: ignore[union-attr,operator]
    contexts = Contexts(tokenizer, min(config.sampling.max_context or limit, limit), config.sampling.max_new_tokens)
    _refuse_long_prompts(config, prompts, contexts)
    num_topk = max(maker.num_student_topk for maker in makers)
    sampling = Sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k, num_topk)
    return Parts(
        accelerator,
        clock,
        tokenizer,
        prompts,
        contexts,
        sampling,
        sampler,
        teachers,
        makers,
        learner,
        heldout,
        grader,
        notes,
    )


def _refuse_long_prompts(config: RunConfig, prompts: PromptSource, contexts: Contexts) -> None:
    """Refuses a run whose first steps would all be empty. A single long prompt is skipped and counted instead."""
    soon = [prompt for step in range(min(config.steps, 8)) for prompt in prompts.at(step, 0, config.batch.prompts)]
    if all(contexts(prompt) is None for prompt in soon):
        raise UserError(
            f"sampling.max_context: every prompt of the first steps is longer than the context of {contexts.max_context} "
            "tokens; raise it, or choose shorter prompts"
        )
    contexts.num_skipped = 0  # that was a look ahead


def _heldout(config: RunConfig) -> tuple[list[Prompt], Grader | None]:
    """The held-out problems and what grades them, where the recipe has any."""
    if config.eval.prompts is None:
        return [], None
    heldout = load_prompts(config.eval.prompts, "eval.prompts")
    if config.eval.reward is None and any(prompt.answer is None for prompt in heldout):
        raise UserError("eval.prompts.columns.answer: a held-out problem has no answer; name the column, or set eval.reward")
    return heldout, Grader(config.eval.time_limit_s, verifier=config.eval.reward)


def _sampler(config: RunConfig, student: nn.Module, vocab: int, ends: tuple[int, ...], clock: Clock) -> Sampler:
    dtype = config.objective.precision if config.sampler.dtype == "auto" else config.sampler.dtype
    return HFSampler(
        student,
        vocab,
        ends,
        max_rows=config.sampler.max_rows,
        chunk_tokens=config.sampler.chunk_tokens,
        dtype=getattr(torch, dtype),
        clock=clock,
    )


def common_vocabulary(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids the student shares with every teacher. Raises `UserError` where they mean different tokens."""
    sizes = []
    for name, teacher in config.teachers.items():
        field = f"teachers.{name}.model"
        other = load_tokenizer(teacher.model, field, teacher.revision)
        sizes.append(shared_vocabulary(tokenizer.get_vocab(), other.get_vocab(), field).size)
    return min(sizes)
