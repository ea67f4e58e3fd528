"""Run a function on N real ranks: N processes that talk over gloo, on this machine's CPU.

    def sum_of_ranks(offset: int) -> float:
        value = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(value)
        return value.item()

    def test_sum() -> None:
        assert run_ranks(4, sum_of_ranks, 10) == [46.0] * 4

The processes are forked from a server that has imported torch once, so a call costs about 0.1 s. Each call has fresh
processes and a fresh process group: no test sees what another left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, TypeVar

from lmtools.parallel.failures import report

Result = TypeVar("Result")

_PRELOAD = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",  # a second of CPU, which the first DTensor of a process imports
    "numpy",
    "pydantic",
    "pytest",
    "hypothesis",
]


class RankError(Exception):
    """The traceback as the rank saw it; the cause of the exception that `run_ranks` raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def run_ranks(
    world_size: int, function: Callable[..., Result], *args: Any, timeout_seconds: float = 60.0, **kwargs: Any
) -> list[Result]:
    """Call `function(*args, **kwargs)` on every rank of a new gloo process group, one thread each.

    The ranks see torchrun's RANK, LOCAL_RANK and WORLD_SIZE; a world of one has no process group, as in lmtools.
    Warnings are errors there too.

    Args:
        world_size: number of processes.
        function: a function at the top level of a module.
        *args: plain data or tensors, the same on every rank.
        timeout_seconds: for the whole call; then every rank is killed.
        **kwargs: as `args`.

    Returns:
        What each rank returned, by rank: plain data or tensors (of a DTensor return its local or full tensor).

    Raises:
        Exception: what the first failing rank raised, with that rank's traceback as its cause.
        ChildProcessError: a rank died without a word.
        TimeoutError: some rank was not done in time.
    """
    call = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_start(rank, world_size, Path(folder) / "store", call, timeout_seconds) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def processes_with_torch() -> ForkServerContext:
    """Makes processes that start in milliseconds, with torch imported, and with the environment of its first use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ensure_running()
    return context


def _start(
    rank: int, world_size: int, store: Path, call: bytes, timeout_seconds: float
) -> tuple[ForkServerProcess, Connection]:
    context = processes_with_torch()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(sender, rank, world_size, store, call, timeout_seconds), daemon=True
    )
    process.start()
    sender.close()
    return process, receiver


def _collect(ranks: list[tuple[ForkServerProcess, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    lost: dict[int, tuple[Exception, str]] = {}
    while len(results) + len(lost) < len(ranks):
        waiting = [rank for rank in range(len(ranks)) if rank not in results and rank not in lost]
        pending = {ranks[rank][1]: rank for rank in waiting}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not lost:
            raise TimeoutError(f"ranks {waiting} of {len(ranks)} were not done in time")
        if not ready:
            break
        replies = {}
        for connection in ready:
            try:
                replies[pending[connection]] = pickle.loads(connection.recv_bytes())
            except EOFError:
                process = ranks[pending[connection]][0]
                process.join()
                raise ChildProcessError(f"rank {pending[connection]} died with exit code {process.exitcode}") from None
        for rank, (result, error, trace) in sorted(replies.items()):
            if error is None:
                results[rank] = result
            elif report(error)["kind"] == "connection":
                lost[rank] = error, trace  # the peers of a rank that fails do so too, and may be heard of before it
            else:
                raise error from RankError(f"rank {rank}: {trace}")
    for rank, (error, trace) in sorted(lost.items()):
        raise error from RankError(f"rank {rank}: {trace}")
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    sender: Connection, rank: int, world_size: int, store: Path, call: bytes, timeout_seconds: float
) -> None:
    warnings.simplefilter("error")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    reply: tuple[Any, Exception | None, str]
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        function, args, kwargs = pickle.loads(call)
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
        reply = (function(*args, **kwargs), None, "")
        message = pickle.dumps(reply)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shall see it
        message = _error_reply(error)
    # Told before the process group ends: the peers' complaints about a lost connection come later than the cause.
    sender.send_bytes(message)
    sender.close()


def _error_reply(error: Exception) -> bytes:
    trace = traceback.format_exc()
    try:
        message = pickle.dumps((None, error, trace))
        pickle.loads(message)
    except Exception:  # noqa: BLE001 - an exception that does not survive pickling is told as text
        message = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return message
