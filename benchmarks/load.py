"""A teacher server under many clients: requests a second, latencies, errors, and whether its memory stays flat.

    python -m benchmarks.load [--requests 5000 --clients 32] [--out FILE]

Starts `opd serve teacher` on a randomly initialised micro Llama (3 layers, hidden size 128, 2,048 ids) in a process of its
own, and asks it from this one: sampled tokens, top-64, given ids, hidden states, and streams that append, rewind, and are
closed or left to be evicted; 1 to 400 tokens each. Every answer is checked as a trainer would. Prints JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.machine import describe
from opd.records import ScoreRequest
from opd.teachers.client.answers import check_scores
from opd.teachers.wire import Asked, decode_scores, encode_score_request

VOCAB, HIDDEN, MAX_TOKENS, APPENDS = 2048, 128, 400, 5
KINDS = (*("sampled", "topk", "ids", "hidden") * 5, "stream")  # a stream has several requests
WARM_UP = 1000  # requests, after which memory must stay
BATCH_TOKENS = 2048  # on a CPU, larger passes leave its caches: 16,384 tokens take 1.8 times as long a token
STREAM_MIB = 1.25  # a handful of streams: the cache is full before memory is first read, and some are lost while in use


@dataclass
class Tally:
    """What the clients saw."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_lost: int = 0  # appends to streams that had been evicted, sent again as a whole
    num_busy: int = 0  # told to come again
    rss_mib: list[float] = field(default_factory=list)  # of the server, every `WARM_UP` requests


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with serving(folder) as (pid, url):
            report = asyncio.run(measure(url, pid, options.requests, options.clients))
    text = json.dumps({"machine": describe(), "settings": settings(options), **report}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked of what."""
    model = f"random Llama: 3 layers, hidden size {HIDDEN}, {VOCAB} ids, float32"
    server = {"threads": 1, "max_batch_tokens": BATCH_TOKENS, "stream_cache_mib": STREAM_MIB}
    return {"model": model, "requests": options.requests, "clients": options.clients, "server": server}


def write_model(folder: Path) -> None:
    """A micro Llama with random weights, and a tokenizer of as many words."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(VOCAB)}, unk_token="word1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="word0").save_pretrained(folder)


@contextlib.contextmanager
def serving(folder: str) -> Iterator[tuple[int, str]]:
    """(process id, address) of a server of the model in `folder`; it must end in order."""
    options = ["--model", folder, "--port", "0", "--device", "cpu", "--max-batch-tokens", str(BATCH_TOKENS)]
    options += ["--stream-cache-gib", str(STREAM_MIB / 1024)]
    command = [sys.executable, "-m", "opd", "serve", "teacher", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        assert server.stdout is not None
        yield server.pid, server.stdout.readline().split(" at ")[1].split()[0]
        server.terminate()
        assert server.wait(60) == 0


async def measure(url: str, pid: int, num_requests: int, num_clients: int) -> dict[str, Any]:
    """The clients' figures, and the server's."""
    tally = Tally()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get("/v1/info") as response:
            head = (await response.json())["head"]
        client = Client(session, head, tally, pid, num_requests)
        jobs = iter(range(num_requests))
        begin = time.perf_counter()
        await asyncio.gather(*(client.work(jobs) for _ in range(num_clients)))
        wall_s = time.perf_counter() - begin
        async with session.get("/metrics") as response:
            metrics = await response.text()
    return summarise(tally, wall_s, rss_mib(pid), metrics)


class Client:
    """Asks and checks, on behalf of all clients."""

    def __init__(self, session: aiohttp.ClientSession, head: str, tally: Tally, pid: int, num_requests: int) -> None:
        self.session, self.head, self.tally, self.pid, self.num_requests = session, head, tally, pid, num_requests

    async def work(self, jobs: Iterator[int]) -> None:
        """One after another, until the requests of all clients together have been sent."""
        for seed in jobs:
            if self.tally.kinds.total() >= self.num_requests:
                return
            kind, rng = KINDS[seed % len(KINDS)], np.random.default_rng(seed)
            if kind == "stream":
                await self.stream(f"load-{seed}", rng)
            else:
                await self.ask(kind, question(kind, rng))

    async def stream(self, name: str, rng: np.random.Generator) -> None:
        """A sequence that grows and is rewound; every other one is never closed."""
        sequence = random_ids(rng, int(rng.integers(1, 50)))
        held = 0
        for _ in range(APPENDS):
            keep = int(rng.integers(max(1, len(sequence) - 5), len(sequence) + 1))
            new, held = random_ids(rng, int(rng.integers(1, MAX_TOKENS // APPENDS))), min(held, keep)
            request = ScoreRequest(sequence[held:keep], new, k=4, stream=name, keep_tokens=held)
            if not await self.ask("stream", request):
                self.tally.num_lost += 1
                await self.ask("stream", replace(request, context_ids=sequence[:keep], keep_tokens=0))
            sequence = np.concatenate([sequence[:keep], new])
            held = len(sequence)
        if rng.integers(2):
            async with self.session.delete(f"/v1/streams/{name}") as response:
                if response.status != 204:
                    self.tally.errors[f"DELETE: {response.status}"] += 1

    async def ask(self, kind: str, request: ScoreRequest) -> bool:
        """Whether there was an answer; not so for a lost stream."""
        body = encode_score_request(Asked(request, VOCAB, -30.0))
        self.tally.kinds[kind] += 1
        begin = time.perf_counter()
        status, answer = await self.post(body)
        while status == 503:
            self.tally.num_busy += 1
            await asyncio.sleep(0.1)
            status, answer = await self.post(body)
        self.tally.seconds.append(time.perf_counter() - begin)
        if len(self.tally.seconds) % WARM_UP == 0:
            self.tally.rss_mib.append(rss_mib(self.pid))
        if status == 409 and request.keep_tokens:
            return False
        if status != 200:
            self.tally.errors[f"{kind}: {status} {answer[:200].decode()}"] += 1
            return True
        scores, _ = decode_scores(answer)
        check_scores(scores, request, vocab=VOCAB, logp_floor=-30.0, head=self.head, hidden_size=HIDDEN)
        self.tally.num_tokens += len(request.token_ids)
        return True

    async def post(self, body: bytes) -> tuple[int, bytes]:
        async with self.session.post("/v1/score", data=body) as response:
            return response.status, await response.read()


def question(kind: str, rng: np.random.Generator) -> ScoreRequest:
    """A question of this kind about 1 to 400 tokens after 1 to 100."""
    n = int(rng.integers(1, MAX_TOKENS + 1))
    plain = ScoreRequest(random_ids(rng, int(rng.integers(1, 101))), random_ids(rng, n))
    if kind == "topk":
        return replace(plain, k=64, temperature=0.7)
    if kind == "ids":
        return replace(plain, ids=rng.integers(0, VOCAB, (n, 16)).astype(np.int32))
    return replace(plain, hidden=kind == "hidden")


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, VOCAB, count).astype(np.int32)


def summarise(tally: Tally, wall_s: float, last_rss_mib: float, metrics: str) -> dict[str, Any]:
    """The report. Memory is flat when its growth after the warm-up is below 10 %."""
    warm = tally.rss_mib[0] if tally.rss_mib else last_rss_mib
    ms = np.array(tally.seconds) * 1e3
    server = {}
    for name in ("opd_batches_total", "opd_scored_tokens_total", "opd_stream_hits_total", "opd_stream_evictions_total"):
        server[name] = next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(f"{name} "))
    return {
        "requests_by_kind": dict(sorted(tally.kinds.items())),
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(ms) / wall_s, 1),
        "tokens_per_s": round(tally.num_tokens / wall_s),
        "p50_ms": round(float(np.percentile(ms, 50)), 1),
        "p99_ms": round(float(np.percentile(ms, 99)), 1),
        "errors": dict(tally.errors),
        "told_to_come_again": tally.num_busy,
        "streams_sent_again": tally.num_lost,
        "server": server,
        "rss_mib_every_1000": [round(value, 1) for value in tally.rss_mib],
        "rss_mib_end": round(last_rss_mib, 1),
        "rss_growth": round(last_rss_mib / warm - 1, 4),
    }


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


if __name__ == "__main__":
    main()
