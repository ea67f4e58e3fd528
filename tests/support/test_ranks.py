"""The tests' own tool must tell the truth: who failed, why, and within the time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item()


def _raise_on_rank_2() -> None:
    if dist.get_rank() == 2:
        raise ValueError("rank 2 has a reason")
    dist.barrier()


def _kill_rank_2() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _rank_2_sleeps() -> None:
    if dist.get_rank() == 2:
        time.sleep(300)


def _group_exists() -> tuple[bool, str]:
    return dist.is_initialized(), os.environ["WORLD_SIZE"]


def test_every_rank_computes_and_answers_in_order() -> None:
    assert run_ranks(4, _sum_of_ranks, 10) == [46.0] * 4
    assert run_ranks(2, _sum_of_ranks, offset=0) == [1.0] * 2


def test_a_world_of_one_has_no_process_group() -> None:
    assert run_ranks(1, _group_exists) == [(False, "1")]


def test_the_cause_is_raised_with_its_traceback_rather_than_the_peers_lost_connections() -> None:
    with pytest.raises(ValueError, match="rank 2 has a reason") as caught:
        run_ranks(4, _raise_on_rank_2)
    assert isinstance(caught.value.__cause__, RankError)
    assert "_raise_on_rank_2" in str(caught.value.__cause__)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(ChildProcessError, match="rank 2 died with exit code -9"):
        run_ranks(4, _kill_rank_2)


def _lose_rank_2_which_dies_later(mark: Path) -> None:
    if dist.get_rank() < 2:
        (mark / str(dist.get_rank())).touch()
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    while len(list(mark.iterdir())) < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_though_its_peers_are_heard_of_first(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="rank 2 died with exit code -9"):
        run_ranks(3, _lose_rank_2_which_dies_later, tmp_path)


def _lose_a_peer() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_lost_connection_is_raised_when_nobody_has_another_reason() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run_ranks(2, _lose_a_peer)


def test_a_hanging_rank_is_named_and_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def no_longer_than_the_others(connections: Sequence[Connection], timeout: float) -> list[Any]:
        # The time is over once nobody but one rank is waited for, however long the others have taken.
        allowed.append(timeout)
        return wait(connections, timeout if len(connections) > 1 else 0)

    monkeypatch.setattr("tests.support.ranks.wait", no_longer_than_the_others)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of 3"):
        run_ranks(3, _rank_2_sleeps, timeout_seconds=200)
    assert time.monotonic() - start < 200
    assert 0 < allowed[-1] <= 200
    assert allowed == sorted(allowed, reverse=True), "for the whole call"
