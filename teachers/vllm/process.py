"""Starts the engine's process, asks it through the pipe, and notices its death. See `opd.teachers.vllm.engine`."""

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

from opd.errors import UserError
from opd.records import Array
from opd.teachers.server.admission import Refused
from opd.teachers.vllm.engine import END_S, Message, pack, receive

ENGINE = Path(__file__).with_name("engine.py")
TAIL_S = 1.0  # for the last lines of a process that has ended


class EngineDied(Exception):
    """The engine's process has ended. The message is one line."""


class EngineProcess:
    """The child, from `__init__` to `close`. Questions may come from any thread's loop.

    Example: `engine = EngineProcess("/opt/vllm/bin/python"); facts = engine.start({"arguments": {...}, "adapters": {}})`
    """

    def __init__(self, python: str, script: Path = ENGINE, environment: Mapping[str, str] | None = None) -> None:
        """`environment` has what its variables are where ours do not say.

        Raises `UserError` for an interpreter that cannot be run.
        """
        self.python = python
        self.pipe, theirs = socket.socketpair()
        command = [python, "-I", str(script), str(theirs.fileno())]
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # our stdout has the line that says where the server is
                stderr=subprocess.PIPE,
                env={**(environment or {}), **os.environ},
                start_new_session=True,  # a Ctrl-C is for us, who drain first; and its helpers end with it
            )
        except OSError as error:
            self.pipe.close()
            raise UserError(f"--vllm-python: {python} cannot be run: {error.strerror}") from None
        finally:
            theirs.close()
        self.death: str | None = None  # why it ended
        self._told: list[Callable[[str], None]] = []
        self._lock, self._writes = threading.Lock(), threading.Lock()
        self._number = 0
        self._asked: dict[int, Callable[[Message | EngineDied], None]] = {}  # what takes the answers, by question
        self._last_line = self._reason = ""
        self._closing = False
        self._log = threading.Thread(target=self._forward, name="engine log", daemon=True)
        self._reader = threading.Thread(target=self._read, name="engine", daemon=True)
        for thread in (self._log, threading.Thread(target=self._wait, daemon=True), self._reader):
            thread.start()

    def start(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Has the model loaded; facts about it. Blocks. Raises `UserError` where it cannot be."""
        answers: queue.SimpleQueue[Message | EngineDied] = queue.SimpleQueue()
        try:
            self._ask("start", fields, {}, answers.put)
            answer = answers.get()
            if isinstance(answer, EngineDied):
                raise answer
        except EngineDied as error:
            raise UserError(f"--backend vllm: {error}") from None
        facts, _ = answer
        if facts["kind"] == "error":
            if facts["type"] in ("ModuleNotFoundError", "ImportError"):
                raise UserError(f"--vllm-python: {self.python}: {facts['text']}; name a Python with vLLM installed")
            raise UserError(f"--backend vllm: {facts['type']}: {facts['text']}")
        return facts

    async def ask(self, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Array]) -> Message:
        """The only answer to a question. Raises `Refused` as `stream` does."""
        return [answer async for answer in self.stream(kind, fields, tensors)][-1]

    async def stream(self, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Array]) -> AsyncIterator[Message]:
        """The answers to a question, the one that ends them included. Left early, the question is aborted.

        Raises `Refused`: 400 for what the engine refuses, 503 when it dies, 500 for other faults.
        """
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Message | EngineDied] = asyncio.Queue()

        def take(answer: Message | EngineDied) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(answers.put_nowait, answer)

        number = None
        try:
            number = self._ask(kind, fields, tensors, take)
            while True:
                answer = await answers.get()
                if isinstance(answer, EngineDied):
                    raise answer
                if answer[0]["kind"] == "error":
                    status = 400 if answer[0]["type"] in ("ValueError", "VLLMValidationError") else 500
                    raise Refused(status, f"vLLM: {answer[0]['text']}")
                yield answer
                if answer[0]["kind"] == "done":
                    return
        except EngineDied as error:
            raise Refused(503, str(error)) from None
        finally:
            with self._lock:
                unfinished = number is not None and self._asked.pop(number, None) is not None
            if unfinished and self.death is None:
                self._send({"id": 0, "kind": "abort", "of": number}, {})

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """`tell(why)` is called, in some thread, when the process ends without having been closed."""
        with self._lock:
            self._told.append(tell)
            death = self.death
        if death is not None:
            tell(death)

    def close(self) -> None:
        """Ends the process, in order if it can. May be called again."""
        self._closing = True
        with contextlib.suppress(OSError):  # it has ended already
            self.pipe.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with all that it has started
        self.process.wait()
        self._reader.join()
        self.pipe.close()

    def _ask(
        self,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Array],
        take: Callable[[Message | EngineDied], None],
    ) -> int:
        with self._lock:
            if self.death is not None:
                raise EngineDied(self.death)
            self._number += 1
            number = self._number
            self._asked[number] = take
        self._send({**fields, "id": number, "kind": kind}, tensors)
        return number

    def _send(self, fields: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        with self._writes, contextlib.suppress(OSError):  # it has ended: the reading thread tells everyone
            self.pipe.sendall(pack(fields, tensors))

    def _read(self) -> None:
        while (message := receive(self.pipe)) is not None:
            last = message[0]["kind"] in ("done", "error")
            if message[0]["kind"] == "died":  # its helpers may write further lines
                self._reason = message[0]["text"]
            with self._lock:
                number = message[0]["id"]
                take = self._asked.pop(number, None) if last else self._asked.get(number)
            if take is not None:  # else it was aborted
                take(message)
        self.process.wait()
        self._log.join(TAIL_S)
        code = self.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        reason = self._reason or self._last_line
        why = f"the engine's process ended with {how}" + (f": {reason}" if reason else "")
        with self._lock:
            self.death = why
            asked, self._asked = self._asked, {}
            told = [] if self._closing else list(self._told)
        for tell in told:  # first, so that whoever is refused and comes again finds no one there
            tell(why)
        for take in asked.values():
            take(EngineDied(why))

    def _wait(self) -> None:
        """What the engine has started may hold the pipe open after its death."""
        self.process.wait()
        with contextlib.suppress(OSError):
            self.pipe.shutdown(socket.SHUT_RDWR)

    def _forward(self) -> None:
        """Its stderr to ours, line by line."""
        for line in cast(Any, self.process.stderr):
            text = line.decode(errors="replace")
            self._last_line = " ".join(text.split())[:300] or self._last_line
            sys.stderr.write(text)
            sys.stderr.flush()
        cast(Any, self.process.stderr).close()


def default_python() -> str:
    """The interpreter that OPD_VLLM names, as itself or by its `bin` folder; else this one."""
    named = os.environ.get("OPD_VLLM")
    if not named:
        return sys.executable
    path = Path(named).expanduser()
    return str(path / "python" if path.is_dir() else path)
