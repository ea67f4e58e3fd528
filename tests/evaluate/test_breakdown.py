"""Where the loss lies, against a count token by token."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.blocks import eval_windows
from lmtools.evaluate.breakdown import (
    Group,
    Passage,
    extreme_passages,
    loss_by_count,
    loss_by_position,
    loss_of_type,
)

NAN = float("nan")
LN2 = math.log(2)


def nats(*bits: float) -> np.ndarray:
    return -np.array(bits, dtype=np.float32) * np.float32(LN2)


@st.composite
def scored(draw):
    """Log-probabilities of a stream, some of them unknown."""
    bits = draw(st.lists(st.one_of(st.just(NAN), st.floats(0, 30, width=16)), min_size=1, max_size=60))
    return nats(*bits)


# --- by position ---


def test_a_position_is_the_number_of_tokens_before_in_the_window():
    windows = np.array([[0, 0, 2], [0, 2, 4], [2, 4, 5]])
    groups = loss_by_position(nats(1, 2, 3, 4, 5), windows, num_groups=10)
    assert [(group.first, group.last, group.num_tokens) for group in groups] == [
        (0, 0, 1),
        (1, 1, 1),
        (2, 2, 2),
        (3, 3, 1),
    ]
    assert [group.mean_bits for group in groups] == pytest.approx([1, 2, (3 + 5) / 2, 4])


@given(scored(), st.integers(1, 9), st.integers(0, 8), st.integers(1, 6))
def test_by_position_is_the_count_token_by_token(scores, tokens_per_sample, context, num_groups):
    context = min(context, tokens_per_sample - 1)
    windows = eval_windows(
        np.array([len(scores)]), tokens_per_sample=tokens_per_sample, context_window=context, break_mode="none"
    )
    expected = defaultdict(list)
    for context_start, start, end in windows.tolist():
        for place in range(start, end):
            if not math.isnan(scores[place]):
                expected[place - context_start].append(-float(scores[place]) / LN2)

    groups = loss_by_position(scores, windows, num_groups=num_groups)
    assert len(groups) <= num_groups
    assert sum(group.num_tokens for group in groups) == sum(map(len, expected.values()))
    for group in groups:
        members = [bits for position, bits in expected.items() if group.first <= position <= group.last]
        assert group.num_tokens == sum(map(len, members)) > 0
        assert group.total_bits == pytest.approx(sum(map(sum, members)))


# --- by frequency ---


@given(scored(), st.data())
def test_by_count_is_the_count_token_by_token(scores, data):
    tokens = np.array(
        data.draw(st.lists(st.integers(0, 5), min_size=len(scores), max_size=len(scores))), dtype=np.uint16
    )
    counts = np.array(data.draw(st.lists(st.integers(0, 100_000), min_size=6, max_size=6)), dtype=np.int64)
    expected = defaultdict(list)
    for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
        if token != 2 and not math.isnan(score):
            expected[len(str(counts[token])) if counts[token] else 0].append(-score / LN2)

    groups = loss_by_count(scores, tokens, counts, left_out=[2])
    assert [group.num_tokens for group in groups] == [len(expected[power]) for power in sorted(expected)]
    assert [group.total_bits for group in groups] == pytest.approx([sum(expected[power]) for power in sorted(expected)])


def test_groups_of_counts_are_powers_of_ten():
    groups = loss_by_count(nats(*range(6)), np.arange(6), np.array([0, 1, 9, 10, 99, 100]))
    assert [(group.first, group.last, group.num_tokens) for group in groups] == [
        (0, 0, 1),
        (1, 9, 2),
        (10, 99, 2),
        (100, 999, 1),
    ]


def test_the_loss_of_one_type():
    scores, tokens = nats(1, 2, 4, NAN), np.array([2, 3, 2, 2])
    assert loss_of_type(scores, tokens, 2) == Group(2, 2, 2, pytest.approx(5))
    assert loss_of_type(scores, tokens, 5) is None


# --- passages ---


@given(scored(), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_passages_are_the_most_extreme_that_do_not_overlap(scores, length, most, hardest):
    bits = -scores.astype(np.float64) / LN2
    length_here = min(length, len(bits))
    candidates = [
        Passage(start, start + length_here, float(bits[start : start + length_here].mean()))
        for start in range(len(bits) - length_here + 1)
    ]
    candidates = [passage for passage in candidates if not math.isnan(passage.mean_bits)]
    found = extreme_passages(scores, length=length, most=most, hardest=hardest)
    for passage in found:
        values = [other.mean_bits for other in candidates]
        assert passage.mean_bits == pytest.approx((max if hardest else min)(values), abs=1e-9)
        assert passage.mean_bits == pytest.approx(float(bits[passage.start : passage.end].mean()), abs=1e-9)
        candidates = [other for other in candidates if other.end <= passage.start or other.start >= passage.end]
    assert len(found) == most or not candidates


def test_nothing_scored_has_no_groups_and_no_passages():
    scores = nats(NAN, NAN)
    assert loss_by_position(scores, np.array([[0, 0, 2]]), num_groups=3) == []
    assert loss_by_count(scores, np.array([4, 5]), np.ones(9, dtype=np.int64)) == []
    assert extreme_passages(scores, length=1, most=3, hardest=True) == []
    assert extreme_passages(nats(), length=4, most=3, hardest=True) == []
