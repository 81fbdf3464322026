"""Which ids student and teachers have in common, and what aligns those that read with another tokenizer."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.alignment.aligner import Aligner
from opd.alignment.config import AlignmentConfig
from opd.alignment.vocabulary import shared_vocabulary
from opd.errors import UserError
from opd.plugins import TermMaker
from opd.teachers.config import TeacherConfig, weak_name
from opd.teachers.opening import TeacherFacts

PROBED = 64  # tokens that one side lacks, of which it is tried whether the other writes them


@dataclass(frozen=True)
class Pairing:
    """How the frozen models of a run read what the student samples."""

    vocab: int  # ids of the student in use: all, or those that it shares with every teacher that reads them
    vocabs: Mapping[str, int]  # ids that each frozen model is asked about
    aligners: Mapping[str, Aligner]  # of the frozen models with another tokenizer
    notes: Sequence[str]


def pair(
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    facts: Mapping[str, TeacherFacts],
    teachers: Mapping[str, TeacherConfig],
    config: AlignmentConfig,
) -> Pairing:
    """`ends` are the student's EOS ids, `facts` those of every frozen model by name.

    Raises `UserError` for a weak reference that is not of its teacher's family, and for a tokenizer that cannot be aligned.
    """
    notes = [note for name, teacher in teachers.items() if (note := _family(name, teacher, facts))]
    own = tokenizer.get_vocab()
    shared: dict[str, int] = {}
    aligners: dict[str, Aligner] = {}
    alike: dict[tuple[str, ...], Aligner] = {}
    for name, one in facts.items():
        try:
            found = shared_vocabulary(own, one.tokenizer.get_vocab(), one.field)
            if _writes(tokenizer, found.dropped) or _writes(one.tokenizer, found.dropped):
                raise UserError(
                    f"{one.field}: one of the tokenizers writes text with {found.dropped[0]!r}, the other does not"
                )
            shared[name] = found.size
        except UserError:
            key = _identity(one)
            if key not in alike:
                alike[key] = make_aligner(tokenizer, ends, one, config)
            aligners[name] = alike[key]
    vocab = min([max(own.values()) + 1, *shared.values()])
    rows = {name: min(max(facts[name].tokenizer.get_vocab().values()) + 1, facts[name].num_rows) for name in aligners}
    return Pairing(vocab, {**dict.fromkeys(shared, vocab), **rows}, aligners, notes)


def unaligned_terms(makers: Mapping[str, TermMaker], pairing: Pairing, facts: Mapping[str, TeacherFacts]) -> Iterator[str]:
    """What is wrong with each term that needs the student's own tokens where a teacher reads others."""
    for name, maker in makers.items():
        if pairing.aligners and not maker.across_tokenizers:
            field = facts[next(iter(pairing.aligners))].field
            yield (
                f"terms.{name}: {field} reads with another tokenizer than the student, where only terms on aligned text "
                "work: terms.reverse_kl.form=sampled, terms.shared_topk or terms.compass"
            )


def make_aligner(
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], teacher: TeacherFacts, config: AlignmentConfig
) -> Aligner:
    """Raises `UserError` naming the teacher's field."""
    return Aligner(
        tokenizer,
        teacher.tokenizer,
        student_eos=ends,
        teacher_eos=teacher.eos_ids,
        special_tokens=config.special_tokens,
        max_context=teacher.max_context,
        field=teacher.field,
    )


def _writes(tokenizer: Any, tokens: Sequence[str]) -> bool:
    """Whether it makes one of these tokens from plain text: then leaving it out would change how it cuts text."""
    vocab, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    ids = [vocab[token] for token in tokens if token in vocab and token not in added]
    texts = [str(tokenizer.decode([index])) for index in ids[:PROBED]]
    return any(index in tokenizer(text, add_special_tokens=False)["input_ids"] for index, text in zip(ids, texts))


def _identity(teacher: TeacherFacts) -> tuple[str, ...]:
    """Equal for models that read every text alike."""
    backend: Any = getattr(teacher.tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(teacher.tokenizer.get_vocab().items()))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return digest, str(teacher.tokenizer.chat_template), repr(teacher.eos_ids), str(teacher.max_context)


def _family(name: str, teacher: TeacherConfig, facts: Mapping[str, TeacherFacts]) -> str | None:
    """A note where the weak reference is of another family and the recipe accepts it."""
    if weak_name(name) not in facts:
        return None
    ours, theirs = facts[name].tokenizer.get_vocab(), facts[weak_name(name)].tokenizer.get_vocab()
    try:
        shared_vocabulary(ours, theirs, f"teachers.{weak_name(name)}")
    except UserError as error:
        reason = str(error).partition(":")[2].partition(";")[0].strip()
        if not teacher.other_family:
            raise UserError(
                f"teachers.{weak_name(name)}: it is not of the teacher's family: {reason}; choose a smaller model of that "
                f"family, or accept it with teachers.{name}.other_family=true"
            ) from None
        return f"teachers.{weak_name(name)}: taken from another family: {reason}"
    return None
