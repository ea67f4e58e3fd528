"""Which tokens are scored with which context: pure functions of lengths, blocks and context.

A split is one stream of tokens. A *block* is the run of tokens that a window scores; a *window* is a block with the
tokens before it that are seen but not scored. Both are offsets into the stream, so nothing here depends on a batch
size, a number of workers or a rank, and every token is in exactly one block.

    stream    ... t0 t1 t2 t3 t4 t5 t6 t7 ...
                  |-- context --|-- block --|
                  context_start  start       end

The model's input is the stream shifted right by one: to score token j it reads token j - 1. Before the first token
of the stream stands the end-of-sentence symbol, as in fairseq (data/token_block_dataset.py).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lmtools.errors import ConfigError, DataError

Offsets = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.integer]

BreakMode = Literal["none", "complete", "eos"]


def cut_blocks(sizes: npt.NDArray[np.integer], tokens_per_block: int, break_mode: BreakMode) -> Offsets:
    """Cut a split into blocks.

    Args:
        sizes: number of tokens of each sentence, its end-of-sentence included; `(num_sentences,)`.
        tokens_per_block: the longest block.
        break_mode: `none` cuts every `tokens_per_block` tokens wherever a sentence stands, and the last block is
            what is left; `complete` fills a block with whole sentences; `eos` makes each sentence a block. In the
            last two a sentence longer than `tokens_per_block` is a block by itself, longer than asked.

    Returns:
        int64 `(num_blocks, 2)`, start and end of each, in stream order, without gaps or overlaps.
    """
    if tokens_per_block < 1:
        raise ConfigError(f"a block of {tokens_per_block} tokens: expected at least 1")
    ends = np.cumsum(sizes, dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    if num_tokens == 0:
        return np.empty((0, 2), dtype=np.int64)
    if break_mode == "none":
        starts = np.arange(0, num_tokens, tokens_per_block, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + tokens_per_block, num_tokens)], axis=1)
    if break_mode == "eos":
        blocks = np.stack([ends - sizes, ends], axis=1)
        return blocks[blocks[:, 1] > blocks[:, 0]]
    bounds = [0]
    while bounds[-1] < num_tokens:
        start = bounds[-1]
        # The last sentence end that still fits; a sentence that does not fit alone is a block all the same.
        fitting = int(np.searchsorted(ends, start + tokens_per_block, side="right")) - 1
        if fitting < 0 or ends[fitting] <= start:
            fitting = int(np.searchsorted(ends, start, side="right"))
        bounds.append(int(ends[fitting]))
    return np.stack([np.array(bounds[:-1], dtype=np.int64), np.array(bounds[1:], dtype=np.int64)], axis=1)


def add_context(blocks: Offsets, context_window: int) -> Offsets:
    """Give each block the `context_window` tokens before it, or what there is at the start of the stream.

    Returns:
        int64 `(num_blocks, 3)`: context_start, start, end. Windows overlap in their contexts, never in what they
        score. Source: fairseq/data/lm_context_window_dataset.py, here from absolute offsets.
    """
    context_starts = np.maximum(blocks[:, :1] - context_window, 0)
    return np.concatenate([context_starts, blocks], axis=1)


def eval_windows(
    sizes: npt.NDArray[np.integer], *, tokens_per_sample: int, context_window: int, break_mode: BreakMode
) -> Offsets:
    """The windows of an evaluation: a block of `tokens_per_sample - context_window` tokens after its context.

    Returns:
        int64 `(num_windows, 3)`: context_start, start, end.

    Raises:
        ConfigError: the context leaves no room for a token to score, or is negative.
    """
    if not 0 <= context_window < tokens_per_sample:
        raise ConfigError(
            f"--context-window {context_window}: expected 0 to {tokens_per_sample - 1}, "
            f"less than the {tokens_per_sample} tokens of a sample"
        )
    blocks = cut_blocks(sizes, tokens_per_sample - context_window, break_mode)
    return add_context(blocks, context_window)


def window_input(tokens: Tokens, context_start: int, end: int, *, eos_index: int) -> npt.NDArray[np.int64]:
    """What the model reads for a window: the stream from `context_start` to `end`, shifted right by one.

    Args:
        tokens: the whole stream.
        context_start: offset of the window's first token.
        end: offset after its last.
        eos_index: stands before the stream's first token.

    Returns:
        int64 `(end - context_start,)`; its item i is read to predict token `context_start + i`.
    """
    if context_start > 0:
        return tokens[context_start - 1 : end - 1].astype(np.int64)
    return np.concatenate([[eos_index], tokens[: end - 1]]).astype(np.int64)


def require_whole_sentences(tokens: Tokens, sizes: npt.NDArray[np.integer], eos_index: int, name: str) -> None:
    """Refuse a split whose sentences do not end in end-of-sentence.

    fairseq starts every block that begins with a sentence from end-of-sentence. The shifted stream does the same
    exactly when each sentence ends in one.

    Raises:
        DataError: names the first sentence (counted from 1) that does not.
    """
    ends = np.cumsum(sizes, dtype=np.int64)[sizes > 0]
    bad = np.flatnonzero(tokens[ends - 1] != eos_index)
    if len(bad):
        raise DataError(
            f"{name}: sentence {int(bad[0]) + 1} does not end in </s>; binarize it again with end-of-sentence symbols"
        )
