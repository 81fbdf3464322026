"""A teacher writes the prompts it will judge: DF-OPD, with no data but the teacher's own.

One chat turn with one plain instruction a prompt; what it writes after thinking is the prompt, word for word. No examples
are shown and nothing is selected: a draft is drawn again only where it cannot be used, being empty, cut short or too long.
Draft a of prompt i draws its noise from (seed, i, a) alone, so a smaller pool is the beginning of a larger one.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from opd.data_free.drafts import Drafts, Kind
from opd.data_free.pool import Row, check_out, pool_digest, read_pool, write_pool
from opd.data_free.served import connect, open_served
from opd.data_free.thinking import OPEN_THOUGHT, after_thinking
from opd.errors import UserError
from opd.eval.models import Opened, open_model
from opd.eval.options import EvalOptions
from opd.eval.repetition import is_repetitive
from opd.eval.samples import Sampled, SampleFile
from opd.evaluation import public_name
from opd.files import explain_unwritable
from opd.progress import counting_bar
from opd.records import DEFAULT_DOMAIN, Array, Prompt
from opd.rollouts import InPlay, Player
from opd.students.noise import slot_seed
from opd.teachers.client.addresses import is_address
from opd.templates import check_template
from opd.tokenization import render_text

INSTRUCTION = "Write one challenging {domain} problem. Output only the problem statement."
DRAFTS = ".drafts.jsonl"
DIGESTS = {"model": "another --teacher", "instruction": "another --instruction, --system or --thinking"}
FIXES: dict[Kind, str] = {
    "empty": "change --instruction",
    "truncated": "raise --max-new-tokens",
    "too_long": "raise --max-prompt-tokens",
}


@dataclass(frozen=True)
class Request:
    """What a teacher is asked to write. `teacher` is as `--teacher` has it; `options` say how it samples, and where."""

    teacher: str
    num_prompts: int
    options: EvalOptions
    instruction: str  # as the teacher reads it
    domain: str = DEFAULT_DOMAIN
    system: str | None = None
    thinking: bool | None = None  # the chat template's `enable_thinking`
    max_prompt_tokens: int = 1024  # by the teacher's tokenizer
    max_attempts: int = 8
    allow_short: bool = False  # leave out prompts of which no draft was usable

    @property
    def prompt(self) -> Prompt:
        system = ({"role": "system", "content": self.system},) if self.system else ()
        thinking = {} if self.thinking is None else {"enable_thinking": self.thinking}
        messages = (*system, {"role": "user", "content": self.instruction})
        return Prompt("the instruction", messages, chat_template_kwargs=thinking)


def instruction_text(template: str | None, domain: str | None) -> str:
    """The instruction with the domain filled in. Raises `UserError` for one that needs what there is none of."""
    if template is None:
        template = INSTRUCTION if domain else INSTRUCTION.replace("{domain} ", "")
    if "{domain}" in template and not domain:
        raise UserError("--instruction: its {domain} has nothing to stand for; name one with --domain, or take it out")
    if not template.strip():
        raise UserError("--instruction: the file is empty; write what the teacher is asked")
    check_template("--instruction", template, ("domain",))
    return template.strip().replace("{domain}", domain or "")


def author_prompts(
    request: Request, out: Path, *, source: Path | None = None, resume: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Writes the pool `out` (.jsonl) and returns facts about it; the drafts stay beside it, in `.drafts.jsonl`.

    `out` appears when it is whole. A killed command goes on from the drafts, as does one that asks for more prompts; one
    that would take prompts out of the pool is refused. `source` is the instruction's file, and is never overwritten. Raises
    `UserError`, also when no draft of a prompt was usable and `allow_short` is not set.
    """
    began = time.monotonic()
    there = check_out(out, source and source.expanduser(), overwrite=overwrite, resume=resume, beside=(DRAFTS,))
    if there and resume and drafts_of(out) not in there:
        raise UserError(
            f"--resume: {out} has no drafts beside it ({drafts_of(out).name}); name another --out, or add --overwrite"
        )
    with explain_unwritable(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    begin = {"resume": resume, "overwrite": overwrite}
    if is_address(request.teacher):
        served = connect(request.options)
        name = Path(str(served.info.get("model", "served"))).name
        rows, facts = asyncio.run(_author(request, out, open_served(served, request.options), name, begin))
    else:
        model = open_model(request.teacher, request.options, "--teacher")
        rows, facts = asyncio.run(_author(request, out, model, public_name(request.teacher), begin))
    if resume and out.exists():
        _check_nothing_lost(read_pool(out, "--out"), rows, out, request)
    write_pool(out, rows)
    return {**facts, "digest": pool_digest(rows), "seconds": round(time.monotonic() - began, 1)}


def _check_nothing_lost(old: Sequence[Row], new: Sequence[Row], out: Path, request: Request) -> None:
    """Refuses to go on with a pool by taking rows out of it, or by writing over what somebody changed in it."""
    drafted = {row.id: _written(row) for row in new}
    lost = [row.id for row in old if row.id not in drafted]
    if lost:
        raise UserError(
            f"--resume: {out} has {lost[0]}, which is not written with --n {request.num_prompts} and --max-attempts "
            f"{request.max_attempts}; raise them, name another --out, or use --overwrite"
        )
    if changed := [row.id for row in old if _written(row) != drafted[row.id]]:
        raise UserError(
            f"--resume: {out} was changed since: {changed[0]} is not what the drafts have; name another --out, or use "
            "--overwrite"
        )


def _written(row: Row) -> Row:
    """The row without what differs after an upgrade, or when the teacher's folder was renamed."""
    free = {"opd", "teacher"}
    return replace(row, provenance={name: value for name, value in row.provenance.items() if name not in free})


def drafts_of(out: Path) -> Path:
    """The file of a pool's drafts."""
    return out.with_suffix(DRAFTS)


async def _author(
    request: Request, out: Path, model: AbstractAsyncContextManager[Opened], teacher: str, begin: dict[str, bool]
) -> tuple[list[Row], dict[str, Any]]:
    async with model as opened:
        ids, opens_thought = _instruction_ids(opened, request)
        header = {
            "model": opened.identity,
            **_fixing_numbers(request),
            "domain": request.domain,  # before the instruction, which it changes: the first that differs is named
            "instruction": blake2b(ids.tobytes(), digest_size=16).hexdigest(),  # as the teacher sees it
            "max_prompt_tokens": request.max_prompt_tokens,
        }
        tokenizer, limit = opened.contexts.tokenizer, request.max_prompt_tokens

        def kind(draft: Sampled) -> Kind:
            if draft.finish != "eos":
                return "truncated"
            if not draft.response:
                return "empty"
            return "too_long" if len(tokenizer(draft.response, add_special_tokens=False)["input_ids"]) > limit else ""  # type: ignore[arg-type]

        drafts = Drafts(SampleFile(drafts_of(out), header, digests=DIGESTS, **begin), request.max_attempts, kind)
        await _write(request, opened, drafts, opens_thought)
    rows = _rows(request, drafts, provenance(request, teacher, opened.identity))
    asked = range(request.num_prompts)
    tokens = sum(draft.num_tokens for index in asked for draft in drafts.of(index))
    facts = {"teacher": teacher, "num_prompts": len(rows), "unusable": drafts.unusable(asked), "num_tokens": tokens}
    return rows, facts


def _instruction_ids(opened: Opened, request: Request) -> tuple[Array, bool]:
    """(its ids [c] as the teacher sees it, whether its template opens the thinking). Raises `UserError`."""
    tokenizer, prompt = opened.contexts.tokenizer, request.prompt
    if not tokenizer.chat_template:
        raise UserError("--teacher: its tokenizer has no chat template; name a model that has one")
    try:
        ids, text = opened.contexts(prompt), render_text(tokenizer, prompt)
    except UserError as error:  # it does not know the options of this command
        field = "--system" if request.system else "--teacher"
        raise UserError(f"{field}: {str(error).removeprefix('prompts: ')}") from None
    if ids is None:
        limit = opened.contexts.max_context
        raise UserError(f"--instruction: it leaves no room in the teacher's context of {limit} tokens; shorten it")
    if request.thinking is not None:
        other = replace(request, thinking=not request.thinking)
        if render_text(tokenizer, other.prompt) == text:
            raise UserError("--thinking: the teacher's chat template has no such switch; leave it out")
    return ids, OPEN_THOUGHT.search(text) is not None


def _fixing_numbers(request: Request) -> dict[str, Any]:
    """Those of the options that drafts depend on. Servers batch as they like, so theirs are not among them."""
    numbers = request.options.fixing_numbers()
    return {**numbers, "sampler": "opd"} if is_address(request.teacher) else numbers


async def _write(request: Request, opened: Opened, drafts: Drafts, opens_thought: bool) -> None:
    """Draws drafts until every prompt has a usable one, or has had all its attempts."""
    player = Player(opened.sampler, opened.contexts, request.options.sampling, InPlay())
    tokenizer, prompt, num = opened.contexts.tokenizer, request.prompt, request.num_prompts

    async def draw(index: int) -> None:
        attempt = len(drafts.of(index))
        rollout = await player.play(prompt, index, slot_seed(request.options.seed, index, attempt))
        assert rollout is not None, "the instruction leaves room"
        ids = rollout.turns[0].sampled_ids
        text = after_thinking(tokenizer, ids, opened=opens_thought)
        drafts.add(Sampled(index, attempt, text, len(ids), rollout.finish, is_repetitive(ids)))
        bar.update(task, advance=index < num and drafts.usable(index) is not None)

    async def fill(block: Sequence[int]) -> None:
        while left := [index for index in block if not drafts.settled(index)]:
            await asyncio.gather(*map(draw, left))
        _check_usable([index for index in block if index < num], drafts, request)

    blocks = drafts.blocks(num, opened.block)
    _check_usable([index for index in range(num) if drafts.settled(index)], drafts, request)
    with counting_bar() as bar:
        done = sum(drafts.usable(index) is not None for index in range(num))
        task = bar.add_task(request.domain, total=num, completed=done)
        if opened.block is None:
            await asyncio.gather(*map(fill, blocks))
        else:
            for block in blocks:
                await fill(block)


def _check_usable(indices: Sequence[int], drafts: Drafts, request: Request) -> None:
    """Refuses a prompt without a usable draft, unless the pool may be short."""
    for index in indices:
        if drafts.usable(index) is None and not request.allow_short:
            counts = drafts.unusable([index])
            raise UserError(
                f"--max-attempts is {request.max_attempts}: no draft of {request.domain}-{index} can be used "
                f"({_listed(counts)}); {FIXES[max(counts, key=counts.__getitem__)]} and add --overwrite, "
                "or go on without such prompts with --resume --allow-short"
            )


def _listed(counts: Mapping[Kind, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count)


def _rows(request: Request, drafts: Drafts, provenance: Mapping[str, Any]) -> list[Row]:
    asked = range(request.num_prompts)
    found = [draft for index in asked if (draft := drafts.usable(index)) is not None]
    if not found:
        counts = drafts.unusable(asked)
        fix = FIXES[max(counts, key=counts.__getitem__)]
        raise UserError(f"--allow-short: no draft can be used ({_listed(counts)}); {fix} and add --overwrite")
    domain = request.domain
    return [Row(f"{domain}-{one.index}", one.response, domain, one.sample, one.num_tokens, provenance) for one in found]


def provenance(request: Request, teacher: str, identity: str) -> dict[str, Any]:
    """The same in every row. `identity`: of the model, see `opd.eval.models.Opened`; vLLM's is a name and no digest."""
    options = request.options
    names = ("temperature", "top_p", "top_k", "max_new_tokens", *(() if options.url else ("dtype", "max_rows")))
    sampling = {name: getattr(options, name) for name in names}
    return {
        "teacher": teacher,
        "weights": identity if options.url is None or is_address(request.teacher) else None,
        "instruction": request.instruction,
        "system": request.system,
        "sampling": {**sampling, "thinking": request.thinking},
        "max_prompt_tokens": request.max_prompt_tokens,
        "seed": options.seed,
        "opd": version("opd"),
    }
