"""Blocks as rectangles for the model, prepared in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lmtools.data.batches import BlockIds
from lmtools.data.blocks import Offsets, Tokens, window_input
from lmtools.data.streams import IGNORED, Streams, read_chunks
from lmtools.models.transformer_lm import PAD_INDEX

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """What a replica reads and predicts in one step.

    Attributes:
        block_ids: which blocks these are.
        tokens: int64 `(B, T)`, rows padded on the right; with `--ext-len` more than targets, which are of the last.
        targets: int64 `(B, T)`, IGNORED where there is nothing to predict.
        num_tokens: how many targets there are; by fairseq's rule of streams all tokens, by which it divides.
    """

    block_ids: BlockIds
    tokens: Tensor
    targets: Tensor
    num_tokens: int


def make_batch(stream: Tokens, blocks: Offsets, block_ids: BlockIds, *, eos_index: int, multiple: int = 1) -> Batch:
    """Cut blocks out of the stream. A batch without blocks is one ignored token, so that its rank can take part.

    Args:
        stream: the split's tokens.
        blocks: int64 `(num_blocks, 2)`, start and end of each.
        block_ids: which of them.
        eos_index: stands before the stream's first token.
        multiple: the rectangle's width is padded to a multiple of this.
    """
    spans = blocks[block_ids]
    lengths = spans[:, 1] - spans[:, 0]
    shape = (max(len(spans), 1), -(-int(lengths.max(initial=1)) // multiple) * multiple)
    tokens = np.full(shape, PAD_INDEX, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    for row, (start, end) in enumerate(spans.tolist()):
        tokens[row, : end - start] = window_input(stream, start, end, eos_index=eos_index)
        targets[row, : end - start] = stream[start:end]
    return Batch(block_ids, torch.from_numpy(tokens), torch.from_numpy(targets), int(lengths.sum()))


def make_stream_batch(stream: Tokens, streams: Streams, chunk_ids: BlockIds, *, eos_index: int, ext_len: int) -> Batch:
    """Cut one step's chunks out of the stream; a row at its end, -1, is all ignored.

    Args:
        stream: the split's tokens.
        streams: how it is cut.
        chunk_ids: which chunk each row reads.
        eos_index: stands before the stream's first token.
        ext_len: the model's.
    """
    chunks = read_chunks(stream, streams, chunk_ids, eos_index=eos_index, ext_len=ext_len)
    num_tokens = chunks.targets.size if streams.fairseq_compat else int((chunks.offsets >= 0).sum())
    return Batch(chunk_ids, torch.from_numpy(chunks.tokens), torch.from_numpy(chunks.targets), num_tokens)


def prefetched(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """The same items, up to `depth` of them made ahead in a background thread; 0 makes each when it is asked for.

    An exception in the thread is raised here in its turn. Closing the iterator ends the thread.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(entry: tuple[Item | None, BaseException | None]) -> bool:
        while not closed.is_set():
            try:
                ready.put(entry, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((None, StopIteration()))
        except BaseException as error:  # noqa: BLE001 - raised again where the items are used
            put((None, error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        closed.set()
        thread.join()
