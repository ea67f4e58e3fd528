"""The tests' own tool must tell the truth: who failed, why, and within the time."""

from __future__ import annotations

import os
import signal
import time

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
        time.sleep(60)


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


def test_a_hanging_rank_is_named_and_killed_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of 3"):
        run_ranks(3, _rank_2_sleeps, timeout_seconds=1)
    assert time.monotonic() - start < 5
