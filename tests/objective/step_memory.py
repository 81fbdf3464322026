"""Peak memory of one update beyond what is there before it, MiB: a model of 200,000 ids and of next to nothing else.

python step_memory.py FORM TOKENS       FORM: full | topk | sampled
"""

import sys
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from opd.models import output_head
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.objective.learner import Learner
from opd.records import Hidden, Prompt, Rollout, Term, TopK, Turn

VOCAB, H = 200_000, 16


def resident(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))


def term(form: str, tokens: int) -> Term:
    mask, shared = np.ones(tokens, bool), {"divergence": "reverse_kl", "beta": 0.5, "tail": "tail"}
    if form == "full":
        return Term("divergence", mask, {**shared, "target": Hidden((torch.randn(tokens, H),), "t")})
    if form == "topk":
        ids = np.tile(np.arange(4, dtype=np.int32), (tokens, 1))
        target = TopK(ids, np.full((tokens, 4), -3.0, np.float32), np.full(tokens, 0.8, np.float32))
        return Term("divergence", mask, {**shared, "target": target})
    plain = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": None, "importance_cap": None}
    return Term("policy_gradient", mask, {"reward": np.full(tokens, -2.0, np.float32), **plain})


def main() -> None:
    form, tokens = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": H, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape))
    heads = {"t": output_head(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape)).requires_grad_(False))}
    learner = Learner(
        model,
        ObjectiveConfig(max_logits_mib=8),
        OptimizerConfig(),
        accelerator=Accelerator(cpu=True),
        num_steps=10,
        heads=heads,
        vocab=VOCAB,
        temperature=1.0,
    )
    sampled = np.arange(tokens, dtype=np.int32) % VOCAB
    turn = Turn(np.arange(3, dtype=np.int32), sampled, np.full(tokens, -12.0, np.float32), "length")
    taught = [(Rollout(Prompt(id="0"), 0, (turn,)), [term(form, tokens)])]
    learner.update(taught)  # the optimizer's moments are there from now on
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
        peak.write("5")
    before = resident("VmRSS")
    learner.update(taught)
    print(resident("VmHWM") - before)


main()
