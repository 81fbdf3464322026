"""What would make numbers silently wrong, found from tokenizers, templates and configurations alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from opd.alignment.aligner import Aligner
from opd.alignment.coverage import Coverage
from opd.alignment.vocabulary import SharedVocabulary, shared_vocabulary
from opd.config import RunConfig
from opd.envs.formats import tool_format
from opd.locate import locate
from opd.models import model_limits
from opd.pairing import Pairing, pair, unaligned_terms
from opd.records import Prompt
from opd.registry import TERM_MAKERS
from opd.teachers.config import START, field_of
from opd.teachers.opening import TeacherFacts, base_key, connect, facts_of
from opd.tokenization import eos_ids, load_tokenizer, render, render_text
from opd.validation import controller_notes, open_prompts

SHOWN = 40  # characters on either side of a difference
SAMPLE = 256  # prompts whose length is measured


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix` says what to change where `level` is not ok."""

    level: Literal["ok", "warn", "error"]
    subject: str
    text: str
    fix: str = ""


def examine(config: RunConfig) -> list[Finding]:
    """Everything worth knowing about a recipe before it costs anything. Raises `UserError` only for what cannot be read."""
    source = open_prompts(config)
    steps = range(min(config.steps, math.ceil(SAMPLE / config.batch.prompts)))
    drawn = [prompt for step in steps for prompt in source.at(step, 0, config.batch.prompts)]
    prompts = list({prompt.id: prompt for prompt in drawn}.values())[:SAMPLE]  # a short file comes round again
    tokenizer = load_tokenizer(config.student.model, "student.model", config.student.revision)
    findings = [*_prompt(tokenizer, prompts[0]), _lengths(config, tokenizer, prompts), _temperature(config)]
    ends = eos_ids(config.student.model, "student.model", tokenizer, config.student.revision)
    findings.append(Finding("ok", "EOS of the student", _names(tokenizer, ends)))
    findings += _head(
        "student.model", model_limits(config.student.model, "student.model", config.student.revision)[1], tokenizer
    )
    served = connect(config.frozen)
    facts = {name: facts_of(name, model, served) for name, model in config.frozen.items()}
    pairing = pair(tokenizer, ends, facts, config.teachers, config.alignment)
    makers = {name: TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()}
    findings += [Finding("error", "terms", text, "choose such a term") for text in unaligned_terms(makers, pairing, facts)]
    findings += [Finding("warn", "weak reference", note, "see docs/alignment.md") for note in pairing.notes]
    for note in controller_notes(config):
        findings.append(Finding("warn", "rollout", note.removeprefix("WARNING: "), "see docs/stride.md"))
    findings += examine_models(config, facts, pairing, tokenizer, ends, prompts)
    return [*findings, _memory(config)]


def examine_models(
    config: RunConfig,
    facts: Mapping[str, TeacherFacts],
    pairing: Pairing,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    prompts: Sequence[Prompt],
) -> list[Finding]:
    """Whether each frozen model and the student mean the same: tokens, EOS, template, vocabulary, context. A run looks
    too."""
    findings = _shown_tools("student.model", tokenizer, prompts)
    for name, one in facts.items():
        if name == START:  # the student itself
            continue
        aligner = pairing.aligners.get(name)
        if aligner is None:
            findings += _vocabularies(one.field, tokenizer, one.tokenizer, ends)
            findings += _same_eos(one.field, tokenizer, ends, one.eos_ids)
            findings += _same_rendering(one.field, tokenizer, one.tokenizer, prompts[0])
            findings += _context(config, one.field, one.max_context)
        else:
            findings += _alignment(config, one, aligner, tokenizer, prompts) + _shown_tools(
                one.field, one.tokenizer, prompts
            )
        findings += _head(one.field, one.num_rows, one.tokenizer)
    return findings


def _alignment(
    config: RunConfig, teacher: TeacherFacts, aligner: Aligner, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[Finding]:
    """How well a model with another tokenizer can follow the student, measured on the prompts' own text."""
    found, contexts = Coverage(), [aligner.context(prompt) for prompt in prompts]
    for prompt, context in zip(prompts, contexts):
        ids = tokenizer(prompt.problem or prompt.text or "", add_special_tokens=False)["input_ids"]
        found += Coverage.of(aligner.align(np.asarray(ids, np.int32), context[:1]))
    share = f"{found.byte_coverage:.1%} of the bytes of {len(prompts)} prompts are aligned"
    text = f"differ from the student's; {share}, {found.one_to_one_share:.1%} of the tokens one to one"
    floor = config.alignment.min_byte_coverage
    low = found.byte_coverage < floor
    fix = f"see opd align; a step below alignment.min_byte_coverage={floor} stops the run" if low else ""
    masked = [row.token for row in aligner.special_table if row.how == "masked"]
    shown = ", ".join(masked[:3]) + (", ..." if len(masked) > 3 else "")
    special = f"{len(masked)} of the student's have no counterpart and are not trained ({shown})" if masked else "all mapped"
    first = teacher.tokenizer.decode(contexts[0])
    longest, wanted = max(map(len, contexts)), config.sampling.max_new_tokens
    tokens = round(wanted * found.teacher_tokens / max(1, found.student_tokens))
    short = longest + tokens > teacher.max_context
    room = f"{teacher.max_context} tokens; the longest prompt has {longest}, an answer of {wanted} about {tokens}"
    return [
        Finding("warn" if low else "ok", f"{teacher.field} tokens", text, fix),
        Finding("ok", f"{teacher.field} special tokens", special),
        Finding("ok", f"{teacher.field} template", f"its own; the first prompt becomes {first!r}"),
        Finding(
            "warn" if short else "ok",
            f"{teacher.field} context",
            room,
            "what lies beyond is never judged: lower sampling.max_new_tokens, or choose shorter prompts" if short else "",
        ),
    ]


def _prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[Finding]:
    ids = render(tokenizer, prompt)
    found = [Finding("ok", f"first prompt ({len(ids)} tokens)", repr(render_text(tokenizer, prompt)))]
    bos = tokenizer.bos_token_id
    if bos is None:
        return [*found, Finding("ok", "BOS in the prompt", "the tokenizer has none")]
    leading = int((ids != bos).argmax()) if (ids != bos).any() else len(ids)
    text = f"{leading} at the start ({tokenizer.bos_token!r})"
    if leading > 1:
        return [*found, Finding("warn", "BOS in the prompt", text, "remove it from the template or from the prompt")]
    return [*found, Finding("ok", "BOS in the prompt", text)]


def _shown_tools(field: str, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[Finding]:
    """Whether a chat template writes the tools of a prompt down; the tiny family knows its only one."""
    prompt = next((one for one in prompts if one.tools and one.text is None), None)
    if prompt is None or not tokenizer.chat_template or tool_format(tokenizer, tools=False).name == "tiny":
        return []
    if render_text(tokenizer, prompt) != render_text(tokenizer, replace(prompt, tools=())):
        return [Finding("ok", f"{field} tools", "the chat template shows them")]
    text = f"the chat template writes none of the {len(prompt.tools)} tools of prompt {prompt.id}: the model sees no schema"
    fix = "take a model whose template knows tools, or describe them and the form of a call in prompts.system"
    return [Finding("warn", f"{field} tools", text, fix)]


def _lengths(config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]) -> Finding:
    limit, _ = model_limits(config.student.model, "student.model", config.student.revision)
    limit = min(config.sampling.max_context or limit, limit)
    lengths = np.array([len(render(tokenizer, prompt)) for prompt in prompts])
    text = f"{len(lengths)} prompts: median {int(np.median(lengths))}, longest {lengths.max()}; context {limit} tokens"
    too_long, cut = int((lengths >= limit).sum()), int((lengths + config.sampling.max_new_tokens > limit).sum())
    if too_long == len(lengths):
        return Finding("error", "prompt lengths", text + "; all are too long", "raise sampling.max_context")
    if too_long or cut:
        fix = "shorter prompts or a student with a longer context" if too_long else "lower sampling.max_new_tokens"
        return Finding(
            "warn", "prompt lengths", f"{text}; {too_long} are skipped, {cut} leave less than max_new_tokens", fix
        )
    return Finding("ok", "prompt lengths", text)


def _temperature(config: RunConfig) -> Finding:
    loss, sampling = config.loss_temperature, config.sampling
    text = f"rollouts at {sampling.temperature}, log-probs of student and teacher in the loss at {loss}"
    if loss != sampling.temperature:
        return Finding("warn", "temperature", text, "set objective.temperature=null to use the sampling temperature")
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        text += "; the sampled distribution is cut (top_p, top_k), the loss uses the whole one"
        return Finding("warn", "temperature", text, "sampling.top_p=1 and sampling.top_k=0 make the two agree")
    return Finding("ok", "temperature", text)


def _names(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    return ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in ids)


def _head(field: str, rows: int, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    used = max(tokenizer.get_vocab().values()) + 1
    if rows < used:
        text = f"{rows} output rows for {used} token ids"
        return [Finding("warn", f"{field} vocabulary", text, "the last tokens can never be sampled; check the tokenizer")]
    text = f"{used} token ids, {rows} output rows" + (f": {rows - used} rows of padding are left out" if rows > used else "")
    return [Finding("ok", f"{field} vocabulary", text)]


def _vocabularies(
    field: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, ends: tuple[int, ...]
) -> list[Finding]:
    """Of a model that reads the student's own tokens."""
    shared = shared_vocabulary(student.get_vocab(), teacher.get_vocab())
    assert isinstance(shared, SharedVocabulary)
    if max(ends) >= shared.size:
        text = f"{field}: the student's EOS is not a token of the teacher"
        return [Finding("error", "token -> id maps", text, "another teacher")]
    if shared.dropped:
        text = f"{field}: equal below {shared.size}; {len(shared.dropped)} tokens that one side lacks are left out"
        fix = "harmless unless the student needs " + ", ".join(shared.dropped[:3])
        return [Finding("warn", "token -> id maps", text, fix)]
    return [Finding("ok", "token -> id maps", f"{field}: {shared.size} ids, all equal")]


def _same_eos(
    field: str, tokenizer: PreTrainedTokenizerBase, mine: tuple[int, ...], theirs: tuple[int, ...]
) -> list[Finding]:
    if mine == theirs:
        return [Finding("ok", f"{field} EOS", "the student's")]
    text = f"the teacher ends with {_names(tokenizer, theirs)}, the student with {_names(tokenizer, mine)}"
    fix = "where the student ends with a token the teacher never ends with, it is taught not to stop; give both one EOS"
    return [Finding("warn" if set(mine) & set(theirs) else "error", f"{field} EOS", text, fix)]


def _same_rendering(
    field: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, prompt: Prompt
) -> list[Finding]:
    if prompt.text is not None or not teacher.chat_template:
        return []
    theirs, mine = render_text(teacher, prompt), render_text(student, prompt)
    if theirs == mine:
        return [Finding("ok", f"{field} template", "renders the first prompt as the student's does")]
    shown = f"{_around_difference(theirs, mine)!r}, the student's {_around_difference(mine, theirs)!r}"
    text = f"renders the first prompt as {shown}; it scores the student's rendering, which it may not be used to"
    fix = "give both one chat template, or pass prompts.chat_template_kwargs that make them agree"
    return [Finding("warn", f"{field} template", text, fix)]


def _around_difference(text: str, other: str) -> str:
    """Where a text begins to differ from another, with some of what is around it."""
    place = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
    start, stop = max(0, place - SHOWN), place + SHOWN
    return f"{'...' if start else ''}{text[start:stop]}{'...' if stop < len(text) else ''}"


def _context(config: RunConfig, field: str, theirs: int) -> list[Finding]:
    mine, _ = model_limits(config.student.model, "student.model", config.student.revision)
    mine = min(config.sampling.max_context or mine, mine)
    if theirs < mine:
        fix = f"set sampling.max_context={theirs}"
        return [Finding("error", f"{field} context", f"{theirs} tokens, rollouts may have {mine}", fix)]
    return [Finding("ok", f"{field} context", f"{theirs} tokens")]


def _memory(config: RunConfig) -> Finding:
    size = {"float32": 4, "bfloat16": 2}
    student, _ = _parameters(config.student.model, "student.model", config.student.revision)
    master = size[config.student.dtype]
    trained = student if config.student.lora is None else 0
    makers = [TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()]
    copies = 2 if trained and any(maker.needs_reference for maker in makers) else 1  # the frozen start beside the student
    sampler = config.objective.precision if config.sampler.dtype == "auto" else config.sampler.dtype
    total = copies * student * master + trained * 3 * master
    total += 0 if sampler == config.student.dtype else student * size[sampler]
    bases = {base_key(model): (name, model) for name, model in config.frozen.items()}  # those that share one count once
    for name, teacher in bases.values():
        if teacher.urls or teacher.model is None or (name == START and config.student.lora is not None):
            continue  # somewhere else, or beneath the student's adapters
        count, stored = _parameters(teacher.model, field_of(name), teacher.revision)
        total += count * (stored if teacher.dtype == "auto" else size[teacher.dtype])
    total += 2 * config.objective.max_logits_mib * 2**20
    text = f"about {total / 2**30:.1f} GiB for weights, gradients, optimizer and logits; activations and KV cache on top"
    return Finding("ok", "memory", f"{text} (student {student / 1e6:,.1f} M parameters)")


def _parameters(name: str, field: str, revision: str | None) -> tuple[int, int]:
    """(parameters, bytes of one in the checkpoint), from the configuration."""
    config = AutoConfig.from_pretrained(locate(name, field), revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return sum(parameter.numel() for parameter in model.parameters()), dtype.itemsize
