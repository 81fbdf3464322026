"""Bytes and microseconds a token of what a teacher answers, on our wire and in the forms others use.

    OMP_NUM_THREADS=1 python -m benchmarks.wire [--out FILE]

Every form goes from arrays to bytes (encode) and back to the same arrays (decode), and is checked to. `opd` is
`opd.teachers.wire` with all of its checks; `library` the safetensors library's own `save` and `load` of the same arrays;
`base64` float32 and int32 arrays as base64 in JSON, as TRL's server has them; `json` a dict a position and a dict an entry,
as vLLM's server has log-probs, and nested lists for ids and hidden states. The last two use Python's `json`. The forms of a
payload are measured in turns, round after round, in one process on one thread. Prints a table.
"""

import argparse
import base64
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from benchmarks.machine import describe
from opd.records import ScoreRequest, Scores
from opd.teachers import wire

VOCAB = 151_669  # Qwen3's, which decides how many digits an id has in JSON
WEIGHTS = "0123456789abcdef" * 2
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """One way to write a message."""

    encode: Callable[[Arrays], bytes]
    decode: Callable[[bytes], Arrays]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a message")
    parser.add_argument("--k", type=int, default=64, help="entries a token")
    parser.add_argument("--hidden", type=int, default=4096, help="size of a hidden state")
    parser.add_argument("--hidden-tokens", type=int, default=256, help="tokens of a message of hidden states")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.02, help="least time of a form's turn in a round")
    parser.add_argument("--out", type=Path, help="also write JSON here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for payload, messages in payloads(options.tokens, options.k, options.hidden, options.hidden_tokens).items():
        rows += measure(payload, messages, options.rounds, options.seconds)
    report = {
        "machine": describe() | {"threads": 1, "numpy": version("numpy"), "safetensors": version("safetensors")},
        "settings": {name: getattr(options, name) for name in ("tokens", "k", "hidden", "hidden_tokens", "rounds")},
        "rows": rows,
    }
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def payloads(tokens: int, k: int, hidden: int, hidden_tokens: int) -> dict[str, tuple[Arrays, ...]]:
    """The messages of each payload, by its name. Given ids are a question and its answer; the other questions are small."""
    rng = np.random.default_rng(0)
    logps = np.sort(-rng.exponential(4.0, (tokens, k)).astype(np.float32))[:, ::-1].copy()
    answer = {
        "logps": logps[:, 0].copy(),  # the sampled tokens are the likeliest ones, so that they are no entries of their own
        "topk_ids": np.stack([rng.choice(VOCAB, k, replace=False) for _ in range(tokens)]).astype(np.int32),
        "topk_logps": logps,
        "tail": rng.random(tokens, np.float32),
    }
    # numpy has no bfloat16: it sees these as int16 with the same bits
    states = torch.from_numpy(rng.standard_normal((hidden_tokens, hidden), np.float32)).bfloat16()
    return {
        "sampled": ({"logps": answer["logps"]},),
        f"top-{k} + tail + sampled": (answer,),
        f"{k} given ids, question + answer": ({"ids": answer["topk_ids"]}, answer),
        f"hidden bf16 H={hidden}": ({"hidden": states.view(torch.int16).numpy()},),
    }


def measure(payload: str, messages: tuple[Arrays, ...], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each form: bytes, and the least and the median time of a call, a token."""
    times: dict[tuple[str, str], list[float]] = {}
    bodies = {name: [form.encode(message) for message in messages] for name, form in FORMS.items()}
    for name, form in FORMS.items():
        for body, message in zip(bodies[name], messages):
            decoded = form.decode(body)
            for part in decoded.keys() & message.keys():
                np.testing.assert_array_equal(decoded[part], message[part])
            assert message.keys() - decoded.keys() <= {"tail"}  # vLLM's form has none
    for _ in range(rounds):
        gc.collect()
        for name, form in FORMS.items():
            times.setdefault((name, "encode"), []).extend(turn(form.encode, messages, seconds))
            times.setdefault((name, "decode"), []).extend(turn(form.decode, bodies[name], seconds))
    tokens = len(next(iter(messages[0].values())))
    rows = []
    for name in FORMS:
        row: dict[str, Any] = {"payload": payload, "form": name, "tokens": tokens}
        row["bytes_per_token"] = round(sum(map(len, bodies[name])) / tokens, 2)
        for work in ("encode", "decode"):
            found = times[name, work]
            row[f"{work}_us_per_token"] = round(statistics.median(found) * 1e6 / tokens, 4)
            row[f"{work}_us_per_token_min"] = round(min(found) * 1e6 / tokens, 4)
        rows.append(row)
    return rows


def turn(work: Callable[[Any], object], items: Sequence[Any], seconds: float) -> list[float]:
    """Seconds of each of the calls that fit into the time, at least one; the results are dropped at once."""
    found: list[float] = []
    while not found or sum(found) < seconds:
        start = time.perf_counter()
        for item in items:
            work(item)
        found.append(time.perf_counter() - start)
    return found


def opd_encode(message: Arrays) -> bytes:
    if "ids" in message:
        tokens = np.zeros(len(message["ids"]), np.int32)
        request = ScoreRequest(context_ids=tokens[:1], token_ids=tokens, ids=message["ids"])
        return wire.encode_score_request(wire.Asked(request, VOCAB, -30.0))
    if "hidden" in message:
        states = torch.from_numpy(message["hidden"]).view(torch.bfloat16)
        return wire.encode_scores(Scores(hidden=states, head=WEIGHTS), WEIGHTS)
    return wire.encode_scores(Scores(**message), WEIGHTS)  # type: ignore[arg-type]


def opd_decode(body: bytes) -> Arrays:
    if b'"score_request"' in body[:200]:
        ids = wire.decode_score_request(body).request.ids
        assert ids is not None
        return {"ids": ids}
    scores, _ = wire.decode_scores(body)
    if scores.hidden is not None:
        return {"hidden": scores.hidden.view(torch.int16).numpy()}
    found = {name: getattr(scores, name) for name in ("logps", "topk_ids", "topk_logps", "tail")}
    return {name: array for name, array in found.items() if array is not None}


def base64_encode(message: Arrays) -> bytes:
    parts = {
        name: {"dtype": array.dtype.name, "shape": array.shape, "data": base64.b64encode(array.data).decode()}
        for name, array in message.items()
    }
    return json.dumps(parts).encode()


def base64_decode(body: bytes) -> Arrays:
    return {
        name: np.frombuffer(base64.b64decode(part["data"]), part["dtype"]).reshape(part["shape"])
        for name, part in json.loads(body).items()
    }


def json_encode(message: Arrays) -> bytes:
    if "ids" in message:
        return json.dumps({"ids": message["ids"].tolist()}).encode()
    if "hidden" in message:
        states = torch.from_numpy(message["hidden"]).view(torch.bfloat16)
        return json.dumps({"hidden": states.float().tolist()}).encode()
    if "topk_ids" in message:
        rows = zip(message["topk_ids"].tolist(), message["topk_logps"].tolist())
    else:
        rows = (([VOCAB], [logp]) for logp in message["logps"].tolist())
    positions = [
        {i: {"logprob": logp, "rank": rank, "decoded_token": None} for rank, (i, logp) in enumerate(zip(*row), start=1)}
        for row in rows
    ]
    return json.dumps({"prompt_logprobs": positions}).encode()


def json_decode(body: bytes) -> Arrays:
    message = json.loads(body)
    if "ids" in message:
        return {"ids": np.array(message["ids"], np.int32)}
    if "hidden" in message:
        return {"hidden": torch.tensor(message["hidden"], dtype=torch.bfloat16).view(torch.int16).numpy()}
    positions = message["prompt_logprobs"]
    logps = np.array([[entry["logprob"] for entry in row.values()] for row in positions], np.float32)
    if logps.shape[1] == 1:
        return {"logps": logps[:, 0]}
    ids = np.array([[int(i) for i in row] for row in positions], np.int32)
    return {"logps": logps[:, 0], "topk_ids": ids, "topk_logps": logps}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text: medians, and the least in brackets."""
    lines = [f"{'payload':32} {'form':8} {'tokens':>6} {'B/token':>10} {'encode us/token':>20} {'decode us/token':>20}"]
    for row in rows:
        encode, decode = (
            f"{row[f'{work}_us_per_token']:.4g} ({row[f'{work}_us_per_token_min']:.4g})" for work in ("encode", "decode")
        )
        start = f"{row['payload']:32} {row['form']:8} {row['tokens']:6} {row['bytes_per_token']:10,.1f}"
        lines.append(f"{start} {encode:>20} {decode:>20}")
    return "\n".join(lines)


FORMS = {
    "opd": Form(opd_encode, opd_decode),
    "library": Form(safetensors.numpy.save, safetensors.numpy.load),
    "base64": Form(base64_encode, base64_decode),
    "json": Form(json_encode, json_decode),
}

if __name__ == "__main__":
    main()
