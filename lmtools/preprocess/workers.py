"""Worker processes for the text stages: tasks in, results out in order, and no process left behind.

A thread for each worker hands it one task at a time and waits for the answer, so that a worker's death is seen where it
happens, and everything can be ended at once. Tasks run on any other `concurrent.futures` executor as well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeVar

from lmtools.errors import LmtoolsError, WorkerError

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """How many cores this process may use: more workers than that only get in each other's way."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ordered(
    task: Callable[[Item], Result], items: Iterable[Item], *, workers: int, executor: Executor | None = None
) -> Iterator[Result]:
    """Run a task over items in worker processes; results come in the order of the items.

    Args:
        task: a function that pickle can name (defined at a module's top level).
        items: what to run it on; taken one by one, so that only a few are under way at a time.
        workers: how many tasks run at a time.
        executor: where to run them, if not in worker processes of this call's own.

    Raises:
        WorkerError: a worker was killed, or failed for a reason that is a bug.
        LmtoolsError: what a task raised: the first in the order of the items. What was not begun is cancelled.
    """
    if executor is None:
        with worker_pool(workers, preload=[task.__module__]) as own:
            yield from run_ordered(task, items, workers=workers, executor=own)
        return
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            under_way.append(executor.submit(task, item))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()


@contextmanager
def worker_pool(workers: int, *, preload: Sequence[str] = ()) -> Iterator[Executor]:
    """Worker processes that never outlive this block, whatever ends it; one worker is this process itself.

    Workers are forked from a server that is started afresh and has no threads, so the threads here (a progress bar's,
    the pool's own) are no danger; what the tasks need is imported once, in the server.

    Args:
        workers: number of processes, at most; they start when there is work for them.
        preload: names of the modules that the tasks need.

    Yields:
        An executor. Leaving the block normally waits for its tasks; an exception (Ctrl-C too) ends them at once.
    """
    if workers == 1:
        yield _ThisProcess()
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *preload])
    pool = _ProcessPool(workers, context)
    try:
        yield pool
    except BaseException:
        pool.kill()
        raise
    finally:
        pool.shutdown()


class _ThisProcess(Executor):
    """An executor that does the work at once, in this process."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _ProcessPool(Executor):
    """Threads that each have a worker process do what they are given."""

    def __init__(self, workers: int, context: ForkServerContext) -> None:
        self._context = context
        self._threads = ThreadPoolExecutor(workers)
        self._of_thread = threading.local()
        self._workers: list[tuple[ForkServerProcess, Connection]] = []
        self._starting = threading.Lock()
        self._killed = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        return self._threads.submit(self._run, fn, args, kwargs)

    def kill(self) -> None:
        """End the workers, whatever they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            self._killed = True
            for process, _ in self._workers:
                process.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        for process, connection in self._workers:
            connection.close()
            process.join()
            process.close()
        self._workers.clear()

    def _run(self, fn: Callable[..., Result], args: Any, kwargs: Any) -> Result:
        if not hasattr(self._of_thread, "worker"):
            self._of_thread.worker = self._start_worker()
        process, connection = self._of_thread.worker
        try:
            connection.send((fn, args, kwargs))
            result, error = connection.recv()
        except (EOFError, ConnectionError) as lost:
            raise _death_of(process) from lost
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _start_worker(self) -> tuple[ForkServerProcess, Connection]:
        with self._starting:
            if self._killed:
                raise WorkerError("the workers have been ended")
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            return process, ours


def _death_of(process: ForkServerProcess) -> WorkerError:
    process.join()
    code = process.exitcode or 0
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended by itself (exit code {code})"
    hint = ", perhaps for lack of memory; run again with fewer --workers" if code == -signal.SIGKILL else ""
    return WorkerError(f"worker process {process.pid} {how}{hint}")


def _work(connection: Connection) -> None:
    """In a worker: do what the parent sends until it lets go of the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            fn, args, kwargs = connection.recv()
        except EOFError:
            return
        connection.send(answer(fn, args, kwargs))


def answer(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, LmtoolsError | None]:
    """What a function returned, or why it did not: a bug becomes a WorkerError that carries the traceback."""
    try:
        return fn(*args, **kwargs), None
    except LmtoolsError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - raised again in the parent, with this process's traceback
        message = f"a worker failed with {type(error).__name__}: {error}; please report this"
        return None, WorkerError(message, traceback=traceback.format_exc())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
