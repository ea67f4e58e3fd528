"""Which blocks are trained on in which update: pure functions of (sizes, seed, epoch).

An epoch is a list of batches in an order that knows nothing of ranks or loader workers. An update takes the next
`dp_size * update_freq` of them and deals them out:

    batches of the epoch    b0 b1 | b2 b3 | b4 b5 | b6 b7 | b8            dp_size 2, update_freq 2
                            ------ update 1 ------  -- 2 --  - 3 -
    micro-step 1            b0 on rank 0, b1 on rank 1      b8 on rank 0, nothing on rank 1
    micro-step 2            b2 on rank 0, b3 on rank 1

So a place in a run is a `Position`, the epoch and the batches of it that are done, and a run goes on from it with any
other dp_size or update_freq without leaving out a batch or repeating one.

Order and grouping are fairseq's (tasks/fairseq_task.py, data/data_utils.py, data/iterators.py): blocks in a seeded
random order, sorted by size, cut into batches, the batches shuffled. Which blocks share a batch is drawn once and the
same in all epochs, unless each epoch has its own shard of the data. fairseq leaves an incomplete last batch out, and so
the same blocks in every epoch; here that is `drop_last`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmtools.errors import ConfigError, DataError

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, in the order in which they are trained on.

    Attributes:
        block_ids: ids of all blocks, one batch after the other.
        starts: where each batch starts in `block_ids`, `(num_batches + 1,)`; the last item is their number.
    """

    block_ids: BlockIds
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> BlockIds:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        return self.block_ids[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True)
class Position:
    """A place in a run: `num_batches` batches of `epoch` (from 1) are done. Independent of dp_size and update_freq."""

    epoch: int = 1
    num_batches: int = 0


@dataclass(frozen=True)
class Update:
    """The batches of one update.

    Attributes:
        epoch: the epoch that they are of.
        micro_steps: for each micro-step, and in it for each dp_rank, the ids of its blocks. In the last update of an
            epoch some ranks may have none; they take part in the communication and add nothing.
        after: the place in the run when the update is done; its `num_batches` is 0 when that ends the epoch.
    """

    epoch: int
    micro_steps: list[list[BlockIds]]
    after: Position


def epoch_batches(
    sizes: npt.NDArray[np.integer],
    *,
    seed: int,
    epoch: int,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    required_batch_size_multiple: int = 8,
    drop_last: bool = False,
    regroup: bool = False,
) -> Batches:
    """Group the blocks into batches and put the batches in an epoch's order.

    Args:
        sizes: tokens of each block, `(num_blocks,)`.
        seed: the run's seed.
        epoch: from 1.
        batch_size: the most blocks in a batch.
        max_tokens: the most tokens in a batch, as a rectangle: its blocks times its longest block.
        required_batch_size_multiple: a batch of fewer than `batch_size` blocks is cut to a multiple of this, if it has
            as many.
        drop_last: leave out a last batch that is neither of `batch_size` blocks nor such a multiple.
        regroup: draw anew which blocks share a batch, as is done when the data are in several shards.

    Returns:
        Every block once, but those that `drop_last` leaves out.

    Raises:
        ConfigError: no limit is given, or a limit admits no block.
        DataError: there is nothing to train on.
    """
    if batch_size is None and max_tokens is None:
        raise ConfigError("--batch-size or --max-tokens: give at least one")
    if required_batch_size_multiple < 1:
        raise ConfigError(f"--required-batch-size-multiple {required_batch_size_multiple}: expected at least 1")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size}: expected at least 1")
    if len(sizes) == 0:
        raise DataError("the training split has no tokens")
    require_room(sizes, max_tokens)

    grouping = _random(seed, epoch if regroup else 1).permutation(len(sizes))
    by_size = np.lexsort([grouping, sizes])
    starts = _group(sizes[by_size].tolist(), batch_size, max_tokens, required_batch_size_multiple)
    last = starts[-1] - starts[-2]
    if drop_last and last != batch_size and last % required_batch_size_multiple:
        starts.pop()
    if len(starts) == 1:
        raise DataError(f"the training split has only {len(sizes)} blocks, less than a batch, and these are dropped")

    order = np.arange(len(starts) - 1)
    _random(seed, epoch).shuffle(order)
    return _reorder(by_size, np.array(starts, dtype=np.int64), order)


def training_updates(
    batches_of_epoch: Callable[[int], Batches], start: Position, *, dp_size: int, update_freq: int
) -> Iterator[Update]:
    """The updates of a run from a place on, epoch after epoch without an end. The same on every rank.

    Args:
        batches_of_epoch: the epoch's batches; called once for each epoch that is reached.
        start: where to begin; `Position()` is the start of the run.
        dp_size: number of replicas, each with a batch of its own.
        update_freq: batches of each replica in an update.

    Raises:
        DataError: `start` lies past the end of its epoch.
    """
    epoch, first = start.epoch, start.num_batches
    while True:
        batches = batches_of_epoch(epoch)
        if first > 0:
            require_batches_left(batches, Position(epoch, first))
        while first < len(batches):
            last = min(first + dp_size * update_freq, len(batches))
            after = Position(epoch, last) if last < len(batches) else Position(epoch + 1)
            yield Update(epoch, deal_out([batches[index] for index in range(first, last)], dp_size), after)
            first = last
        epoch, first = epoch + 1, 0


def require_room(sizes: npt.NDArray[np.integer], max_tokens: int | None) -> None:
    """The longest block must fit a batch.

    Raises:
        ConfigError: it does not.
    """
    if max_tokens is not None and sizes.max() > max_tokens:
        raise ConfigError(
            f"--max-tokens {max_tokens}: block {int(sizes.argmax())} has {int(sizes.max())} tokens; allow as many, or "
            "choose a smaller --tokens-per-sample"
        )


def require_batches_left(batches: Batches, place: Position) -> None:
    """A run may go on within an epoch only where it has batches that are not done.

    Raises:
        DataError: `place` lies past the end of its epoch.
    """
    if place.num_batches >= len(batches):
        raise DataError(
            f"epoch {place.epoch} has {len(batches)} batches and {place.num_batches} of them are done: the training "
            "split or the batch size is another one; start from the checkpoint with --restore-file, --reset-dataloader "
            "and --resume never"
        )


def num_updates(num_batches: int, *, dp_size: int, update_freq: int) -> int:
    """Updates that so many batches make; the last one may be smaller."""
    return -(-num_batches // (dp_size * update_freq))


def deal_out(batches: Sequence[BlockIds], dp_size: int) -> list[list[BlockIds]]:
    """Give each rank a batch, micro-step after micro-step, and an empty one where the last micro-step has too few."""
    missing = -len(batches) % dp_size
    padded = [*batches, *[np.empty(0, dtype=np.int64)] * missing]
    return [padded[first : first + dp_size] for first in range(0, len(padded), dp_size)]


def split_shards(data: str) -> list[str]:
    """The folders of `a:b:c`. Training takes one an epoch; everything else is in the first."""
    return [folder for folder in data.split(":") if folder]


def shard_of_epoch(shards: Sequence[str], epoch: int) -> str:
    """The folder that an epoch (from 1) trains on, in turn."""
    return shards[(epoch - 1) % len(shards)]


def _random(seed: int, epoch: int) -> np.random.RandomState:
    return np.random.RandomState((seed + epoch) % 2**32)


def _group(sizes: list[int], batch_size: int | None, max_tokens: int | None, multiple: int) -> list[int]:
    """Where each batch starts, and the end of the last: as many blocks of these ascending sizes as fit."""
    starts = [0]
    while starts[-1] < len(sizes):
        start = starts[-1]
        count = len(sizes) - start
        if batch_size is not None:
            count = min(count, batch_size)
        if max_tokens is not None:
            count = _num_fitting(sizes, start, count, max_tokens)
        if count != batch_size and count > multiple:
            count -= count % multiple
        starts.append(start + count)
    return starts


def _num_fitting(sizes: list[int], start: int, most: int, max_tokens: int) -> int:
    most = min(most, max_tokens // sizes[start])
    return bisect_right(range(1, most + 1), max_tokens, key=lambda count: count * sizes[start + count - 1])


def _reorder(block_ids: BlockIds, starts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Batches:
    lengths = np.diff(starts)[order]
    new_starts = np.concatenate([[0], np.cumsum(lengths)])
    # Block j of the new order stands as far behind its batch's start as it did in the old one.
    moved = np.repeat(starts[:-1][order] - new_starts[:-1], lengths)
    return Batches(block_ids[np.arange(new_starts[-1]) + moved], new_starts)
