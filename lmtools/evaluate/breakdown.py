"""Where the loss of an evaluation lies: by position in the window, by token frequency, by passage. Pure; no torch.

Each function takes the score of every token at its place in the stream, as `eval --scores` writes them: natural-log
probabilities, NaN where a token was not scored. Losses are in bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmtools.data.blocks import Offsets, Tokens
from lmtools.evaluate.perplexity import nats_to_bits

LogProbs = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Group:
    """The loss of some of the tokens.

    Attributes:
        first: least value of what they have in common (a position, a count).
        last: the largest, itself included.
        num_tokens: how many they are, at least 1.
        total_bits: their loss, summed.
    """

    first: int
    last: int
    num_tokens: int
    total_bits: float

    @property
    def mean_bits(self) -> float:
        """Their loss per token."""
        return self.total_bits / self.num_tokens


@dataclass(frozen=True)
class Passage:
    """A run of tokens.

    Attributes:
        start: offset of its first token in the stream.
        end: offset after its last.
        mean_bits: loss per token.
    """

    start: int
    end: int
    mean_bits: float


def loss_by_position(log_probs: LogProbs, windows: Offsets, *, num_groups: int) -> list[Group]:
    """The loss by how many tokens of its window stand before a token.

    Args:
        log_probs: `(num_tokens,)`.
        windows: int64 `(num_windows, 3)`: context_start, start, end.
        num_groups: the most groups; neighbouring positions are put together, equally many in each.

    Returns:
        The groups that have a token, in order.
    """
    lengths = windows[:, 2] - windows[:, 1]
    first_of_window = np.cumsum(lengths) - lengths
    in_block = np.arange(lengths.sum()) - np.repeat(first_of_window, lengths)
    places = in_block + np.repeat(windows[:, 1], lengths)
    positions = in_block + np.repeat(windows[:, 1] - windows[:, 0], lengths)
    scores = log_probs[places]
    known = ~np.isnan(scores)
    positions, scores = positions[known], scores[known]
    if not len(positions):
        return []
    low, high = int(positions.min()), int(positions.max())
    width = -(-(high - low + 1) // num_groups)
    bounds = [(first, min(first + width - 1, high)) for first in range(low, high + 1, width)]
    return _groups((positions - low) // width, scores, bounds)


def loss_by_count(
    log_probs: LogProbs, tokens: Tokens, counts: npt.NDArray[np.int64], *, left_out: Sequence[int] = ()
) -> list[Group]:
    """The loss by how often a token's type was seen, in powers of ten: 0, 1 to 9, 10 to 99 ...

    Args:
        log_probs: `(num_tokens,)`.
        tokens: `(num_tokens,)`, the type of each.
        counts: `(num_types,)`, how often each type was seen.
        left_out: types that are in no group, such as the end of sentence, whose counts mean nothing.

    Returns:
        The groups that have a token, in order.
    """
    seen = counts[tokens]
    known = ~np.isnan(log_probs) & ~np.isin(tokens, np.array(left_out, dtype=np.int64))
    seen, scores = seen[known], log_probs[known]
    num_digits = len(str(int(seen.max()))) if len(seen) else 0
    bounds = [(0, 0), *((10**power, 10 ** (power + 1) - 1) for power in range(num_digits))]
    upper = np.array([last for _, last in bounds])
    return _groups(np.searchsorted(upper, seen), scores, bounds)


def loss_of_type(log_probs: LogProbs, tokens: Tokens, token_type: int) -> Group | None:
    """The loss of all tokens of one type; None if none was scored."""
    scores = log_probs[(tokens == token_type) & ~np.isnan(log_probs)]
    groups = _groups(np.zeros(len(scores), dtype=np.int64), scores, [(token_type, token_type)])
    return groups[0] if groups else None


def extreme_passages(log_probs: LogProbs, *, length: int, most: int, hardest: bool) -> list[Passage]:
    """The runs of `length` tokens with the highest or lowest mean loss, the most extreme first.

    The first is the most extreme of all; each further one the most extreme of those that overlap none before it. A run
    with a token that was not scored is not one; a stream shorter than `length` is one run.

    Args:
        log_probs: `(num_tokens,)`.
        length: tokens of a passage.
        most: how many are wanted; there may be fewer.
        hardest: those of the highest loss, else of the lowest.
    """
    bits = -np.asarray(log_probs, dtype=np.float64) / np.log(2)
    length = min(length, len(bits))
    if length == 0:
        return []
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(bits))])
    unknown = np.concatenate([[0], np.cumsum(np.isnan(bits))])
    means = (sums[length:] - sums[:-length]) / length
    free = unknown[length:] == unknown[:-length]
    ranked = np.where(free, means if hardest else -means, -np.inf)
    passages: list[Passage] = []
    while len(passages) < most and ranked.max() > -np.inf:
        start = int(ranked.argmax())
        passages.append(Passage(start, start + length, float(means[start])))
        ranked[max(start - length + 1, 0) : start + length] = -np.inf
    return passages


def _groups(indices: npt.NDArray[np.integer], scores: LogProbs, bounds: Sequence[tuple[int, int]]) -> list[Group]:
    num_tokens = np.bincount(indices, minlength=len(bounds))
    total_nats = -np.bincount(indices, scores.astype(np.float64), minlength=len(bounds))
    return [
        Group(first, last, int(count), nats_to_bits(float(nats)))
        for (first, last), count, nats in zip(bounds, num_tokens, total_nats, strict=True)
        if count
    ]
