"""The first difference of two files, and the differences of two lists of scores. Pure but for reading the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_CHUNK_BYTES = 1 << 20
_SHOWN_BYTES = 60

ROUNDING_NATS = 1e-3
"""Two float32 programs that compute the same model differ by less on each token; measured: under 1e-5 for models of two
layers, and it grows with depth. What differs in kind (a position, a mask, a row) moves some token by far more."""

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """Where two files begin to differ.

    Attributes:
        offset: the first byte that differs, or the length of the shorter file if it is the beginning of the other.
        line: the number of its line, from 1.
        ours: lmtools' bytes of that line about there.
        theirs: fairseq's.
    """

    offset: int
    line: int
    ours: bytes
    theirs: bytes


def first_difference(ours: Path, theirs: Path) -> Difference | None:
    """Compare two files byte by byte; None if they are equal."""
    line, position = 1, 0
    with open(ours, "rb") as left, open(theirs, "rb") as right:
        while True:
            one, other = left.read(_CHUNK_BYTES), right.read(_CHUNK_BYTES)
            if one != other:
                common = _common_length(one, other)
                line += one[:common].count(b"\n")
                offset = position + common
                return Difference(offset, line, _line_about(ours, offset), _line_about(theirs, offset))
            if not one:
                return None
            line += one.count(b"\n")
            position += len(one)


def _common_length(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    unequal = np.frombuffer(one[:shorter], np.uint8) != np.frombuffer(other[:shorter], np.uint8)
    return int(np.argmax(unequal)) if unequal.any() else shorter


def _line_about(path: Path, offset: int) -> bytes:
    """The line at an offset, from a little before it to a little behind."""
    start = max(offset - _SHOWN_BYTES // 2, 0)
    with open(path, "rb") as stream:
        stream.seek(start)
        content = stream.read(_SHOWN_BYTES)
    before, behind = content[: offset - start], content[offset - start :]
    return before.rpartition(b"\n")[2] + behind.partition(b"\n")[0]


@dataclass(frozen=True)
class ScoreComparison:
    """Two programs' scores of the same tokens.

    Attributes:
        num_tokens: how many there are.
        largest_nats: the largest difference of one token.
        mean_nats: the mean of the differences' sizes.
        loss_base2_ours: bits per token by lmtools' scores, added in float64.
        loss_base2_theirs: by fairseq's scores, added in float64.
        largest_at: places in the stream of the largest differences, largest first; none where there is no difference.
    """

    num_tokens: int
    largest_nats: float
    mean_nats: float
    loss_base2_ours: float
    loss_base2_theirs: float
    largest_at: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether they differ by rounding alone."""
        return self.largest_nats <= ROUNDING_NATS


def compare_scores(ours: Scores, theirs: Scores, *, num_largest: int = 5) -> ScoreComparison:
    """Compare natural-log probabilities, float32 `(N,)` each, N at least 1, of the same tokens in the same order."""
    assert ours.shape == theirs.shape, "scores of the same tokens"
    sizes = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    largest_at = np.argsort(-sizes, kind="stable")[: min(num_largest, np.count_nonzero(sizes))]
    bits = [-float(np.sum(scores, dtype=np.float64)) / len(scores) / float(np.log(2)) for scores in (ours, theirs)]
    return ScoreComparison(
        num_tokens=len(ours),
        largest_nats=float(sizes.max()),
        mean_nats=float(sizes.mean()),
        loss_base2_ours=bits[0],
        loss_base2_theirs=bits[1],
        largest_at=tuple(int(place) for place in largest_at),
    )
