"""An engine of a fixed table in the place of vLLM, behind the real child: `python -I fake_engine.py FD ENGINE`.

The next token depends on the one before alone. Some first tokens of a prompt mean trouble, see `_trouble`.
"""

import asyncio
import importlib.util
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROWS = 45
REFUSED, FAULTY, DEADLY, BROKEN, HANGING, NAN = 30, 31, 32, 33, 34, 35


def table(rows: int = ROWS) -> np.ndarray:
    """[R, R] float32 log-probs of the next token after each; a padded row is the most likely after token 7."""
    logits = 3.0 * np.random.default_rng(5).standard_normal((rows, rows))
    logits[7, rows - 1] = 20.0
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def flat(rows: np.ndarray, tokens: np.ndarray, k: int, before: int) -> SimpleNamespace:
    """vLLM's FlatLogprobs of `rows` [n, R] after `before` empty positions, with one entry more than was asked for."""
    order = np.argsort(-rows, axis=1, kind="stable")[:, : k + 1]
    ids = np.concatenate([tokens[:, None], order], axis=1)
    width = ids.shape[1]
    starts = [0] * before + [i * width for i in range(len(ids))]
    logprobs = np.take_along_axis(rows, ids, axis=1)
    return SimpleNamespace(start_indices=starts, token_ids=ids.ravel().tolist(), logprobs=logprobs.ravel().tolist())


class Table:
    """What `VLLM` is to the child."""

    def __init__(self, read_flat) -> None:
        self.read_flat, self.table, self.dead = read_flat, table(), False
        self.num_turns = 0

    async def start(self, fields):
        if "trouble" in os.environ.get("OPD_FAKE", ""):
            raise ValueError("no room for the model\n  on this device")
        exact = "exact" in os.environ.get("OPD_FAKE", "")
        arguments = fields["arguments"]
        known = {"rows": ROWS, "batch_tokens": arguments["max_num_batched_tokens"], "dtype": arguments["dtype"]}
        known |= {"max_model_len": arguments["max_model_len"], "chosen_ids": exact, "vllm": "0", "pid": os.getpid()}
        return {**known, "arguments": arguments, "adapters": fields["adapters"]}

    async def score(self, fields, tensors):
        ids, n = tensors["ids"], fields["n"]
        await self._trouble(ids)
        rows = self.table[ids[-n - 1 : -1]] if fields["adapter"] is None else np.roll(self.table, 1, 0)[ids[-n - 1 : -1]]
        if ids[0] == NAN:
            rows = rows * np.nan
        answer = self.read_flat(flat(rows, ids[-n:], fields["k"], len(ids) - n), n, fields["k"])
        if "chosen" in tensors:
            answer["chosen_logps"] = np.take_along_axis(rows, tensors["chosen"].astype(np.int64), axis=1)
        return answer

    async def sample(self, fields, tensors):
        await self._trouble(tensors["ids"])
        last, self.num_turns = int(tensors["ids"][-1]), self.num_turns + 1
        outside = "outside" in os.environ.get("OPD_FAKE", "") and self.num_turns <= 2
        for place in range(fields["max_tokens"]):
            row = self.table[[last]]
            last = fields["eos_ids"][0] if place == 4 else 3 + int(row[0, 3:38].argmax())
            if outside and place == 1:
                last = ROWS - 1  # a row of the head that is no token
            finish = "eos" if place == 4 else "length" if place + 1 == fields["max_tokens"] else None
            token = np.array([last], np.int32)
            yield (
                {"finish": finish},
                {"sampled_ids": token, **self.read_flat(flat(row, token, fields["k"], 0), 1, fields["k"])},
            )
            if finish == "eos":
                return

    async def reset(self):
        pass

    async def load(self, fields):
        self._say("loaded " + " ".join(sorted(path.name for path in Path(fields["folder"]).iterdir())))

    async def alive(self):
        if self.dead or "idle" in os.environ.get("OPD_FAKE", ""):
            print("a helper's last words", file=sys.stderr, flush=True)
            raise RuntimeError("EngineCore is gone")

    def shutdown(self):
        self._say("shut down")

    async def _trouble(self, ids):
        if ids[0] == REFUSED:
            raise ValueError("this prompt\ncannot be")
        if ids[0] == FAULTY:
            raise RuntimeError("a bug")
        if ids[0] == DEADLY:
            print("loading 100%\nout of memory, say", file=sys.stderr, flush=True)
            os._exit(7)
        if ids[0] == BROKEN:
            self.dead = True
            raise RuntimeError("no answer")
        if ids[0] == HANGING:
            self._say("hangs")
            try:
                await asyncio.sleep(60)
            finally:
                self._say("aborted")

    def _say(self, text):
        if "OPD_FAKE_LOG" in os.environ:
            with Path(os.environ["OPD_FAKE_LOG"]).open("a") as log:
                log.write(text + "\n")


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("engine", sys.argv[2])
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    vars(engine)["WATCH_S"] = 0.2
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        asyncio.run(engine.Child(pipe, Table(engine.read_flat)).run())
