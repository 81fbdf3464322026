"""Worker processes with a hard time limit per task.

`concurrent.futures` cannot kill a hung worker, and `multiprocessing` re-imports the caller's main script (and with it
torch) into each worker. Here a worker is a bare interpreter that imports only what its job needs, in its own session:
Ctrl-C does not reach it, and it is killed together with whatever it started.
"""

import os
import queue
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

START_LIMIT_S = 120.0
MAX_TRIES = 2  # a worker that crashes may have been hit by something else than its task

_BOOT = (
    "import sys; from multiprocessing.connection import Connection; conn = Connection(int(sys.argv[1])); "
    "sys.path[:] = conn.recv(); from opd.eval.pool import serve; serve(conn)"
)

Work = Callable[[Any], Any]


class TaskError(Exception):
    """A task raised in its worker: its index among the tasks, and the exception in words."""

    def __init__(self, index: int, message: str):
        super().__init__(index, message)
        self.index, self.message = index, message


def serve(conn: Connection) -> None:
    """The worker's loop, until the parent closes the connection."""
    with suppress(EOFError, ConnectionError):
        setup, limit_s = conn.recv()
        work: Work = setup()
        conn.send(None)  # ready: from here on the time limit counts
        while True:
            task = conn.recv()
            # The kernel ends a hung worker whose parent died before it could.
            signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 1)
            try:
                answer = (True, work(task))
            except BaseException as error:  # SystemExit too: the task failed, the worker goes on
                answer = (False, _describe(error))
            signal.setitimer(signal.ITIMER_REAL, 0)
            conn.send(answer)


def _describe(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"


def _unwrap(answer: tuple[bool, Any], index: int) -> Any:
    succeeded, result = answer
    if not succeeded:
        raise TaskError(index, result)
    return result


class _Worker:
    def __init__(self, setup: Callable[[], Work], limit_s: float):
        self.conn, theirs = Pipe()
        with theirs:
            fd, null = theirs.fileno(), subprocess.DEVNULL
            command = [sys.executable, "-c", _BOOT, str(fd)]
            self.process = subprocess.Popen(command, pass_fds=[fd], stdin=null, start_new_session=True)
        self.limit_s, self.ready = limit_s, False
        with suppress(ConnectionError):  # a worker that died is noticed by whoever waits for it
            self.conn.send(sys.path)
            self.conn.send((setup, limit_s))

    def begin(self, index: int, tasks: Sequence[Any]) -> None:
        self.index = index
        self.deadline_s = time.monotonic() + (self.limit_s if self.ready else START_LIMIT_S)
        if self.ready:
            with suppress(ConnectionError):
                self.conn.send(tasks[index])

    def kill(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _kill_all(workers: set[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        while workers:
            workers.pop().kill()


class WorkerPool:
    """Runs tasks in at most `num_workers` processes, each started when it is first needed. Thread-safe.

    `setup()` is called once in each worker and returns the function that does a task; it and the tasks are pickled.
    `limit_s` is wall-clock seconds per task, not counting the worker's start.
    """

    def __init__(self, setup: Callable[[], Work], num_workers: int, limit_s: float):
        self._setup, self._limit_s = setup, limit_s
        self._workers: set[_Worker] = set()
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # idle workers, None for one not started
        for _ in range(num_workers):
            self._slots.put(None)
        self._closed = False
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def run(self, tasks: Sequence[Any]) -> list[Any]:
        """Each task's result; None for one that ran over the limit or crashed its worker twice.

        Raises TaskError for the first task seen to raise, RuntimeError if workers do not start or the pool is closed.
        """
        results: list[Any] = [None] * len(tasks)
        waiting, tries = deque(range(len(tasks))), [0] * len(tasks)
        busy: dict[Any, _Worker] = {}  # by connection
        try:
            while waiting or busy:
                while waiting and (worker := self._acquire(block=not busy)):
                    busy[worker.conn] = worker
                    worker.begin(waiting.popleft(), tasks)
                pause_s = min(worker.deadline_s for worker in busy.values()) - time.monotonic()
                for conn in wait(list(busy), timeout=max(0.0, pause_s)):
                    worker = busy[conn]
                    try:
                        answer = worker.conn.recv()
                    except (EOFError, ConnectionError):
                        self._replace(busy.pop(conn))
                        tries[worker.index] += 1
                        if tries[worker.index] < MAX_TRIES:
                            waiting.append(worker.index)
                        continue
                    if answer is None:
                        worker.ready = True
                        worker.begin(worker.index, tasks)
                    else:
                        self._slots.put(busy.pop(conn))
                        results[worker.index] = _unwrap(answer, worker.index)
                for worker in [w for w in busy.values() if w.deadline_s <= time.monotonic()]:
                    self._replace(busy.pop(worker.conn))
            return results
        finally:  # after an error or Ctrl-C the busy workers still hold tasks that nobody waits for
            for worker in busy.values():
                self._discard(worker)

    def close(self) -> None:
        """Kills the workers; a `run` in another thread raises RuntimeError."""
        self._closed = True
        self._finalizer()

    def _acquire(self, block: bool) -> _Worker | None:
        try:
            worker = self._slots.get(block)
        except queue.Empty:
            return None
        if worker and worker.process.poll() is None and not self._closed:
            return worker
        if worker:
            self._workers.discard(worker)  # it died while idle
            worker = None
        try:
            self._check_open()
            worker = _Worker(self._setup, self._limit_s)
            self._workers.add(worker)
            self._check_open()  # again: `close` may not have seen this worker
            return worker
        except BaseException:
            if worker:
                worker.kill()
            self._slots.put(None)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the grader is closed")

    def _replace(self, worker: _Worker) -> None:
        """Ends a worker that crashed or ran out of time; the next `_acquire` starts another in its slot."""
        self._discard(worker)
        self._check_open()
        if not worker.ready:
            raise RuntimeError("a grading worker did not start; its own message is on stderr")

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        worker.conn.close()
        self._workers.discard(worker)
        self._slots.put(None)
