"""What tells one attempt of a run from another, when elastic starts its workers again.

Elastic keeps one store through all restarts, and in it are the addresses of the workers that were: a process group that
reads them waits for ever. So each attempt has keys of its own, under a word that its ranks agree on here. The number of
restarts is no such word: of several agents only the one whose worker has failed counts it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_SECONDS_BETWEEN_LOOKS = 0.02


def agree_on_attempt(store: Store, rank: int, world_size: int, *, timeout: timedelta) -> str:
    """A word that all ranks of this attempt have, and none had before. Every rank must call it.

    Rank 0 publishes a new one. The others cannot know whether what they read is it or that of an attempt before, until
    rank 0 has answered under it to what each has just made up.

    Args:
        store: the same for all ranks, whatever it holds from earlier attempts, of which no process is left.
        rank: of this process.
        world_size: how many ranks there are.
        timeout: how long to wait for the slowest rank.

    Raises:
        TimeoutError: rank 0 did not answer.
        torch.distributed.DistStoreError: a rank did not ask rank 0.
    """
    if rank == 0:
        word = uuid.uuid4().hex
        store.set("attempt", word)
        for other in range(1, world_size):
            store.wait([f"{word}/{other}"], timeout)
            store.set(f"{word}/{other}/answer", store.get(f"{word}/{other}").decode())
        return word

    question = uuid.uuid4().hex
    store.wait(["attempt"], timeout)
    asked = ""
    ends_at = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < ends_at:
        word = store.get("attempt").decode()
        if word != asked:
            store.set(f"{word}/{rank}", question)
            asked = word
        answer = f"{word}/{rank}/answer"
        if store.check([answer]) and store.get(answer).decode() == question:
            return word
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise TimeoutError(f"rank {rank}: rank 0 did not answer within {timeout}")
