from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from opd.config import build_config
from opd.model_card import model_card

RESULT = {
    "suite": "gsm8k",
    "settings": {"samples": 4},
    "accuracy": 0.3125,
    "pass@4": 0.6,
    "maj@4": 0.4,
    "num_problems": 40,
    "num_samples": 160,
    "intervals": {"accuracy": [0.2, 0.43], "pass@4": [0.45, 0.74]},
    "notes": ["WARNING: 3 of 40 problems share 13 words | with a prompt"],
}


def config(**sections):
    recipe = {
        "steps": 400,
        "student": {"model": "Qwen/Qwen2.5-0.5B"},
        "teachers": {"default": {"model": "Qwen/Qwen2.5-1.5B", "revision": "main"}},
        "prompts": {"path": "openai/gsm8k"},
        "terms": {"reverse_kl": {"form": "topk", "k": 4}},
    }
    return build_config(recipe | sections)


def metadata(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_a_full_card():
    card = model_card(config(), 400, [RESULT])
    data = metadata(card)
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert (data["base_model"], data["base_model_relation"]) == ("Qwen/Qwen2.5-0.5B", "finetune")
    assert data["datasets"] == ["openai/gsm8k"]
    assert {"on-policy-distillation", "opd"} <= set(data["tags"])
    [evaluation] = data["model-index"][0]["results"]
    assert evaluation["dataset"]["name"] == "gsm8k"
    assert evaluation["metrics"] == [{"type": "accuracy", "value": 0.3125, "name": "avg@4"}]
    for text in (
        "# Qwen2.5-0.5B, distilled from Qwen2.5-1.5B",
        "after step 400 of 400",
        "[Qwen/Qwen2.5-1.5B](https://huggingface.co/Qwen/Qwen2.5-1.5B) (teacher `default`, revision `main`)",
        "https://arxiv.org/abs/2306.13649",
        "https://arxiv.org/abs/2306.08543",
        "`reverse_kl`: Plain on-policy distillation (form `topk`, divergence `reverse_kl`, k `4`)",
        "| gsm8k | avg@4 | 0.312 [0.200, 0.430] | 40 x 4 |",
        "| gsm8k | maj@4 | 0.400 | 40 x 4 |",
        "* gsm8k: WARNING: 3 of 40 problems share 13 words \\| with a prompt",
        "AutoModelForCausalLM.from_pretrained(name)",
    ):
        assert text in card


def test_without_a_teacher_none_is_claimed():
    raw = {"teachers": {}, "terms": {"group_reward": {"normalize": "none"}}, "reward": {"outcome": "answer"}}
    card = model_card(config(**raw, batch={"rollouts_per_prompt": 8}), 400, [RESULT])
    assert metadata(card)["tags"] == ["opd"]
    for text in (
        "# Qwen2.5-0.5B, trained on its own rollouts\n",
        "after step 400 of 400 of training on its own rollouts, without a teacher,\non the prompts of [openai/gsm8k]",
        "The student samples completions and learns from these, without another model. The loss is a sum of:\n",
        "* `group_reward`: Rollouts of one prompt, compared by their scores, [arXiv 2402.03300]",
        "(normalize `none`)",
    ):
        assert text in card
    assert "istill" not in card.partition("# ")[2]


def test_the_hubs_own_reader_understands_it():
    data: Any = ModelCard(model_card(config(), 400, [RESULT])).data
    [evaluation] = data.eval_results
    assert (evaluation.dataset_name, evaluation.metric_value) == ("gsm8k", 0.3125)
    assert data.base_model == "Qwen/Qwen2.5-0.5B"


def test_an_adapter():
    card = model_card(config(student={"model": "Qwen/Qwen2.5-0.5B", "lora": {"r": 8}}), 10, [])
    data = metadata(card)
    assert (data["library_name"], data["base_model_relation"]) == ("peft", "adapter")
    assert "lora" in data["tags"]
    assert "model-index" not in data
    assert "PeftModel.from_pretrained(base, name)" in card
    assert "rank 8" in card
    assert "This checkpoint was not evaluated." in card


def test_nothing_of_this_machine_is_told(tmp_path):
    (tmp_path / "verify.py").write_text("def score(response, answer, prompt): return 1.0")
    (tmp_path / "adapter").mkdir()
    secret = str(tmp_path)
    card = model_card(
        config(
            student={"model": f"{secret}/my-student"},
            teachers={
                "maths": {
                    "model": f"{secret}/my-teacher",
                    "url": "http://10.1.2.3:8400",
                    "token_file": f"{secret}/token",
                    "digest": "0123456789abcdef" * 2,
                },
                "code": {"model": "~/models/coder"},
            },
            prompts={"path": f"{secret}/train.jsonl"},
            eval={"prompts": {"path": f"{secret}/test.jsonl"}, "reward": f"{secret}/verify.py:score"},
            trackers={"wandb": {"project": "secret-project"}},
        ),
        5,
        [],
    )
    for word in (secret, "10.1.2.3", "token_file", "secret-project", "~/"):
        assert word not in card
    for word in ("my-student", "my-teacher", "coder", "train.jsonl", "test.jsonl", "verify.py:score", "0123456789abcdef"):
        assert word in card
    assert not {"base_model", "datasets"} & set(metadata(card))  # the hub knows no such names


@pytest.mark.parametrize("name", ["a|b", "we*ird_[name](x)", "back`tick", 'quote"s: #', "yes", "<b>bold</b>", "été 数学"])
def test_odd_names_stay_names(name):
    result = {**RESULT, "suite": name, "notes": [f"About {name}"]}
    template = f"{name} {{prompt}} ```"
    card = model_card(
        config(student={"model": f"/models/{name}"}, prompts={"path": f"/data/{name}.jsonl", "template": template}),
        1,
        [result],
    )
    [evaluation] = metadata(card)["model-index"][0]["results"]
    assert evaluation["dataset"]["name"] == name
    rows = [line for line in card.splitlines() if "avg@4 |" in line]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 5
    assert "<b>" not in card.partition("## Use")[0].partition("---\n# ")[2].replace("\\<b\\>", "")
    assert f"````\n{template}\n````" in card


def test_part_of_a_suite_does_not_pass_for_it():
    card = model_card(config(), 400, [{**RESULT, "settings": {"samples": 4, "limit": 40}}])
    [evaluation] = metadata(card)["model-index"][0]["results"]
    assert evaluation["dataset"]["name"] == "gsm8k (first 40)"
    assert "| gsm8k (first 40) | avg@4 |" in card


def test_a_weak_reference_is_named_where_a_term_uses_it():
    weak = {"model": "/home/me/models/weak-0.5B"}
    teachers = {"default": {"model": "Qwen/Qwen2.5-1.5B", "weak_reference": weak}}
    card = model_card(config(teachers=teachers, terms={"compass": {}}), 1, [])
    assert "* compared with `weak-0.5B`, the weak reference of teacher `default`" in card
    assert "arXiv 2609.10154" in card
    assert "/home/me" not in card
    assert "compared with" not in model_card(config(teachers=teachers), 1, [])
    own = {"default": {"model": "Qwen/Qwen3-30B-A3B", "weak_reference": {"active_experts": 1}}}
    assert "`default` itself with 1 active experts" in model_card(config(teachers=own, terms={"compass": {}}), 1, [])
