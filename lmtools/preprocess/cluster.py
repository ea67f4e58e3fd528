"""The text stages on a Dask cluster: the same tasks, on machines that see the same files.

    with dask_cluster("tcp://host:8786", reads=["/data/a.raw"], writes=["/data/a.detok"]) as cluster:
        detok("/data/a.raw", "/data/a.detok", workers=cluster.num_threads, executor=cluster.executor)

Dask gives the tasks of a worker that is lost to another one. So a task may run twice, even at the same time where a
worker is only taken for lost: tasks write under names of their own (`lines.write_part`) and remove nothing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmtools import __version__
from lmtools.compressed import COMPRESSED_SUFFIXES
from lmtools.errors import ConfigError, WorkerError
from lmtools.files import disk_errors, is_device_or_pipe
from lmtools.preprocess.workers import answer

if TYPE_CHECKING:
    from distributed import Client

Result = TypeVar("Result")

_CONNECT_SECONDS = 20
_NO_WORKERS_SECONDS = 60
_WATCH_SECONDS = 2
_SEEN_BYTES = 1 << 16


@dataclass(frozen=True)
class Cluster:
    """A cluster that may be used.

    Attributes:
        executor: runs tasks on its workers.
        num_threads: how many it runs at a time.
    """

    executor: Executor
    num_threads: int


@dataclass(frozen=True)
class Expected:
    """What a worker must have: this version of lmtools, and these files (path and `look` of each)."""

    version: str
    files: tuple[tuple[str, str], ...]


@contextmanager
def dask_cluster(address: str, *, reads: Sequence[str], writes: Sequence[str]) -> Iterator[Cluster]:
    """Connect to a Dask scheduler whose workers see this process's files.

    Every worker must see the inputs, and a file that is written for this in the folder of every output; one that joins
    later is asked before its first task. What is not done when the block ends is cancelled.

    Args:
        address: the scheduler's, as `tcp://host:8786`.
        reads: absolute names of files that tasks read.
        writes: absolute names of outputs.

    Raises:
        ConfigError: Dask is not installed; the address is none; an output is a device, a pipe or standard output.
        WorkerError: no scheduler answers; there are no workers, or they all went; a worker sees other files or has
            another version of lmtools; a task ended every worker that it was given to.
        LmtoolsError: an output's folder may not be written.
    """
    try:
        from distributed import Client, KilledWorker
        from distributed.comm import get_address_host_port, normalize_address
    except ImportError as error:
        raise ConfigError("--scheduler needs Dask, which is not installed: pip install 'lmtools[dask]'") from error
    try:  # a client that fails over its address waits for itself when the program ends
        get_address_host_port(normalize_address(address), strict=True)
    except ValueError as error:
        raise ConfigError(f"--scheduler {address}: {error}; expected an address such as tcp://host:8786") from error
    for name in writes:
        if is_device_or_pipe(name):
            raise ConfigError(
                f"{name}: --scheduler needs an output that is a file, where the workers can write beside it"
            )
    with ExitStack() as stack:
        tokens = [stack.enter_context(_token_file(name)) for name in writes]
        texts = [name for name in reads if not is_device_or_pipe(name) and Path(name).suffix not in COMPRESSED_SUFFIXES]
        expected = Expected(__version__, tuple((name, look(name)) for name in (*texts, *tokens)))
        stack.enter_context(_quiet_about_cancelled_tasks())
        try:
            client = stack.enter_context(Client(address, timeout=_CONNECT_SECONDS, set_as_default=False))
        except (OSError, asyncio.TimeoutError) as error:
            raise WorkerError(f"{address}: no Dask scheduler answers; start one with `dask scheduler`") from error
        num_threads = _require_workers(client, address, expected)
        executor = _Tasks(client, expected)
        stack.enter_context(_watch(client, executor))
        try:
            yield Cluster(executor, num_threads)
        except KilledWorker as error:
            raise WorkerError(
                f"{address}: a task ended every worker that it was given to, the last at "
                f"{error.last_worker.address}; perhaps for lack of memory (their logs say more)"
            ) from error
        except CancelledError as error:
            raise WorkerError(
                f"{address}: the scheduler or all its workers were lost; start them and run again"
            ) from error


@contextmanager
def _quiet_about_cancelled_tasks() -> Iterator[None]:
    """Keep tracebacks off the terminal of results that were under way when a run was ended, and nobody waits for."""
    from distributed.comm import CommClosedError

    def is_wanted(record: logging.LogRecord) -> bool:
        # Dask's executor may be fetching a result when its task is cancelled or the connection closed. Where that is
        # lost before its time, `_watch` sees it.
        return not (record.exc_info and isinstance(record.exc_info[1], (CommClosedError, CancelledError)))

    logger = logging.getLogger("tornado.application")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


@contextmanager
def _token_file(output: str) -> Iterator[str]:
    """A file beside an output (or where its folder will be), which only those can read who see this disk."""
    folder = next(folder for folder in Path(os.path.realpath(output)).parents if folder.is_dir())
    with disk_errors(output):
        descriptor, name = tempfile.mkstemp(prefix=".shared.", suffix=".tmp", dir=folder)
        os.write(descriptor, os.urandom(16))
        os.fsync(descriptor)
        os.close(descriptor)
        os.chmod(name, 0o644)  # workers may be another user's
    try:
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def look(name: str) -> str:
    """What is seen of a file at once: its size and the hash of its beginning, or why it cannot be read."""
    try:
        with open(name, "rb") as stream:
            beginning = stream.read(_SEEN_BYTES)
            return f"{os.fstat(stream.fileno()).st_size:,} bytes, sha256 {hashlib.sha256(beginning).hexdigest()[:12]}"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def fault(expected: Expected) -> str:
    """In a worker: what it lacks, in a few words; empty if nothing."""
    if __version__ != expected.version:
        return f"has lmtools {__version__}, expected {expected.version}; install one version everywhere"
    for name, seen in expected.files:
        if (found := look(name)) != seen:
            return f"found {name} to be: {found}, expected {seen}; --scheduler needs one file system for all machines"
    return ""


@functools.lru_cache(maxsize=1)
def _fault_once(expected: Expected) -> str:
    return fault(expected)


def _require_workers(client: Client, address: str, expected: Expected) -> int:
    """Ask every worker; returns the number of their threads."""
    try:
        client.wait_for_workers(1, timeout=_CONNECT_SECONDS)
    except asyncio.TimeoutError as error:  # before Python 3.11 not the TimeoutError that is built in
        raise WorkerError(
            f"{address}: the scheduler has no workers; start some with `dask worker {address} --nthreads 1`"
        ) from error
    for worker, found in sorted(client.run(fault, expected, on_error="return").items()):
        if isinstance(found, Exception):
            raise WorkerError(f"worker {worker} cannot run lmtools: {found}; install lmtools {__version__} there")
        if found:
            raise WorkerError(f"worker {worker} {found}")
    return sum(client.nthreads().values())


class _Tasks(Executor):
    """Runs tasks on the workers of a client."""

    def __init__(self, client: Client, expected: Expected) -> None:
        self._executor = client.get_executor(pure=False)
        self._expected = expected
        self._is_cancelled = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        try:
            return self._executor.submit(_attempt, self._expected, functools.partial(fn, *args, **kwargs))  # type: ignore[no-any-return]
        except RuntimeError as error:  # Dask's executor takes no more
            if not self._is_cancelled:
                raise
            raise CancelledError from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_cancelled = self._is_cancelled or cancel_futures
        self._executor.shutdown(wait=wait and not cancel_futures)


def _attempt(expected: Expected, task: Callable[[], Result]) -> Result:
    """In a worker: run a task, and say of a bug where it is."""
    if found := _fault_once(expected):
        raise WorkerError(f"a worker {found}")
    result, error = answer(task, (), {})
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


@contextmanager
def _watch(client: Client, executor: Executor) -> Iterator[None]:
    """Cancel all tasks when there has been no worker for a while: Dask itself waits for one without end."""
    done = threading.Event()

    def watch() -> None:
        last_seen = time.monotonic()
        while not done.wait(_WATCH_SECONDS):
            if _has_workers(client):
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > _NO_WORKERS_SECONDS:
                executor.shutdown(cancel_futures=True)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _has_workers(client: Client) -> bool:
    try:
        return bool(client.nthreads())
    except (OSError, RuntimeError, asyncio.TimeoutError, CancelledError):  # the scheduler does not answer
        return False
