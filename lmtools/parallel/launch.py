"""Start N workers on this machine, or join those that torchrun started.

A command that needs several processes runs its own command line again in each of them:

    lmtools eval DATA --mp 8                    the launcher: `run_workers(sys.argv[1:], num_workers=8)`
      python -m lmtools eval DATA --mp 8        8 workers, RANK=0 ... 7: `with process_group("cuda") as device:`

    torchrun --nproc-per-node 8 -m lmtools eval DATA --mp 8        the same workers, without the launcher

What the launcher promises, on top of torch elastic's:

- One error for the person at the terminal: that of the rank that failed first (`failures.py`). A worker leaves its
  error in elastic's error file and ends without a word (`worker`).
- No process outlives the run. A failure, Ctrl-C or SIGTERM ends all workers at once, since they keep SIGTERM's default
  action, which needs no answer from a process that hangs in a collective. If the launcher itself is killed, its workers
  notice that their parent is gone.
- No half-written file outlives it. Workers note their temporary files, and the launcher removes what is left of them.

This module imports torch only inside functions: every command's start-up passes through it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lmtools.errors import ConfigError
from lmtools.files import NOTES_VARIABLE, atomic_write_text, remove_noted_temporaries
from lmtools.parallel.attempt import agree_on_attempt
from lmtools.parallel.failures import Failure, report, worker_error

if TYPE_CHECKING:
    import torch

_LAUNCHER_PID = "LMTOOLS_LAUNCHER_PID"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_WORKER_BYTES = 128 << 20
"""Less than a worker takes before it holds anything: Python and torch."""
_LOST_SECONDS = 3
"""How long a rank that has lost its connection to another one stays, at most, so that the launcher hears of the other's
end first: the system closes a process's connections before it tells the parent. The launcher then ends this one too."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def is_worker() -> bool:
    """Whether this process is one rank of a run that torchrun, a scheduler or `run_workers` started."""
    # A job system may set RANK and WORLD_SIZE to count machines; LOCAL_RANK is set for processes only.
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def is_restarted() -> bool:
    """Whether this process is a worker that elastic has started again after a failure."""
    return is_worker() and int(os.environ.get(_RESTART_COUNT, "0")) > 0


def run_id() -> str | None:
    """The name that elastic has for this run, the same after a restart; None for a process that it has not started."""
    return os.environ.get(_RUN_ID) if is_worker() else None


def has_launcher() -> bool:
    """Whether this process is a worker of `run_workers`, which catches the user's signals for its workers."""
    return _LAUNCHER_PID in os.environ and is_worker()


def prefix_of_rank() -> str:
    """`rank 3: ` in a worker, for a message that it prints itself; empty in any other process."""
    return f"rank {os.environ['RANK']}: " if is_worker() else ""


def run_workers(
    arguments: Sequence[str],
    *,
    num_workers: int,
    command: Sequence[str] = (sys.executable, "-m", "lmtools"),
    max_restarts: int = 0,
    stop_signal: signal.Signals = signal.SIGTERM,
    grace_seconds: int = 5,
) -> None:
    """Run `command *arguments` in `num_workers` processes on this machine and wait for all of them.

    Call it in the main thread. Workers share this process's standard streams and get torchrun's environment variables.
    Unless OMP_NUM_THREADS is set, they get their share of the cores.

    Args:
        arguments: the command line of every worker.
        num_workers: how many ranks.
        command: what the arguments are given to.
        max_restarts: how often all workers are started again after one has failed.
        stop_signal: what workers get when this process is told to stop (SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1).
            SIGTERM ends them at once; SIGUSR1 is for workers that handle it by saving their state and ending.
        grace_seconds: how long they may take to end then. A second signal ends them at once.

    Raises:
        ConfigError: this machine's memory cannot hold so many processes, or it does not let them start.
        WorkerError: a worker failed or was killed; all of them are gone.
        SystemExit: this process was told to stop; the code is 128 + the signal's number, and the workers are gone.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _require_memory(num_workers)
    _silence_elastic()
    received: list[int] = []

    def stop(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)
        raise SignalException(f"signal {signal_number}", stop_signal)

    # Elastic fills in "${local_rank}" in arguments, and would turn a "$$" of the user's into "$".
    run = uuid.uuid4().hex
    escaped = [argument.replace("$", "$$") for argument in (*command[1:], *arguments)]
    with tempfile.TemporaryDirectory(prefix="lmtools-workers-") as error_folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_workers,
            run_id=run,
            # The launcher holds the store, on a port that the system picks: no race for it, whatever else is running.
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=error_folder),
            signals_to_handle="",  # `stop` handles them
            shutdown_timeout=grace_seconds,
        )
        try:
            with _environment_of_workers(num_workers, notes=error_folder), _signal_handlers(stop):
                elastic_launch(config, command[0])(*escaped)
        except SignalException:
            raise SystemExit(128 + received[0]) from None
        except ChildFailedError as error:
            failures = [Failure(rank, end.exitcode, end.error_file_data) for rank, end in error.failures.items()]
            raise worker_error(failures) from None
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            raise ConfigError(
                f"{num_workers} processes cannot be started ({os.strerror(error.errno).lower()}); choose smaller --mp "
                "and --dp, or allow more (`ulimit -u`)"
            ) from error
        finally:
            _end_workers(run)
            remove_noted_temporaries(error_folder)


def _end_workers(run: str) -> None:
    """End those that elastic has not: it knows of none before it has started all, and something may come in between."""
    mark = f"{_RUN_ID}={run}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                os.waitpid(int(process.name), 0)


def _require_memory(num_workers: int) -> None:
    """Each process is started before any can say that it has no place: too many would take the machine with them."""
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_workers * _WORKER_BYTES > num_bytes:
        raise ConfigError(
            f"{num_workers} processes need {num_workers * _WORKER_BYTES / 2**30:,.0f} GiB of memory before they hold "
            f"anything, this machine has {num_bytes / 2**30:,.0f}; choose smaller --mp and --dp, or start them on "
            "several machines with torchrun"
        )


@contextmanager
def worker() -> Iterator[None]:
    """Around all that a process does: what a worker owes its launcher. In any other process it does nothing.

    A worker ends with the block. If `run_workers` started it, it reports an exception there instead of raising it, and
    it does not outlive its launcher.
    """
    if not is_worker():
        yield
        return
    launcher_pid = os.environ.get(_LAUNCHER_PID)
    if launcher_pid is not None:
        threading.Thread(target=_end_with, args=(int(launcher_pid),), daemon=True).start()
    try:
        yield
        _leave(0)
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except Exception as error:
        if launcher_pid is None:
            raise
        left = report(error)
        atomic_write_text(os.environ[_ERROR_FILE], json.dumps(left))
        if left["kind"] == "connection":
            time.sleep(_LOST_SECONDS)
        _leave(1)


def _leave(exit_code: int) -> NoReturn:
    """End without taking the interpreter and the process group down in order.

    After a failure that can wait for peers, which wait for this rank. After success, a thread of gloo may be about to
    release a tensor, for which it needs the interpreter: it would abort the process if that is shutting down.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _end_with(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def process_group(device_type: str, *, timeout: timedelta = timedelta(minutes=30)) -> Iterator[torch.device]:
    """Join this run's process group: gloo for the CPU, and NCCL too on CUDA. A world of one has none.

    Every rank must call it. After an exception the group is left as it is: the process is about to end, and its peers
    must not lose their connection before the cause is on record.

    Args:
        device_type: "cpu" or "cuda".
        timeout: how long a collective may wait for the slowest rank.

    Yields:
        The device of this rank: on CUDA, the one with the number LOCAL_RANK.

    Raises:
        ConfigError: this machine has no such device for this rank.
    """
    import torch
    import torch.distributed as dist

    device = torch.device(device_type)
    if device_type == "cuda":
        local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_devices:
            raise ConfigError(
                f"process {local_rank + 1} on this machine has no GPU, {num_devices} found; "
                "start no more processes than there are GPUs, or use --device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not is_worker() or int(os.environ["WORLD_SIZE"]) == 1:
        yield device
        return
    # Counts and other host data are reduced over gloo, whatever the device.
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    attempt = dist.PrefixStore(agree_on_attempt(store, rank, world_size, timeout=timeout), store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world_size, timeout=timeout)
    # Of several agents each counts the restarts that its own workers were the cause of.
    num_restarts = torch.tensor(int(os.environ.get(_RESTART_COUNT, "0")))
    dist.all_reduce(num_restarts, op=dist.ReduceOp.MAX)
    os.environ[_RESTART_COUNT] = str(num_restarts.item())
    yield device
    dist.destroy_process_group()


def _silence_elastic() -> None:
    """Keep elastic's own account of a failure off the terminal; LOGLEVEL, its own switch, brings it back."""
    if "LOGLEVEL" not in os.environ:
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


@contextmanager
def _environment_of_workers(num_workers: int, *, notes: str) -> Iterator[None]:
    """Set what workers inherit, and what the user has not set already, for as long as they run."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, _num_cores() // num_workers)),
        # All on one machine: no need to be found, or reached, from outside.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    ours = {_LAUNCHER_PID: str(os.getpid()), NOTES_VARIABLE: notes}
    before = {name: os.environ.get(name) for name in (*defaults, *ours)}
    os.environ.update({**defaults, **os.environ, **ours})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _num_cores() -> int:
    """How many cores this process may use; a scheduler may have made them fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _signal_handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle what tells a process to stop, but not what it was told to ignore (`nohup`), for a while."""
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    handled = [number for number in _STOP_SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
