"""Ranks that are started again do not take what earlier ones have left in the store for their own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lmtools.parallel.attempt import agree_on_attempt

PATIENCE = timedelta(seconds=20)


def attempt(store: dist.Store, *, last: int) -> set[str]:
    """The words of three ranks, of which `last` comes after the others."""

    def join(rank: int) -> str:
        time.sleep(0.1 if rank == last else 0)
        return agree_on_attempt(store, rank, 3, timeout=PATIENCE)

    with ThreadPoolExecutor(3) as ranks:
        return set(ranks.map(join, range(3)))


def test_all_ranks_have_one_word_and_another_one_after_each_restart():
    store = dist.HashStore()
    words = [attempt(store, last=last) for last in (1, 0, 2, 0)]
    assert [len(word) for word in words] == [1, 1, 1, 1]
    assert len(set.union(*words)) == 4


def test_an_attempt_that_not_all_have_reached_is_none():
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError):
        agree_on_attempt(store, 0, 3, timeout=timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="rank 1: rank 0 did not answer"):
        agree_on_attempt(store, 1, 3, timeout=timedelta(seconds=0.1))
    assert len(attempt(store, last=0)) == 1
