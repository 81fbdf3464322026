"""The pool under workers that hang, crash, raise and are killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from opd.eval import pool as pool_module
from opd.eval.pool import TaskError, WorkerPool

make_eval = partial(partial, eval)  # a task is a Python expression


@pytest.fixture
def pool():
    pool = WorkerPool(make_eval, num_workers=2, limit_s=0.5)
    yield pool
    pool.close()


def pids(pool: WorkerPool) -> list[int]:
    return [worker.process.pid for worker in list(pool._workers)]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_are_in_order_and_workers_are_kept(pool: WorkerPool):
    assert pool.run([]) == []
    assert pids(pool) == []
    assert pool.run([f"{i} * 2" for i in range(50)]) == [2 * i for i in range(50)]
    before = set(pids(pool))
    assert len(before) == 2
    assert pool.run(["1", "2"]) == [1, 2]
    assert set(pids(pool)) == before


def test_a_hung_task_is_killed_and_the_rest_goes_on(pool: WorkerPool):
    pool.run(["1", "2"])
    hang_in_c = "9**9**9"  # holds the interpreter's lock: no signal handler would run
    started_s = time.monotonic()
    assert pool.run(["__import__('time').sleep(60)", "1", hang_in_c, "2", "3"]) == [None, 1, None, 2, 3]
    assert time.monotonic() - started_s < 5


def test_a_task_over_its_limit_is_ended_by_the_pool_and_not_tried_again(pool: WorkerPool, tmp_path):
    """The worker's own alarm is for orphans: to the pool it is a crash, and a crashed task is tried again."""
    tries = tmp_path / "tries"
    assert pool.run([f"open({str(tries)!r}, 'a').write('x') and __import__('time').sleep(60)"]) == [None]
    assert tries.read_text() == "x"


def test_a_crash_is_retried_once(pool: WorkerPool, tmp_path):
    crash = "__import__('os').kill(__import__('os').getpid(), 11)"
    flag = str(tmp_path / "flag")
    crash_once = f"0 if __import__('os').path.exists({flag!r}) else [open({flag!r}, 'w').close(), {crash}]"
    assert pool.run([crash, "1", crash_once, "2"]) == [None, 1, 0, 2]


def test_workers_killed_while_idle_are_replaced(pool: WorkerPool):
    pool.run(["1", "2"])
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
    assert pool.run(["1", "2", "3"]) == [1, 2, 3]


def test_an_exception_is_reported_with_its_task_and_the_pool_survives(pool: WorkerPool):
    with pytest.raises(TaskError) as caught:
        pool.run(["1", "1 / 0"])
    assert (caught.value.index, caught.value.message.split(" (")[0]) == (1, "ZeroDivisionError: division by zero")
    with pytest.raises(TaskError, match="SystemExit"):
        pool.run(["exit(3)"])
    assert pool.run(["1"]) == [1]


def test_threads_share_the_workers(pool: WorkerPool):
    results: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: pool.run([str(i)] * 20)})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i] * 20 for i in range(8)}
    assert len(pids(pool)) <= 2


def test_workers_ignore_ctrl_c_and_import_nothing_heavy(pool: WorkerPool):
    code = "(__import__('os').getpgid(0), [m for m in __import__('sys').modules if m.startswith(('torch', 'trans'))])"
    ((group, heavy),) = pool.run([code])
    assert group != os.getpgid(0)
    assert heavy == []


def test_close_ends_the_workers_and_a_run_in_progress():
    pool = WorkerPool(make_eval, num_workers=1, limit_s=60)
    pool.run(["1"])
    (pid,) = pids(pool)
    timer = threading.Timer(0.2, pool.close)
    timer.start()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(["__import__('time').sleep(60)"])
    timer.join()
    assert not is_alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(["1"])


def test_a_worker_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_BOOT", "raise SystemExit(7)")
    pool = WorkerPool(make_eval, num_workers=1, limit_s=1)
    with pytest.raises(RuntimeError, match="did not start"):
        pool.run(["1"])


def test_nothing_outlives_the_process(tmp_path):
    """Not even a hung worker of a process that was killed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from functools import partial\n"
        "from opd.eval.pool import WorkerPool\n"
        "pool = WorkerPool(partial(partial, eval), 2, 0.5)\n"  # no __main__ guard: it is not imported again
        "print(*pool.run(['__import__(\"os\").getpid()'] * 2), flush=True)\n"
        "pool.run(['[print(1, flush=True), 9**9**9]'] * 2)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    workers = [int(pid) for pid in process.stdout.readline().split()]
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 10
    while any(is_alive(pid) for pid in workers) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in workers)
