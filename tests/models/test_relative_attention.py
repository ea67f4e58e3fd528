"""Distances, the shift and the mask; attention itself is tested with the model, against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from lmtools.models.relative_attention import attention_mask, relative_positions, shift_to_keys


def test_the_shift_is_a_view_and_picks_each_keys_distance():
    num_queries, num_keys = 3, 7
    by_distance = torch.arange(2 * num_queries * (num_keys + 1)).view(2, num_queries, num_keys + 1)
    shifted = shift_to_keys(by_distance)
    assert shifted.untyped_storage().data_ptr() == by_distance.untyped_storage().data_ptr()
    for query in range(num_queries):
        for key in range(num_keys - num_queries + query + 1):
            distance = num_keys - num_queries + query - key
            assert torch.equal(shifted[:, query, key], by_distance[:, query, num_keys - 1 - distance])


def test_relative_positions_are_the_formula():
    table = relative_positions(4, 6, clamp_len=2, like=torch.empty(0))
    for row, distance in enumerate([2, 2, 1, 0]):
        angles = [distance * 10000 ** (-i / 6) for i in (0, 2, 4)]
        expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        assert table[row].tolist() == pytest.approx(expected, abs=1e-6)
    assert len(table) == 5


def test_half_precision_positions_are_rounded_only_at_the_end():
    exact = relative_positions(3000, 8, -1, torch.empty(0))
    assert torch.equal(relative_positions(3000, 8, -1, torch.empty(0, dtype=torch.bfloat16)), exact.bfloat16())


def test_the_mask_lets_a_query_see_up_to_itself_or_a_window():
    seen = attention_mask(2, 5, None, torch.empty(0)) == 0
    assert seen.tolist() == [[True, True, True, True, False], [True, True, True, True, True]]
    seen = attention_mask(2, 5, 3, torch.empty(0)) == 0
    assert seen.tolist() == [[False, True, True, True, False], [False, False, True, True, True]]


def test_a_row_does_not_see_what_is_not_its_own():
    """Four remembered positions, two queries; the second row has only the last of the four."""
    mask = attention_mask(2, 6, 4, torch.empty(0), torch.tensor([4, 1]))
    seen = [[[key for key in range(6) if row[key] == 0] for row in of_row] for of_row in mask.tolist()]
    assert seen == [[[1, 2, 3, 4], [2, 3, 4, 5]], [[3, 4], [3, 4, 5]]]
