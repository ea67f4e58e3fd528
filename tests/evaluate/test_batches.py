"""Batches and rounds: every window once, in order, as many at a time as may be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.blocks import Offsets
from lmtools.errors import ConfigError
from lmtools.evaluate.batches import batches_of_round, cut_batches, num_rounds, tokens_after_rounds


def windows_of(lengths: list[int], context: int = 3) -> Offsets:
    """Blocks of these lengths, one after the other, each with what context there is before it."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return np.stack([np.maximum(starts - context, 0), starts, ends], axis=1).astype(np.int64)


WINDOWS = st.lists(st.integers(1, 9), max_size=40).map(windows_of)
SIZES = st.none() | st.integers(1, 7)


@given(WINDOWS, SIZES, st.none() | st.integers(13, 60), st.integers(0, 1))
def test_batches_hold_every_window_once_and_no_more_than_they_may(windows, batch_size, max_tokens, num_extra):
    bounds = cut_batches(windows, batch_size=batch_size, max_tokens=max_tokens, num_extra=num_extra)
    assert (bounds[0], bounds[-1]) == (0, len(windows))
    assert (np.diff(bounds) > 0).all()
    lengths = windows[:, 2] - windows[:, 0] + num_extra
    for start, stop in itertools.pairwise(bounds):

        def fits(start: int, stop: int) -> bool:
            num_padded = (stop - start) * lengths[start:stop].max()
            return stop - start <= (batch_size or 99) and num_padded <= (max_tokens or 10**9)

        assert fits(start, stop)
        assert stop == len(windows) or not fits(start, stop + 1), "one more would have fitted"


def test_max_tokens_counts_the_padding() -> None:
    # Windows of 2, 2, 2 and 6 tokens: with the last one the others would be padded to 6.
    assert cut_batches(windows_of([2, 2, 2, 6], context=0), max_tokens=12).tolist() == [0, 3, 4]
    assert cut_batches(windows_of([2, 2, 2, 6], context=0), max_tokens=24).tolist() == [0, 4]
    assert cut_batches(windows_of([6, 6], context=0), max_tokens=12, num_extra=1).tolist() == [0, 1, 2]


def test_a_window_that_no_batch_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-tokens 8: the longest window alone has 9 tokens"):
        cut_batches(windows_of([1, 4, 5]), max_tokens=8, num_extra=1)


@given(WINDOWS, SIZES, st.integers(1, 5))
def test_rounds_deal_batches_out_in_order(windows, batch_size, dp_size):
    bounds = cut_batches(windows, batch_size=batch_size)
    rounds = [batches_of_round(bounds, index, dp_size) for index in range(num_rounds(bounds, dp_size))]
    assert all(len(batches) == dp_size for batches in rounds), "every replica has one, were it empty"
    dealt = [(start, stop) for batches in rounds for start, stop in batches if start < stop]
    assert dealt == list(itertools.pairwise(bounds.tolist()))
    assert all(batches[0][0] < batches[0][1] for batches in rounds), "no round is empty"
    expected = [int(windows[batches[-1][1] - 1, 2]) for batches in rounds]
    assert tokens_after_rounds(windows, bounds, dp_size).tolist() == expected


def test_nothing_to_score_takes_no_round() -> None:
    bounds = cut_batches(windows_of([]), batch_size=3)
    assert num_rounds(bounds, 2) == 0
    assert tokens_after_rounds(windows_of([]), bounds, 2).tolist() == []
