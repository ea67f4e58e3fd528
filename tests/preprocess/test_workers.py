"""Workers: results in order, errors as if there were one process, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmtools.errors import DataError, WorkerError
from lmtools.preprocess.workers import available_cores, run_ordered, worker_pool
from tests.support import tasks
from tests.support.processes import alive, wait_until

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert list(run_ordered(tasks.square_slowly, range(9), workers=workers)) == [n * n for n in range(9)]


def test_one_worker_is_this_process() -> None:
    assert list(run_ordered(tasks.pid, [0], workers=1)) == [os.getpid()]


def test_workers_are_other_processes_that_end_with_the_block(tmp_path: Path) -> None:
    with worker_pool(2) as pool:
        pids = set(run_ordered(tasks.meet, [tmp_path] * 2, workers=2, executor=pool))
        assert len(pids) == 2
        assert os.getpid() not in pids
    assert not any(alive(pid) for pid in pids)


def test_workers_have_nothing_that_only_their_parent_imported() -> None:
    program = """if True:
        import decimal
        from lmtools.preprocess.workers import run_ordered
        from tests.support import tasks
        if __name__ == "__main__":
            print(*run_ordered(tasks.is_imported, ["decimal", "torch", "numpy", "lmtools.errors"], workers=2))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False False False True\n"


def test_ctrl_c_is_left_to_the_parent() -> None:
    assert list(run_ordered(tasks.ignores_ctrl_c, [0], workers=2)) == [True]


def test_few_items_are_under_way_at_a_time() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for n in range(1000):
            taken += 1
            yield n

    with ThreadPoolExecutor(2) as executor:
        for done, _ in enumerate(run_ordered(str, items(), workers=2, executor=executor), start=1):
            assert taken - done <= 4
    assert taken == 1000


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_in_order_is_raised(workers: int) -> None:
    # The second item fails at once, the first one later: the message must not depend on who was faster.
    with pytest.raises(DataError, match=r"^item 1$"):
        list(run_ordered(tasks.fail, [1, 0, *range(100)], workers=workers))
    assert multiprocessing.active_children() == []


def test_a_bug_in_a_worker_brings_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"^a worker failed with ZeroDivisionError: division by zero") as caught:
        list(run_ordered(tasks.divide, [0], workers=2))
    assert "tasks.py" in caught.value.traceback


def test_a_killed_worker_is_an_error() -> None:
    with pytest.raises(WorkerError, match=r"was killed \(SIGKILL\), perhaps for lack of memory; .* fewer --workers"):
        list(run_ordered(tasks.die, range(9), workers=2))
    assert multiprocessing.active_children() == []


def test_an_exception_ends_the_workers_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    pids: list[int] = []

    def block() -> None:
        with worker_pool(2) as pool:
            pids.extend(run_ordered(tasks.meet, [tmp_path] * 2, workers=2, executor=pool))
            for _ in range(4):
                pool.submit(time.sleep, 60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert time.monotonic() - begin < 30
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("signal_number", "to_group", "exit_code"),
    [(signal.SIGKILL, False, -signal.SIGKILL), (signal.SIGINT, True, 130), (signal.SIGINT, False, 130)],
    ids=["parent killed", "Ctrl-C", "parent interrupted"],
)
def test_no_worker_outlives_its_parent(tmp_path: Path, signal_number: int, to_group: bool, exit_code: int) -> None:
    command = [sys.executable, "-m", "tests.support.tasks", str(tmp_path / "output")]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        os.killpg(parent.pid, signal_number) if to_group else os.kill(parent.pid, signal_number)
        assert parent.wait(timeout=30) == exit_code
        wait_until(lambda: not any(alive(pid) for pid in workers))
        if signal_number == signal.SIGINT:
            assert parent.stderr.read() == ""
            assert list(tmp_path.iterdir()) == []


def test_cores_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert available_cores() == len(allowed)
    os.sched_setaffinity(0, [min(allowed)])
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
