"""A split as parallel streams for truncated backpropagation through time: pure functions of lengths.

The stream of tokens is cut into chunks, the chunks into as many contiguous runs as the batch has rows, and step i reads
chunk i of every run, so that a model's memory of a row is of the text right before it:

    stream    | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | ch.5 |      2 rows
    row 0     | chunk 0 | chunk 1 | chunk 2 |
    row 1     | chunk 3 | chunk 4 | ch.5 |
                 step 0    step 1    step 2

Which chunk a token is in depends on the length of chunks alone. The number of rows only decides where memory begins.

Two rules say which tokens are predicted:

- lmtools': a chunk's tokens are targets, each predicted from the one before it in the stream, across the borders of
  chunks and rows (the first of all from end-of-sentence). Every token is a target once, and where the rows do not
  divide the chunks, the first rows have one more.
- fairseq's (examples/truncated_bptt): a chunk's tokens are inputs, each predicts the next one in the same chunk. The
  first token of a chunk is never a target, and chunks that do not divide among the rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmtools.data.batches import Position, Update
from lmtools.data.blocks import Offsets, Tokens
from lmtools.errors import DataError

IGNORED = -100
"""A target that is none."""


@dataclass(frozen=True)
class Streams:
    """How a split is cut.

    Attributes:
        num_tokens: length of the split.
        chunk_len: tokens of a chunk; the split's last may have fewer.
        bounds: int64 `(rows + 1,)`; row r reads the chunks from bounds[r] to bounds[r + 1].
        fairseq_compat: fairseq's rule.
    """

    num_tokens: int
    chunk_len: int
    bounds: Offsets
    fairseq_compat: bool

    @property
    def num_rows(self) -> int:
        """Streams that are read side by side."""
        return len(self.bounds) - 1

    @property
    def num_steps(self) -> int:
        """Chunks of the longest row."""
        return int(np.diff(self.bounds).max())

    @property
    def num_targets(self) -> int:
        """How many tokens are predicted."""
        num_chunks = int(self.bounds[-1])
        num_read = min(num_chunks * self.chunk_len, self.num_tokens)
        return num_read - num_chunks if self.fairseq_compat else num_read

    def chunk_ids(self, step: int, rows: slice = slice(None)) -> Offsets:
        """Which chunk each row reads at a step, `(rows,)`; -1 where a row is at its end."""
        chunks = self.bounds[:-1][rows] + step
        return np.where(chunks < self.bounds[1:][rows], chunks, -1)

    def step_of(self, chunk_ids: Offsets) -> int:
        """At which step some rows read these chunks: rows differ by one chunk at most, so all end with the last."""
        read = chunk_ids[chunk_ids >= 0]
        if len(read) == 0:
            return self.num_steps - 1
        row = int(np.searchsorted(self.bounds, read[0], side="right")) - 1
        return int(read[0] - self.bounds[row])

    def require_targets(self, where: str) -> None:
        """Refuse a split of which nothing is predicted.

        Raises:
            DataError: by fairseq's rule there are fewer chunks than rows, or they are of one token.
        """
        if self.num_targets == 0:
            raise DataError(
                f"{where}: by fairseq's rule none of its {self.num_tokens} tokens is predicted in {self.num_rows} "
                f"streams of chunks of {self.chunk_len}; use fewer streams, other chunks, or no --fairseq-compat"
            )


def cut_streams(num_tokens: int, *, num_rows: int, chunk_len: int, fairseq_compat: bool = False) -> Streams:
    """Cut a split into rows.

    Args:
        num_tokens: length of the split.
        num_rows: batch size times data-parallel replicas; replica d has the rows from d * batch size on.
        chunk_len: tokens that are read in one step (`--tokens-per-sample`).
        fairseq_compat: predict what fairseq predicts, instead of every token.
    """
    num_chunks = -(-num_tokens // chunk_len)
    share, rest = divmod(num_chunks, num_rows)
    rows = np.arange(num_rows + 1, dtype=np.int64)
    bounds = rows * share if fairseq_compat else rows * share + np.minimum(rows, rest)
    return Streams(num_tokens, chunk_len, bounds, fairseq_compat)


class Chunks(NamedTuple):
    """What the rows of a batch read and predict in one step.

    Attributes:
        tokens: int64 `(B, E + T)`, the chunks and what is read again before them.
        targets: int64 `(B, T)`, IGNORED where nothing is predicted: at the end of rows, and where fairseq does not.
        offsets: int64 `(B, T)`, where in the split each target stands; -1 where there is none.
    """

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    offsets: Offsets


def read_chunks(stream: Tokens, streams: Streams, chunk_ids: Offsets, *, eos_index: int, ext_len: int = 0) -> Chunks:
    """Cut one step's chunks out of the split.

    A row is filled up behind its end with tokens that nothing before them sees. All of a split's steps are
    `chunk_len` wide, whichever of its rows are read, but the last one, if each of these rows has less.

    Args:
        stream: the split's tokens.
        streams: from `cut_streams`.
        chunk_ids: from `Streams.chunk_ids`, `(B,)`.
        eos_index: stands before the split's first token.
        ext_len: tokens before each chunk that are read again, as many of them as the row has: the original's
            extended context, which a model with this `ext_len` does not remember.
    """
    step = streams.step_of(chunk_ids)
    starts = np.where(chunk_ids >= 0, chunk_ids * streams.chunk_len, streams.num_tokens)
    ends = np.minimum(starts + streams.chunk_len, streams.num_tokens)
    width = streams.chunk_len if step < streams.num_steps - 1 else max(int((ends - starts).max()), 1)
    num_again = min(ext_len, step * streams.chunk_len)
    places = starts[:, None] + np.arange(-num_again, width)
    inside = places < ends[:, None]
    inputs, offsets = (places, places + 1) if streams.fairseq_compat else (places - 1, places)
    offsets = np.where(inside & (offsets < ends[:, None]), offsets, -1)[:, num_again:]
    read = stream[np.where(inside, inputs, 0)].astype(np.int64)
    tokens = np.where(inside & (inputs >= 0), read, eos_index)
    targets = np.where(offsets >= 0, stream[offsets].astype(np.int64), IGNORED)
    return Chunks(tokens, targets, offsets)


def stream_updates(
    streams_of_epoch: Callable[[int], Streams], start: Position, *, dp_size: int, update_freq: int
) -> Iterator[Update]:
    """The updates of a run from a place on, epoch after epoch without an end. The same on every rank.

    A place's `num_batches` counts steps, whatever the number of replicas that share the rows.

    Args:
        streams_of_epoch: how the epoch's shard of the data is cut; called once for each epoch that is reached.
        start: where to begin.
        dp_size: number of replicas, each with as many rows.
        update_freq: steps in an update.

    Raises:
        DataError: `start` lies past the end of its epoch.
    """
    epoch, first = start.epoch, start.num_batches
    while True:
        streams = streams_of_epoch(epoch)
        if first > 0 and first >= streams.num_steps:
            raise DataError(
                f"epoch {epoch} has {streams.num_steps} steps and {first} of them are done: the training split or the "
                "batch size is another one; start from the checkpoint with --restore-file, --reset-dataloader and "
                "--resume never"
            )
        rows = streams.num_rows // dp_size
        shares = [slice(rank * rows, (rank + 1) * rows) for rank in range(dp_size)]
        while first < streams.num_steps:
            last = min(first + update_freq, streams.num_steps)
            micro_steps = [[streams.chunk_ids(step, share) for share in shares] for step in range(first, last)]
            yield Update(epoch, micro_steps, Position(epoch, last) if last < streams.num_steps else Position(epoch + 1))
            first = last
        epoch, first = epoch + 1, 0
