"""Traces without their middle: which steps stay, that the answer does, and that this is not what masking does."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.config import parse_section
from opd.errors import UserError
from opd.sft.config import AnswersConfig, build_sft_config, load_sft_config
from opd.sft.deletion import DeletionConfig, shortened
from opd.sft.examples import encode, read_examples
from opd.sft.plan import plan
from opd.sft.run import fine_tune

STEPS = [f"step {i}" for i in range(1, 8)]
TEXT = "\n\n".join([*STEPS, "#### 28"])
EOS = (2,)


def kept(text: str, **options) -> list[str]:
    return shortened(text, DeletionConfig(**{"steps": 2, **options}), "row 1").split("\n\n")


def test_the_first_and_the_last_steps_stay_and_so_does_the_answer():
    assert kept(TEXT) == ["step 1", "step 2", "step 6", "step 7", "#### 28"]
    assert kept(TEXT, steps=1) == ["step 1", "step 7", "#### 28"]


def test_controls_keep_as_many_steps():
    assert kept(TEXT, keep="head") == [*STEPS[:4], "#### 28"]
    assert kept(TEXT, keep="tail") == [*STEPS[3:], "#### 28"]
    drawn = kept(TEXT, keep="random")
    assert len(set(drawn)) == 5
    assert drawn == [*sorted(drawn[:4]), "#### 28"]
    assert drawn == kept(TEXT, keep="random")
    others = [shortened(TEXT, DeletionConfig(steps=2, keep="random", seed=seed), "row 1") for seed in range(5)]
    others += [shortened(TEXT, DeletionConfig(steps=2, keep="random"), f"row {row}") for row in range(5)]
    assert len(set(others)) > 2


@pytest.mark.parametrize("keep", ["endpoints", "head", "tail", "random"])
@pytest.mark.parametrize(
    "text", ["", "one line", "\n\n".join(STEPS[:4]), "\n\n".join([*STEPS[:4], "#### 10"]), "a\n\n\n\nb"]
)
def test_short_traces_stay_as_they_are(text, keep):
    assert shortened(text, DeletionConfig(steps=2, keep=keep), "row 1") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n\nb\n\nc\n</think>\n\nSo \\boxed{5}.", "<think>\na\n\nc\n</think>\n\nSo \\boxed{5}."),
        ("a\n\nb\n\nc\n</think>\n\nFirst\n\nSecond\n\nThird", "a\n\nc\n</think>\n\nFirst\n\nSecond\n\nThird"),
        ("<think>a\n\nb\n\nc", "<think>a\n\nc"),
        ("a\n\n#### b\n\nc\n\nso \\boxed{5}\n\nend", "a\n\nc\n\nso \\boxed{5}\n\nend"),
        ("a\n\nb\n\nc", "a\n\nc"),
        ("é\n\nб\n\n数", "é\n\n数"),
    ],
)
def test_what_counts_as_reasoning(text, expected):
    assert shortened(text, DeletionConfig(steps=1), "row 1") == expected


def test_what_follows_the_last_step_is_as_far_from_it_as_before():
    assert shortened("<think>a\n\nb\n\nc\n</think>d", DeletionConfig(1, "head"), "row 1") == "<think>a\n\nb\n</think>d"
    assert shortened("1,2,3", DeletionConfig(1, "head", ","), "row 1") == "1,2"


def read(tmp_path, completion, **options):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "abc", "completion": completion}) + "\n")
    config = parse_section(AnswersConfig, {"path": str(path), "delete_steps": {"steps": 1, **options}}, "dataset")
    return next(read_examples(config, "dataset"))


def test_reasoning_of_its_own_is_shortened_and_the_content_is_not(tmp_path):
    message = {"role": "assistant", "content": "x\n\ny\n\nz", "reasoning_content": "a\n\nb\n\nc"}
    example = read(tmp_path, [message])
    assert example.answer == {**message, "reasoning_content": "a\n\nc"}
    assert (example.num_deleted, example.num_characters) == (3, 11)
    assert read(tmp_path, "a\n\nb\n\nc").answer == {"role": "assistant", "content": "a\n\nc"}


def test_plain_text_and_answers_without_text(tmp_path):
    assert read(tmp_path, "a;b;c", delimiter=";").answer == {"role": "assistant", "content": "a;c"}
    calls = [{"function": {"name": "f", "arguments": {}}}]
    example = read(tmp_path, [{"role": "assistant", "content": None, "tool_calls": calls}])
    assert example.num_deleted == 0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"steps": 0}, r"dataset\.delete_steps\.steps is 0: it must be at least 1"),
        ({"steps": 1, "delimiter": ""}, r"dataset\.delete_steps\.delimiter is empty"),
        ({}, r"dataset\.delete_steps\.steps is missing"),
        ({"steps": 1, "keep": "middle"}, r"dataset\.delete_steps\.keep"),
        ({"stepz": 1}, "did you mean 'steps'"),
    ],
)
def test_bad_values_are_named(raw_sft, section, expected):
    dataset = {**raw_sft()["dataset"], "delete_steps": section}
    with pytest.raises(UserError, match=expected):
        build_sft_config(raw_sft(dataset=dataset))


def test_the_published_setting():
    config = load_sft_config("sft/endpoint", ["student.model=a/b", "dataset.path=c/d"])
    assert config.dataset.delete_steps == DeletionConfig(steps=100)


def shorter(raw_sft, tmp_path):
    """A recipe whose letters are steps of their own, ended by `0`; of seven of them the first and the last two stay."""
    rows = [{"prompt": "abc", "completion": "a0b0c0d0e0f0g"}, {"prompt": "de", "completion": "a0b"}]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": str(path), "delete_steps": {"steps": 2, "delimiter": "0"}}
    return build_sft_config(raw_sft(dataset=dataset, steps=1, batch=2))


def test_the_plan_says_what_goes(raw_sft, tmp_path):
    config = shorter(raw_sft, tmp_path)
    text = plan(config, tmp_path / "run")
    assert "# dataset.delete_steps: 1 of these answers lose steps, 37.5% of all answers' text" in text  # 6 of 16
    without = replace(config, dataset=replace(config.dataset, delete_steps=None))
    assert "delete_steps:" not in plan(without, tmp_path / "run").replace("delete_steps: null", "")


def test_a_run_learns_the_short_traces(raw_sft, tmp_path, capsys):
    summary = fine_tune(shorter(raw_sft, tmp_path), tmp_path / "run")
    assert (summary["num_examples"], summary["num_shortened"]) == (2, 1)
    assert summary["trained_tokens"] == len("a0b0f0g") + len("a0b") + 2  # an EOS each
    assert "steps of 1 of 2 answers are deleted" in " ".join(capsys.readouterr().err.split())


def test_deletion_changes_what_the_end_is_predicted_from(student_tokenizer, student_folder, raw_sft, tmp_path):
    """A mask leaves the middle in the context, so the end's logits are those of the whole trace; deletion does not."""
    from opd.models import load_causal_lm

    config = shorter(raw_sft, tmp_path)
    whole, short = (
        encode(student_tokenizer, EOS, next(read_examples(replace(config.dataset, delete_steps=option), "dataset")))
        for option in (None, config.dataset.delete_steps)
    )
    end = len(student_tokenizer("f0g", add_special_tokens=False)["input_ids"]) + 1
    assert np.array_equal(whole.ids[-end:], short.ids[-end:])
    assert whole.trained.sum() - short.trained.sum() == 6
    model = load_causal_lm(str(student_folder), "student.model").eval()
    with torch.no_grad():
        logits = [model(torch.from_numpy(one.ids[None]).long()).logits[0, -end:] for one in (whole, short)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
