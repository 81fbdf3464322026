"""Can the servers of a recipe's teachers answer what its terms will ask? Decided before the student is loaded."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.errors import UserError
from opd.plugins import TermMaker
from opd.teachers.abilities import Abilities

if TYPE_CHECKING:
    from opd.config import RunConfig


def check_abilities(config: "RunConfig", makers: Sequence[TermMaker], served: Mapping[str, Abilities]) -> list[str]:
    """Notes for the user about the teachers behind servers. Raises `UserError` for what one of them cannot do."""
    terms = [(name, config.terms[name], maker) for name, maker in zip(config.terms, makers)]
    notes = []
    for name, abilities in served.items():
        field = f"teachers.{name}.url"
        if not abilities.hidden:
            _check_hidden(config, terms, field)
        if not abilities.temperature and config.loss_temperature != 1.0 and any(maker.needs_teacher for maker in makers):
            raise UserError(
                f"objective.temperature: {config.loss_temperature:g}, but the server of {field} scores at 1 alone: set it "
                "and sampling.temperature to 1, or serve the teacher with --backend hf"
            )
        for term, section, maker in terms:
            k = max(maker.num_student_topk, getattr(section, "k", 0) or 0)
            if abilities.max_k is not None and k > abilities.max_k:
                raise UserError(
                    f"terms.{term}.k: {k}, but the server of {field} gives {abilities.max_k} log-probs a token: lower it, "
                    "or start the server with a larger --max-logprobs"
                )
        if abilities.ids == "overlap":
            notes += _overlap_notes(terms, field, abilities)
    return notes


def _check_hidden(config: "RunConfig", terms: Sequence[tuple[str, Any, TermMaker]], field: str) -> None:
    for term, _, maker in terms:
        if maker.needs_hidden:
            raise UserError(
                f"terms.{term}: learns from hidden states, which the server of {field} does not give: set "
                f"terms.{term}.form=topk or sampled, or serve the teacher with --backend hf"
            )
    evaluates = config.eval.prompts is not None or config.eval.environment is not None
    if evaluates and config.eval.kl_prompts and config.teachers:
        raise UserError(
            f"eval.kl_prompts: reads hidden states, which the server of {field} does not give: set eval.kl_prompts=0, or "
            "serve the teacher with --backend hf"
        )


def _overlap_notes(terms: Sequence[tuple[str, Any, TermMaker]], field: str, abilities: Abilities) -> list[str]:
    """One note where a term asks for tokens of the student's choice, of which some may then be absent."""
    asking = [(term, getattr(section, "tail", "tail")) for term, section, maker in terms if maker.num_student_topk]
    for term, tail in asking:
        if tail in ("renormalise", "truncate"):  # of a token that the teacher thinks impossible nothing would be left
            raise UserError(
                f"terms.{term}.tail: {tail} loses the student's tokens that are not among the teacher's {abilities.max_k} "
                f"most likely, which is all that the server of {field} knows: set tail=tail, or source=teacher"
            )
    if not asking:
        return []
    return [
        f"{field}: the server finds the student's tokens among the teacher's {abilities.max_k} most likely alone "
        f"({', '.join(term for term, _ in asking)}); others count in the tail"
    ]
