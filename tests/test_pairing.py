"""Who reads the student's tokens, and who needs them aligned."""

from dataclasses import replace

import pytest

from opd.alignment.config import AlignmentConfig
from opd.config import RunConfig
from opd.errors import UserError
from opd.pairing import pair, unaligned_terms
from opd.plugins import TermMaker
from opd.teachers.config import FrozenConfig, TeacherConfig, weak_name
from opd.teachers.opening import TeacherFacts


def facts(tokenizer, name="t", rows=100, context=64):
    return TeacherFacts(f"teachers.{name}.model", tokenizer, (tokenizer.eos_token_id,), context, rows, weights=name)


def paired(student, others, **teachers):
    configs = {name: TeacherConfig(model=name, **settings) for name, settings in teachers.items()}
    return pair(student, (student.eos_token_id,), others, configs, AlignmentConfig())


def test_the_same_tokens_need_no_alignment(byte_tokenizer):
    found = paired(byte_tokenizer("ab"), {"t": facts(byte_tokenizer("ab"))}, t={})
    assert (found.vocab, dict(found.vocabs), dict(found.aligners)) == (11, {"t": 11}, {})


def test_other_tokens_are_aligned_and_all_of_the_students_are_in_use(byte_tokenizer):
    others = {"a": facts(byte_tokenizer("ab")), "b": facts(byte_tokenizer("cd bc"), "b", rows=12)}
    found = paired(byte_tokenizer("ab"), others, a={}, b={})
    assert (found.vocab, dict(found.vocabs), list(found.aligners)) == (11, {"a": 11, "b": 12}, ["b"])


def test_models_that_read_alike_share_their_aligner(byte_tokenizer):
    others = {
        "a": facts(byte_tokenizer("cd")),
        "b": facts(byte_tokenizer("cd")),
        "c": facts(byte_tokenizer("cd"), context=32),
    }
    found = paired(byte_tokenizer("ab"), others).aligners
    assert found["a"] is found["b"]
    assert found["a"] is not found["c"]


def test_tokens_that_one_side_writes_text_with_are_not_left_out(byte_tokenizer):
    """The same ids as far as the shorter map goes; but what follows there are merges, so texts are cut differently."""
    short, long = byte_tokenizer("ab"), byte_tokenizer("ab cd")
    assert list(paired(short, {"t": facts(long)}).aligners) == ["t"]
    assert list(paired(long, {"t": facts(short)}).aligners) == ["t"]


def test_further_special_tokens_are_left_out(byte_tokenizer):
    newer = byte_tokenizer("ab")
    newer.add_tokens(["<|tool|>"], special_tokens=True)
    for student, teacher in ((byte_tokenizer("ab"), newer), (newer, byte_tokenizer("ab"))):
        found = paired(student, {"t": facts(teacher)})
        assert (found.vocab, dict(found.aligners)) == (11, {})


def test_the_family_of_a_weak_reference(byte_tokenizer):
    others = {"t": facts(byte_tokenizer("cd")), weak_name("t"): facts(byte_tokenizer("bc"), weak_name("t"))}
    with pytest.raises(UserError, match=r"teachers.t.weak_reference: it is not of the teacher's family: id 10 is 'cd'"):
        paired(byte_tokenizer("ab"), others, t={})
    found = paired(byte_tokenizer("ab"), others, t={"other_family": True})
    (note,) = found.notes
    assert "taken from another family" in note
    assert found.aligners["t"] is not found.aligners[weak_name("t")]


def test_a_weak_reference_that_is_the_teacher_or_scored_otherwise_is_noted(byte_tokenizer):
    tokenizer = byte_tokenizer("ab")
    weak = {"weak_reference": FrozenConfig(model="w", dtype="bfloat16", logp_floor=-20.0)}
    others = {"t": facts(tokenizer), weak_name("t"): facts(tokenizer, weak_name("t"))}
    (note,) = paired(tokenizer, others, t=weak).notes
    assert note.startswith("teachers.t.weak_reference: dtype and logp_floor differ from the teacher's")
    same = {"t": facts(tokenizer), weak_name("t"): replace(facts(tokenizer, weak_name("t")), weights="t")}
    (note,) = paired(tokenizer, same, t={"weak_reference": FrozenConfig(model="t")}).notes
    assert note.startswith("teachers.t.weak_reference: it is the teacher itself")
    assert paired(tokenizer, others, t={"weak_reference": FrozenConfig(active_experts=1)}).notes == []


def test_terms_that_ask_no_teacher_need_none_aligned(byte_tokenizer):
    others = {"t": facts(byte_tokenizer("cd"))}
    found = paired(byte_tokenizer("ab"), others, t={})
    run = RunConfig()
    makers = {name: TermMaker(None, run) for name in ("asks", "asks across", "asks nobody")}
    makers["asks across"].across_tokenizers, makers["asks nobody"].needs_teacher = True, False
    assert [reason.partition(":")[0] for reason in unaligned_terms(makers, found, others)] == ["terms.asks"]
