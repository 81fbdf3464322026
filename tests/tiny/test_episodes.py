import math
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.envs.calculator import Calculator, CalculatorConfig
from opd.envs.dialogue import Dialogue
from opd.envs.formats import read_reply, tool_format
from opd.records import Prompt
from opd.tiny.episodes import LENGTH, batches, flawless_probability, worked
from opd.tiny.members import MEMBERS, Model
from opd.tiny.models import CONTEXT_TOKENS, initialise, own_torch_state
from opd.tiny.tokenizer import END_ID, PAD_ID, build_tokenizer
from opd.tiny.training import Batch, response_loss


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("calculator", CONTEXT_TOKENS)


def test_worked_pieces_are_the_right_replies_and_what_answers_them():
    environment = Calculator(CalculatorConfig(length=2))
    environment.reset({"start": 7, "steps": ["+5", "*3"]}, seed=0)
    assert list(worked(environment)) == [
        ("<|call|>7+5<|end|>", True),
        ("<|tool|>2<|end|><|assistant|>", False),
        ("<|call|>2*3<|end|>", True),
        ("<|tool|>6<|end|><|assistant|>", False),
        ("6<|end|>", True),
    ]
    assert environment.num_right == 2


def test_a_worked_episode_is_what_the_environment_plays_with_its_trained_tokens_as_replies(tokenizer):
    """Token by token: contexts are built as in distillation, and each run of trained tokens is sampled next."""
    batch = next(batches(tokenizer, 2, seed="a"))
    dialogue, form = Dialogue(tokenizer, [END_ID], "student.model"), tool_format(tokenizer)
    for prompt_ids, response, targets in zip(batch.prompt_BP, batch.response_BR, batch.targets_BR):
        environment = Calculator(CalculatorConfig())
        text = tokenizer.decode(prompt_ids, skip_special_tokens=True)
        start, steps = text[0], [text[i : i + 2] for i in range(1, len(text), 2)]
        prompt = Prompt("a", messages=tuple(environment.reset({"start": int(start), "steps": steps}, seed=0)))
        context, whole = prompt_ids.numpy(), torch.cat([prompt_ids, response])
        done = False
        while not done:
            assert whole[: len(context)].tolist() == context.tolist()
            trained = targets[len(context) - len(prompt_ids) :].tolist()
            assert PAD_ID not in trained[: trained.index(END_ID) + 1]
            sampled = whole[len(context) : len(context) + trained.index(END_ID) + 1].numpy()
            seen = environment.step(read_reply(form, tokenizer, sampled, [END_ID]))
            assert seen.mistake is False
            done = seen.done
            if not done:
                context = dialogue.appended(prompt, context, sampled, seen.messages)
                observed = targets[len(context) - len(prompt_ids) - 4 : len(context) - len(prompt_ids)]
                assert observed.tolist() == [PAD_ID] * 4  # the tool's mark, result and end mark, and the next header
        assert environment.outcome() == 1.0
        assert len(context) + len(sampled) == len(whole) <= CONTEXT_TOKENS // 2


def test_batches_depend_on_the_seed_alone_and_do_not_repeat(tokenizer):
    def prompts(seed: str) -> list[list[int]]:
        return [row for batch in islice(batches(tokenizer, 3, seed), 2) for row in batch.prompt_BP.tolist()]

    assert prompts("a") == prompts("a") != prompts("b")
    assert len({tuple(row) for row in prompts("a")}) == 6


@pytest.fixture(scope="module")
def model(tokenizer) -> Any:
    member = MEMBERS["calculator-student"]
    assert isinstance(member, Model)
    with own_torch_state(seed=0):
        return initialise(member, tokenizer)


def trained_logps(model: Any, batch: Batch, row: int) -> Tensor:
    """Of each trained token of one episode, one by one from its whole context."""
    ids = torch.cat([batch.prompt_BP[row], batch.response_BR[row]])
    first = len(batch.prompt_BP[row])
    places = [first + i for i, target in enumerate(batch.targets_BR[row].tolist()) if target != PAD_ID]
    assert len(places) == 5 * LENGTH + 2
    return torch.stack([model(ids[None, :i]).logits[0, -1].log_softmax(-1)[ids[i]] for i in places])


@torch.no_grad()
def test_the_loss_and_the_flawless_probability_see_the_students_tokens_alone(tokenizer, model):
    batch = next(batches(tokenizer, 2, seed="a"))
    logps = torch.stack([trained_logps(model, batch, row) for row in range(2)])
    torch.testing.assert_close(response_loss(model, batch), -logps.mean())
    probability = flawless_probability(model, batch)
    assert math.isclose(probability, float(logps.sum(1).exp().mean()), rel_tol=1e-3)
