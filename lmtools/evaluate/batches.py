"""Which windows go through a model together, and in which round. Pure: every rank works it out alike.

Windows are taken in stream order. A batch is a run of them, and in round r the dp replicas take the batches
r * dp_size, r * dp_size + 1, ...: what is scored after each round is a prefix of the stream. All batches are cut before
the first is scored, so that a run that is resumed makes the same ones as a run that was never cut off.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lmtools.data.blocks import Offsets
from lmtools.errors import ConfigError

Bounds = npt.NDArray[np.int64]
"""`(num_batches + 1,)`: batch b is the windows from bounds[b] to bounds[b + 1]."""


def cut_batches(
    windows: Offsets, *, batch_size: int | None = None, max_tokens: int | None = None, num_extra: int = 0
) -> Bounds:
    """Cut the windows into batches, each as large as it may be.

    Args:
        windows: int64 `(num_windows, 3)`: context_start, start, end.
        batch_size: the most windows of a batch, or None.
        max_tokens: the most tokens of a batch, with the padding that makes its windows equally long, or None.
        num_extra: tokens that each window has beside its own, such as `<s>`.

    Raises:
        ConfigError: a window alone has more than `max_tokens`.
    """
    num_windows = len(windows)
    lengths = windows[:, 2] - windows[:, 0] + num_extra
    if max_tokens is None:
        size = batch_size or max(num_windows, 1)
        return np.append(np.arange(0, num_windows, size), num_windows)
    if num_windows and lengths.max() > max_tokens:
        raise ConfigError(f"--max-tokens {max_tokens}: the longest window alone has {lengths.max()} tokens")
    bounds, widest = [0], 0
    for index, length in enumerate(lengths.tolist()):
        widest = max(widest, length)
        count = index + 1 - bounds[-1]
        if count > (batch_size or math.inf) or count * widest > max_tokens:
            bounds.append(index)
            widest = length
    return np.array([*bounds, num_windows] if num_windows else bounds)


def num_rounds(bounds: Bounds, dp_size: int) -> int:
    """How many rounds the batches take."""
    return -(-(len(bounds) - 1) // dp_size)


def batches_of_round(bounds: Bounds, round_index: int, dp_size: int) -> list[tuple[int, int]]:
    """First window and end of each replica's batch; empty ones when the last round has fewer batches than replicas."""
    last = len(bounds) - 1
    firsts = range(round_index * dp_size, (round_index + 1) * dp_size)
    return [(int(bounds[min(batch, last)]), int(bounds[min(batch + 1, last)])) for batch in firsts]


def tokens_after_rounds(windows: Offsets, bounds: Bounds, dp_size: int) -> npt.NDArray[np.int64]:
    """int64 `(num_rounds,)`: how many tokens are scored when each round is done."""
    tokens_after_windows = np.concatenate([[0], np.cumsum(windows[:, 2] - windows[:, 1])])
    last_batches = np.minimum(np.arange(1, num_rounds(bounds, dp_size) + 1) * dp_size, len(bounds) - 1)
    return tokens_after_windows[bounds[last_batches]]
