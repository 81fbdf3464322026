"""The child process in which vLLM computes. Run as a file, `python -I engine.py FD`, by vLLM's own interpreter.

`opd` is not installed there, so this imports the standard library, numpy, safetensors and vLLM alone. The pipe, an inherited
socket, carries messages both ways: a length (u32, little-endian) and one safetensors file, whose metadata has one JSON text
with `id` (of the question), `kind` and the kind's fields. A question is answered by any number of messages of its id, the
last of kind `done` or `error`; only `abort` has no answer. `died` comes unasked and last. When the other side closes the
pipe, the child ends.

Shape legend: c context tokens, n tokens asked about, m ids a token asked for, k most likely tokens a row.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (vLLM is in another environment)

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load, save

MAX_BYTES = 2**32 - 1  # of one message
WATCH_S = 5.0  # between looks at an engine that nobody asks
END_S = 15.0  # for the engine to end in order once nobody is left to ask
Tensors = dict[str, np.ndarray]
Message = tuple[dict[str, Any], Tensors]


def pack(fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None) -> bytes:
    """One message as it travels."""
    arrays = {name: np.ascontiguousarray(array) for name, array in (tensors or {}).items()}
    body = save(arrays, metadata={"json": json.dumps(fields, allow_nan=False)})
    return len(body).to_bytes(4, "little") + body


def receive(pipe: socket.socket) -> Message | None:
    """The next message; None when the other side has closed the pipe."""
    head = _exactly(pipe, 4)
    body = None if head is None else _exactly(pipe, int.from_bytes(head, "little"))
    if body is None:
        return None
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return json.loads(header["__metadata__"]["json"]), load(bytes(body))


def _exactly(pipe: socket.socket, size: int) -> bytearray | None:
    body, at = bytearray(size), 0
    while at < size:
        try:
            read = pipe.recv_into(memoryview(body)[at:])
        except ConnectionError:
            return None
        if not read:
            return None
        at += read
    return body


class VLLM:
    """vLLM's engine behind plain arrays. Lives in one event loop."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.adapters: dict[str, Any] = {}
        self._count = 0

    async def start(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Loads what `arguments` (of vLLM's engine) name and `adapters` (name -> folder); answers facts about it."""
        import vllm
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = dict(fields["arguments"])
        if current_platform.is_cpu():
            # with a prefill in parts, vLLM 0.32 on a CPU dies of requests with a seed
            arguments |= {"enforce_eager": True, "enable_chunked_prefill": False}
            arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
        self.engine = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
        for number, (name, folder) in enumerate(fields["adapters"].items(), 1):
            self.adapters[name] = LoRARequest(name, number, folder)
            await self.engine.add_lora(self.adapters[name])
        config = self.engine.vllm_config
        return {
            "max_model_len": int(config.model_config.max_model_len),
            "rows": int(config.model_config.get_vocab_size()),
            "batch_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "chosen_ids": bool(getattr(config, "use_v2_model_runner", False)),  # whether it scores ids of our choice
            "vllm": vllm.__version__,
            "pid": os.getpid(),
        }

    async def score(self, fields: dict[str, Any], tensors: Tensors) -> Tensors:
        """`logps` [n] of the last n of `ids`, and the k most likely tokens there, `topk_ids` and `topk_logps` [n, k].

        With `chosen` [n, m] also `chosen_logps` [n, m].
        """
        from vllm import SamplingParams

        ids, n, k = tensors["ids"], fields["n"], fields["k"]
        wanted: dict[str, Any] = {}
        if "chosen" in tensors:
            wanted = {"prompt_logprob_token_ids": tensors["chosen"], "prompt_logprob_start": len(ids) - 1 - n}
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=k,
            detokenize=False,
            flat_logprobs=True,
            skip_reading_prefix_cache=True,
            **wanted,
        )
        output: Any = None
        async for output in self._generate(ids, params, fields["adapter"]):  # noqa: B007
            pass
        answer = read_flat(output.prompt_logprobs, n, k)
        if "chosen" in tensors:
            answer["chosen_logps"] = np.asarray(output.prompt_token_id_logprobs, np.float32)
        return answer

    async def sample(self, fields: dict[str, Any], tensors: Tensors) -> AsyncIterator[Message]:
        """The turn that follows `ids`, as it comes: `sampled_ids` and `logps` [m], `topk_ids` and `topk_logps` [m, k]."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            seed=fields["seed"],
            max_tokens=fields["max_tokens"],
            temperature=fields["temperature"],
            top_p=fields["top_p"],
            top_k=fields["top_k"],
            presence_penalty=fields["presence_penalty"],
            stop_token_ids=fields["eos_ids"],
            ignore_eos=True,  # the engine's own: exactly the ids above end a turn
            logprobs=fields["k"],
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._generate(tensors["ids"], params, fields["adapter"]):
            (one,) = output.outputs
            if not one.token_ids:
                continue
            sampled = np.asarray(one.token_ids, np.int32)
            answer = read_flat(one.logprobs, len(sampled), fields["k"])
            finish = {"stop": "eos", "length": "length"}.get(one.finish_reason)
            yield {"finish": finish}, {"sampled_ids": sampled, **answer}

    async def reset(self) -> None:
        """Forgets the keys and values of earlier requests."""
        await self.engine.reset_prefix_cache()

    async def load(self, fields: dict[str, Any]) -> None:
        """Takes over the weights in `folder`, in place. Nothing may be under way."""
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": fields["folder"]})
        await self.engine.reset_prefix_cache()

    async def alive(self) -> None:
        """Raises where the engine has died."""
        if self.engine is not None:
            await self.engine.check_health()

    def shutdown(self) -> None:
        """Ends the engine's own processes."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.shutdown()

    def _generate(self, ids: np.ndarray, params: Any, adapter: str | None) -> AsyncIterator[Any]:
        self._count += 1
        lora = None if adapter is None else self.adapters[adapter]
        prompt = {"prompt_token_ids": ids.tolist()}
        return self.engine.generate(prompt, params, str(self._count), lora_request=lora)


def read_flat(flat: Any, n: int, k: int) -> Tensors:
    """The last n positions of vLLM's FlatLogprobs: at each the token itself, and after it at least the k most likely."""
    starts = np.asarray(flat.start_indices[-n:] if n else [], np.int64)
    first = int(starts[0]) if n else len(flat.token_ids)
    at = (starts - first)[:, None] + np.arange(1 + k)
    ids, logps = np.asarray(flat.token_ids[first:], np.int32)[at], np.asarray(flat.logprobs[first:], np.float32)[at]
    return {"logps": logps[:, 0], "topk_ids": ids[:, 1:], "topk_logps": logps[:, 1:]}


class Child:
    """Answers the questions that come through the pipe."""

    def __init__(self, pipe: socket.socket, engine: Any = None) -> None:
        self.pipe, self.engine = pipe, VLLM() if engine is None else engine
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writes = threading.Lock()
        self._handlers: dict[str, Callable[[int, dict[str, Any], Tensors], Any]] = {
            "start": self._start,
            "score": self._score,
            "sample": self._sample,
            "reset": self._reset,
            "load": self._load,
        }

    async def run(self) -> None:
        """Until the other side closes the pipe. A thread reads it, so that its end is seen while a model loads."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            while (message := receive(self.pipe)) is not None:
                loop.call_soon_threadsafe(self._take, *message)
            killer = threading.Timer(END_S, lambda: os.killpg(os.getpgid(0), signal.SIGKILL))  # a load cannot be stopped
            killer.daemon = True
            killer.start()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        watch = loop.create_task(self._watch())
        try:
            await ended.wait()
        finally:
            watch.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self.engine.shutdown()

    def _take(self, fields: dict[str, Any], tensors: Tensors) -> None:
        number, kind = fields["id"], fields["kind"]
        if kind == "abort":
            if (task := self._tasks.get(fields["of"])) is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, kind, fields, tensors))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, number: int, kind: str, fields: dict[str, Any], tensors: Tensors) -> None:
        try:
            await self._handlers[kind](number, fields, tensors)
        except Exception as error:
            await self._end_if_dead()
            self._send(number, "error", {"type": type(error).__name__, "text": _line(error)})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._end_if_dead()

    async def _end_if_dead(self) -> None:
        """An engine that has died answers nothing any more: so the process says why, and ends."""
        try:
            await self.engine.alive()
        except Exception as error:
            self._send(0, "died", {"text": f"vLLM's engine has died: {type(error).__name__}: {_line(error)}"})
            os._exit(1)

    async def _start(self, number: int, fields: dict[str, Any], tensors: Tensors) -> None:
        self._send(number, "done", await self.engine.start(fields))

    async def _score(self, number: int, fields: dict[str, Any], tensors: Tensors) -> None:
        self._send(number, "done", {}, await self.engine.score(fields, tensors))

    async def _sample(self, number: int, fields: dict[str, Any], tensors: Tensors) -> None:
        async for of_chunk, arrays in self.engine.sample(fields, tensors):
            self._send(number, "chunk", of_chunk, arrays)
        self._send(number, "done", {})

    async def _reset(self, number: int, fields: dict[str, Any], tensors: Tensors) -> None:
        await self.engine.reset()
        self._send(number, "done", {})

    async def _load(self, number: int, fields: dict[str, Any], tensors: Tensors) -> None:
        await self.engine.load(fields)
        self._send(number, "done", {})

    def _send(self, number: int, kind: str, fields: Mapping[str, Any], tensors: Tensors | None = None) -> None:
        with self._writes, contextlib.suppress(ConnectionError):  # whoever asked has gone: the reading thread sees it
            self.pipe.sendall(pack({**fields, "id": number, "kind": kind}, tensors))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        asyncio.run(Child(inherited).run())
