"""Which ids student and teachers have in common, and what aligns those that read with another tokenizer."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.alignment.aligner import Aligner
from opd.alignment.config import AlignmentConfig
from opd.alignment.vocabulary import SharedVocabulary, shared_vocabulary
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
    looks = (_family, _unlike, _itself)
    checks = [look(name, teacher, facts) for name, teacher in teachers.items() for look in looks]
    notes = [note for note in checks if note is not None]
    own = tokenizer.get_vocab()
    shared: dict[str, int] = {}
    aligners: dict[str, Aligner] = {}
    alike: dict[tuple[str, ...], Aligner] = {}
    for name, one in facts.items():
        found = shared_vocabulary(own, one.tokenizer.get_vocab())
        if isinstance(found, SharedVocabulary) and not any(_writes(t, found.dropped) for t in (tokenizer, one.tokenizer)):
            shared[name] = found.size
            continue
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
        if pairing.aligners and maker.needs_teacher and not maker.across_tokenizers:
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
    found = shared_vocabulary(facts[name].tokenizer.get_vocab(), facts[weak_name(name)].tokenizer.get_vocab())
    if isinstance(found, SharedVocabulary):
        return None
    if teacher.other_family:
        return f"teachers.{weak_name(name)}: taken from another family: {found}"
    raise UserError(
        f"teachers.{weak_name(name)}: it is not of the teacher's family: {found}; choose a smaller model of that family, or "
        f"accept it with teachers.{name}.other_family=true"
    )


def _unlike(name: str, teacher: TeacherConfig, facts: Mapping[str, TeacherFacts]) -> str | None:
    """A note where teacher and weak reference are scored in different ways; their difference is small, as rounding is."""
    weak = teacher.weak_reference
    if weak_name(name) not in facts or weak is None or (weak.model is None and weak.url is None):
        return None
    differing = [key for key in ("dtype", "logp_floor") if getattr(weak, key) != getattr(teacher, key)]
    differing += ["url"] if bool(weak.urls) != bool(teacher.urls) else []
    if not differing:
        return None
    keys = " and ".join(differing)
    return f"teachers.{weak_name(name)}: {keys} differ from the teacher's, and so does rounding: let them agree"


def _itself(name: str, teacher: TeacherConfig, facts: Mapping[str, TeacherFacts]) -> str | None:
    """A note where the weak reference is the teacher, as when a server's name for it was forgotten."""
    weak = facts.get(weak_name(name))
    if weak is None or weak.weights != facts[name].weights:
        return None
    return f"teachers.{weak_name(name)}: it is the teacher itself: they differ by nothing, so that nothing is learned"
