"""What the section `reward:` must satisfy: its values, the functions that it names, and the prompts' answers."""

import ast
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from opd.errors import UserError
from opd.eval.verifier import locate_verifier
from opd.records import Prompt
from opd.registry import TERM_MAKERS
from opd.reward.config import RewardConfig
from opd.spelling import nearest

if TYPE_CHECKING:
    from opd.config import RunConfig


def check_reward(config: RewardConfig, run: "RunConfig") -> None:
    """Refuses values out of range and those without an effect. Raises `UserError` naming the field."""
    if not 0 <= config.length_cost < math.inf:
        raise UserError(f"reward.length_cost is {config.length_cost}: it must be 0 or more")
    compared = any(TERM_MAKERS.load(name, "terms").compares_groups for name in run.terms)
    for name in ("score", "length_cost"):
        if getattr(config, name) != getattr(RewardConfig, name) and not compared:
            raise UserError(f"reward.{name}: no term of this recipe reads scores, as group_reward does; leave it out")
    if not 0 < config.time_limit_s < math.inf:
        raise UserError(f"reward.time_limit_s is {config.time_limit_s}: it must be above 0")
    if config.verifier is not None and ":" not in config.verifier:
        hint = nearest(config.verifier, ["answer", "majority"])
        raise UserError(f"reward.outcome is {config.outcome!r}: it must be answer, majority or FILE.py:FUNCTION{hint}")
    if run.prompts["type"] == "environment" and config.outcome != "answer":
        raise UserError("reward.outcome: of an episode its environment says what came of it; leave it out")
    if config.outcome == "majority" and run.batch.rollouts_per_prompt < 2:
        raise UserError("batch.rollouts_per_prompt is 1: one answer is always reward.outcome=majority; set 3 or more")


def check_reward_files(config: RewardConfig) -> None:
    """Refuses functions that their files do not define, without running these. Raises `UserError` naming the field."""
    for name, spec in (("outcome", config.verifier), ("score", config.score)):
        if spec is not None:
            _check_function(spec, f"reward.{name}")


def _check_function(spec: str, field: str) -> None:
    path, name = locate_verifier(spec, field)
    try:
        bound = set(_bound(ast.parse(path.read_bytes(), path.name).body))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{field}: {path} is not Python: {error}") from None
    if not bound & {name, "*", "__getattr__"}:
        raise UserError(f"{field}: {path} defines no {name!r}{nearest(name, sorted(bound))}")


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that these statements bind where they stand; "*" for an import of whatever a module has."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name  # what is bound inside stays there
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from _bound(ast.iter_child_nodes(node))


def check_answers(run: "RunConfig", prompts: Sequence[Prompt]) -> None:
    """Refuses prompts without an answer where a term or the reward reads it. Raises `UserError` naming the fix."""
    for name in run.terms:
        if TERM_MAKERS.load(name, "terms").needs_answers:
            refuse_unanswered(prompts, f"terms.{name}")
    if run.reward is not None and run.reward.outcome == "answer":
        refuse_unanswered(prompts)


def refuse_unanswered(prompts: Sequence[Prompt], reader: str = "reward.outcome=answer") -> None:
    """Raises `UserError` naming the first prompt without an answer that `reader` needs; of episodes nobody needs one."""
    missing = next((prompt for prompt in prompts if prompt.answer is None and prompt.task is None), None)
    if missing is not None:
        instead = ", or set reward.outcome to majority or to FILE.py:FUNCTION" if reader.startswith("reward") else ""
        raise UserError(
            f"prompts.columns.answer: prompt {missing.id} has no answer for {reader}; name the column of the answers"
            f"{instead}"
        )
