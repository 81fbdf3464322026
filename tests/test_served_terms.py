"""A recipe that asks a server for what it does not give is refused before the student is loaded."""

import pytest

from opd.config import load_config
from opd.errors import UserError
from opd.registry import TERM_MAKERS
from opd.served_terms import check_abilities
from opd.teachers.abilities import Abilities

LIMITED = Abilities(hidden=False, temperature=False, ids="overlap", max_k=64)
TOPK = ["terms.reverse_kl.form=topk", "terms.reverse_kl.k=16"]


def notes(*overrides, abilities=LIMITED):
    given = ["student.model=a/b", "teachers.default.url=http://127.0.0.1:1", "prompts.path=p.jsonl", *overrides]
    config = load_config("reverse-kl", given)
    makers = [TERM_MAKERS.load(name, "terms")(term, config) for name, term in config.terms.items()]
    return check_abilities(config, makers, {"default": abilities})


@pytest.mark.parametrize("form", ["sampled", "topk", "full"])
def test_a_server_that_can_do_everything(form):
    overrides = [f"terms.reverse_kl.form={form}", "sampling.temperature=0.7", "eval.prompts.path=p.jsonl"]
    assert notes(*overrides, abilities=Abilities()) == []


def test_what_a_limited_one_can_do():
    assert notes("terms.reverse_kl.form=sampled") == []
    assert notes(*TOPK, "terms.reverse_kl.source=teacher", "terms.reverse_kl.tail=renormalise") == []
    (note,) = notes(*TOPK, "terms.reverse_kl.source=student")
    assert note.startswith("teachers.default.url: the server finds the student's tokens among the teacher's 64 most likely")
    exact = Abilities(hidden=False, temperature=False, ids="exact", max_k=64)
    assert notes(*TOPK, "terms.reverse_kl.source=student", "terms.reverse_kl.tail=truncate", abilities=exact) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["terms.reverse_kl.form=full"],
            r"^terms\.reverse_kl: learns from hidden states, which the server of teachers",
        ),
        (["terms.reverse_kl.form=sampled", "sampling.temperature=0.7"], r"^objective\.temperature: 0\.7, but the server"),
        ([*TOPK, "terms.reverse_kl.k=65"], r"^terms\.reverse_kl\.k: 65, but the server of teachers\.default\.url gives 64"),
        ([*TOPK, "eval.prompts.path=p.jsonl"], r"^eval\.kl_prompts: reads hidden states.*set eval\.kl_prompts=0"),
        (
            [*TOPK, "terms.reverse_kl.source=student", "terms.reverse_kl.tail=truncate"],
            r"^terms\.reverse_kl\.tail: truncate loses the student's tokens",
        ),
    ],
)
def test_what_it_cannot(overrides, message):
    with pytest.raises(UserError, match=message):
        notes(*overrides)


def test_an_evaluation_without_the_reverse_kl():
    assert notes("terms.reverse_kl.form=sampled", "eval.prompts.path=p.jsonl", "eval.kl_prompts=0") == []
