"""A real vLLM: its tokens and log-probs are the model's, nothing of the server's own defaults leaks in, early ends abort.

`OPD_VLLM` names the `bin` folder, or the Python, of an environment with vLLM.
"""

import asyncio
import os
import re
import socket
import subprocess
import time
import urllib.request
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from opd.data_free.author import Request, author_prompts, instruction_text
from opd.data_free.pool import read_pool
from opd.errors import UserError
from opd.eval.options import EvalOptions
from opd.models import load_causal_lm, output_head
from opd.processes import die_with_parent
from opd.records import Prompt, SampleRequest, Sampling, Turn
from opd.students.hf_sampler import HFSampler
from opd.students.vllm_sampler import VLLMSampler
from opd.tokenization import eos_ids, load_tokenizer, render

FOLDER = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
PROBLEMS = ["What is 2+2? Answer with one number.", "Name three primes.", "How do I find the area of a triangle?"]
# each of these would change every answer below
DEFAULTS = '{"repetition_penalty": 1.5, "presence_penalty": 2.0, "top_k": 2, "min_p": 0.3, "temperature": 0.1, "top_p": 0.2}'


@pytest.fixture(scope="module")
def model():
    return str(FOLDER / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model, "--model")


@pytest.fixture(scope="module")
def eos(model, tokenizer):
    return eos_ids(model, "--model", tokenizer)


@pytest.fixture(scope="module")
def student(model):
    return load_causal_lm(model, "--model", dtype="float32")


@pytest.fixture(scope="module")
def contexts(tokenizer):
    return [render(tokenizer, Prompt(id=text, messages=({"role": "user", "content": text},))) for text in PROBLEMS]


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    named = Path(os.environ["OPD_VLLM"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [named / "vllm" if named.is_dir() else named.parent / "vllm", "serve", model, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port)]
    # with a prefill in parts, vLLM 0.32 on a CPU dies of requests with a seed ("CPU Generator does not use offset")
    command += [
        "--no-enable-chunked-prefill",
        "--logprobs-mode",
        "processed_logprobs",
        "--override-generation-config",
        DEFAULTS,
    ]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment, preexec_fn=die_with_parent) as server,
    ):
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_until_up(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


async def turns_of(sampler, requests) -> list[Turn]:
    async def one(request: SampleRequest) -> Turn:
        async with aclosing(sampler.generate(request)) as stream:
            return Turn.of(request.context_ids, [chunk async for chunk in stream])

    return await asyncio.gather(*(one(request) for request in requests))


def served(sampler: VLLMSampler, requests) -> list[Turn]:
    async def run():
        async with sampler:
            return await turns_of(sampler, requests)

    return asyncio.run(run())


def test_greedy_is_that_of_the_hf_sampler(url, tokenizer, eos, student, contexts):
    requests = [SampleRequest(context, 0, 40, Sampling(temperature=0.0)) for context in contexts]
    theirs = served(VLLMSampler(url, tokenizer, eos), requests)
    mine = asyncio.run(turns_of(HFSampler(student, output_head(student).num_rows, eos), requests))
    for one, other in zip(theirs, mine, strict=True):
        np.testing.assert_array_equal(one.sampled_ids, other.sampled_ids)
        assert one.finish == other.finish
    assert {turn.finish for turn in mine} == {"eos", "length"}
    assert all(turn.sampled_ids[-1] in eos for turn in theirs if turn.finish == "eos")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, top_k=40, presence_penalty=2.0),
        Sampling(temperature=1.3, top_p=0.8),
    ],
    ids=str,
)
def test_logps_are_those_of_the_distribution_sampled_from(url, tokenizer, eos, student, contexts, sampling):
    requests = [SampleRequest(context, 5 + i, 24, sampling) for i, context in enumerate(contexts)]
    for turn in served(VLLMSampler(url, tokenizer, eos, logps=True), requests):
        np.testing.assert_allclose(turn.sampler_logps, expected_logps(student, turn, sampling), atol=5e-3)


def expected_logps(student, turn: Turn, sampling: Sampling) -> np.ndarray:
    """[n]: by one forward over the whole turn; -inf where the token should have been cut away."""
    n = len(turn.sampled_ids)
    sampled = torch.from_numpy(turn.sampled_ids).long()
    ids = torch.cat([torch.from_numpy(turn.context_ids).long(), sampled])
    with torch.no_grad():
        logits = student(ids[None]).logits[0, -n - 1 : -1].double()
    for place in range(n):
        logits[place, sampled[:place].unique()] -= sampling.presence_penalty
    logits /= sampling.temperature
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    values, order = logits.sort(descending=True)
    probs = values.softmax(-1)
    logits.scatter_(1, order, values.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, -torch.inf))
    return logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0].numpy()


def test_a_seed_gives_the_same_turn_again(url, tokenizer, eos, contexts):
    sampler = VLLMSampler(url, tokenizer, eos)
    first, second, other = (
        [turn.sampled_ids.tolist() for turn in served(sampler, [SampleRequest(c, seed, 24, Sampling()) for c in contexts])]
        for seed in (2**62, 2**62, 8)
    )
    assert first == second
    assert first != other


def test_many_turns_at_once(url, tokenizer, eos, contexts):
    requests = [SampleRequest(contexts[i % 3], i, 4, Sampling()) for i in range(100)]
    turns = served(VLLMSampler(url, tokenizer, eos, max_in_flight=64), requests)
    assert len({tuple(turn.sampled_ids) for turn in turns}) > 50


def test_a_cancelled_turn_is_aborted(url, tokenizer, eos, contexts):
    def running() -> float:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            found = re.search(r"^vllm:num_requests_running{.*} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    async def until(value: float, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while await asyncio.to_thread(running) != value:
                await asyncio.sleep(0.05)

    async def run():
        # no EOS is at hand: it would run for a minute
        async with VLLMSampler(url, tokenizer, [0]) as sampler:
            turn = asyncio.create_task(turns_of(sampler, [SampleRequest(contexts[2], 0, 900, Sampling())]))
            await until(1, 20)
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            assert not sampler.busy
            await until(0, 5)

    asyncio.run(run())


def test_refusals_of_the_server(url, tokenizer, eos, contexts):
    with pytest.raises(UserError, match="takes 1024 tokens"):
        served(VLLMSampler(url, tokenizer, eos), [SampleRequest(contexts[0], 0, 1024, Sampling())])
    with pytest.raises(UserError, match=r"answers 400: .*out of vocabulary"):
        served(VLLMSampler(url, tokenizer, eos), [SampleRequest(np.array([10**6], np.int32), 0, 4, Sampling())])
    with pytest.raises(UserError, match="another tokenizer"):
        served(VLLMSampler(url, load_tokenizer(str(FOLDER / "qwen05"), "--model"), eos), [])


def test_a_teacher_on_the_server_writes_prompts(model, url, tmp_path):
    options = EvalOptions(temperature=1.0, max_new_tokens=192, url=url)
    request = Request(model, 4, options, instruction_text(None, "arithmetic"), "arithmetic", max_attempts=32)
    facts = author_prompts(request, tmp_path / "pool.jsonl")
    rows = read_pool(tmp_path / "pool.jsonl", "pool")
    assert [row.id for row in rows] == [f"arithmetic-{place}" for place in range(4)]
    assert all(row.text and "<|" not in row.text for row in rows)
    assert rows[0].provenance["weights"] is None  # the server names no digest
    assert facts["num_tokens"] >= sum(row.num_tokens or 0 for row in rows)
