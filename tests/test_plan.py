"""What a run would do, in words."""

import json

from opd.config import build_config
from opd.plan import plan


def test_sampled_tokens(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    raw = {"steps": 2, "batch": {"prompts": 4}, "sampling": {"max_new_tokens": 8}, "terms": {"reverse_kl": {}}}
    raw |= {"student": {"model": "a/b"}, "teachers": {"default": {"model": "a/b"}}}
    answers = plan(build_config({**raw, "prompts": {"path": str(tmp_path / "prompts.jsonl")}}), tmp_path)
    assert "# 2 steps of 4 rollouts, at most 64 sampled tokens in all\n" in answers
    episodes = plan(build_config({**raw, "prompts": {"type": "environment", "name": "calculator"}}), tmp_path)
    assert "# 2 steps of 4 rollouts, at most 8 sampled tokens in each of their turns\n" in episodes
