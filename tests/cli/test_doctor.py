"""`opd doctor` finds what would make numbers silently wrong."""

import json

import pytest
from transformers import AutoTokenizer

from opd.config import build_config
from opd.data_free.pool import Row, write_pool
from opd.doctor import examine


@pytest.fixture
def recipe(model_folder, tmp_path):
    """`recipe(teacher, **sections)`: a checked recipe on micro models."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("abc", "de")))

    def build(teacher=None, **sections):
        models = {
            "student": {"model": str(model_folder(0))},
            "teachers": {"default": {"model": str(teacher or model_folder(1))}},
        }
        common = {"prompts": {"path": str(tmp_path / "prompts.jsonl")}, "terms": {"reverse_kl": {}}}
        return build_config({**common, "sampling": {"max_new_tokens": 8}, **models, **sections})

    return build


def by_subject(findings):
    return {finding.subject.replace("teachers.default.model ", ""): finding for finding in findings}


def test_a_sound_recipe(recipe):
    findings = examine(recipe())
    assert {finding.level for finding in findings} == {"ok"}
    text = " ".join(f"{finding.subject}: {finding.text}" for finding in findings)
    assert "<bos><user>" in text  # the rendered prompt
    assert "1 at the start" in text  # BOS
    assert "rows of padding" in text
    assert "GiB" in text


def test_temperature_and_truncation(recipe):
    found = by_subject(examine(recipe(objective={"temperature": 0.5})))
    assert found["temperature"].level == "warn"
    found = by_subject(examine(recipe(sampling={"max_new_tokens": 8, "top_p": 0.9})))
    assert found["temperature"].level == "warn"


def test_contexts(recipe, model_folder):
    found = by_subject(examine(recipe(model_folder(1, max_position_embeddings=64))))
    assert found["context"].level == "error"
    assert found["context"].fix == "set sampling.max_context=64"
    found = by_subject(examine(recipe(sampling={"max_new_tokens": 600})))
    assert found["prompt lengths"].level == "warn"


@pytest.fixture
def teacher(model_folder, tmp_path):
    """`teacher(change)`: a teacher's folder whose tokenizer `change` altered."""

    def build(change):
        folder = model_folder(1)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        change(tokenizer)
        tokenizer.save_pretrained(folder)
        return folder

    return build


def test_templates_and_bos(recipe, teacher):
    def other_template(tokenizer):
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")

    found = by_subject(examine(recipe(teacher(other_template))))
    assert found["template"].level == "warn"
    twice = {"plain": False, "template": "<bos>{prompt}"}
    config = recipe(prompts={"path": recipe().prompts["config"].path, **twice})
    assert by_subject(examine(config))["BOS in the prompt"].level == "ok"  # not at the start: the template's own comes first


def test_vocabularies_and_eos(recipe, teacher):
    def longer(tokenizer):
        tokenizer.add_tokens(["<think>"])

    found = by_subject(examine(recipe(teacher(longer))))
    assert found["token -> id maps"].level == "warn"
    assert "<think>" in found["token -> id maps"].fix


def test_another_tokenizer_is_measured(recipe, byte_model, tmp_path):
    (tmp_path / "bytes.jsonl").write_text(json.dumps({"prompt": "abcd"}) + "\n")
    sections = {
        "student": {"model": byte_model(0, "ab bc")},
        "teachers": {"default": {"model": byte_model(1, "cd"), "weak_reference": {"model": byte_model(2, "cd")}}},
        "prompts": {"path": str(tmp_path / "bytes.jsonl")},
    }
    found = by_subject(examine(recipe(**sections, terms={"compass": {}})))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["tokens"].text == (
        "differ from the student's; 100.0% of the bytes of 1 prompts are aligned, 0.0% of the tokens one to one"
    )
    assert "<bos><user>abcd<assistant>" in found["template"].text
    assert "teachers.default.weak_reference.model tokens" in found
    assert "terms" not in found
    findings = examine(recipe(**sections))
    (error,) = [finding for finding in findings if finding.level == "error"]
    assert error.text.startswith("terms.reverse_kl: teachers.default.model reads with another tokenizer")


TOOL = {"name": "f", "type": "function"}


def test_tools_that_a_template_leaves_out(recipe, model_folder, byte_model, tmp_path):
    (tmp_path / "tools.jsonl").write_text(json.dumps({"prompt": "abc", "tools": [TOOL]}) + "\n")
    prompts = {"path": str(tmp_path / "tools.jsonl")}
    assert by_subject(examine(recipe(prompts=prompts)))["student.model tools"].level == "ok"
    deaf = model_folder(0)
    tokenizer = AutoTokenizer.from_pretrained(deaf)
    tokenizer.chat_template = tokenizer.chat_template.replace("tools or []", "[]")
    tokenizer.save_pretrained(deaf)
    found = by_subject(examine(recipe(prompts=prompts, student={"model": str(deaf)})))["student.model tools"]
    assert found.level == "warn"
    assert found.text == "the chat template writes none of the 1 tools of prompt line 1: the model sees no schema"
    assert "a model whose template knows tools" in found.fix
    assert "student.model tools" not in by_subject(examine(recipe()))
    other = {"default": {"model": byte_model(1, "cd"), "weak_reference": {"model": byte_model(2, "cd")}}}
    (tmp_path / "tools.jsonl").write_text(json.dumps({"prompt": "abcd", "tools": [TOOL]}) + "\n")
    aligned = recipe(prompts=prompts, student={"model": byte_model(0, "ab")}, teachers=other, terms={"compass": {}})
    assert by_subject(examine(aligned))["tools"].level == "warn"  # the teacher reads its own rendering


def test_notes_of_controllers(recipe):
    findings = examine(recipe(rollout={"stride": {"stop_below": 1.0, "keep_above": 0.5}}))
    notes = [finding.text for finding in findings if finding.level == "warn"]
    assert notes == [
        "rollout.stride.stop_below is 1: every rollout stops after one new turn or chunk",
        "rollout.stride.keep_above is 0.5, above every log-prob: nothing is ever kept, and there are no restarts",
    ]


def test_the_students_own_start_is_not_looked_at_again(recipe):
    negative = {"terms": {"negative": {"condition": {"source": "fixed", "text": "a"}}}, "teachers": {}}
    subjects = [finding.subject for finding in examine(recipe(**negative))]
    assert subjects.count("student.model vocabulary") == 1
    assert len(set(subjects)) == len(subjects)
    assert "student.model EOS" not in subjects


def test_memory_counts_every_copy_of_the_student(recipe, model_folder):
    """Beside the student: the learner's own start for `compass`, and the one that `negative` asks."""
    folder = model_folder(0)  # weights are never read
    large = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "head_dim": 512}
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | large))
    student = str(folder)

    def gib(**terms):
        config = recipe(
            student={"model": student},
            terms=terms,
            teachers={"default": {"model": student, "weak_reference": {"model": student}}},
            objective={"max_logits_mib": 1},
        )
        (text,) = [finding.text for finding in examine(config) if finding.subject == "memory"]
        return float(text.split()[1])

    negative = {"negative": {"condition": {"source": "fixed", "text": "a"}}}
    size = 4 * 8 * (3 * 2048 * 2048 + 3 * 2048 * 8192) / 2**30
    alone = gib(compass={"alpha": 0.0})
    assert size > 1.5
    assert gib(compass={"alpha": 0.5}) - alone == pytest.approx(size, abs=0.11)
    assert gib(compass={"alpha": 0.0}, **negative) - alone == pytest.approx(size, abs=0.11)
    assert gib(compass={"alpha": 0.5}, **negative) - alone == pytest.approx(2 * size, abs=0.11)


def test_prompts_are_looked_at_step_by_step(recipe, tmp_path):
    """As a run asks for them, since a pool that is reshuffled fills a batch and not the whole sample at once."""
    path = tmp_path / "pool.jsonl"
    write_pool(path, [Row(f"default-{place}", letter) for place, letter in enumerate("abcdefgh")])
    prompts = {"type": "authored", "path": str(path), "order": "reshuffle"}
    found = by_subject(examine(recipe(prompts=prompts, batch={"prompts": 8}, steps=9)))
    assert found["prompt lengths"].text.startswith("8 prompts:")
