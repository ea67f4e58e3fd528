"""Rows that are read side by side: no token is lost, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.streams import IGNORED, Chunks, Streams, cut_streams, read_chunks
from lmtools.errors import DataError

EOS = 2
STREAM = np.arange(10, 10 + 400, dtype=np.uint16)

lengths = st.integers(1, 400)
rows = st.integers(1, 12)
chunk_lengths = st.integers(1, 40)


def read_all(num_tokens: int, streams: Streams) -> list[Chunks]:
    steps = range(streams.num_steps)
    return [read_chunks(STREAM[:num_tokens], streams, streams.chunk_ids(step), eos_index=EOS) for step in steps]


def target_offsets(steps: list[Chunks]) -> list[int]:
    return [int(offset) for step in steps for offset in step.offsets.flat if offset >= 0]


def test_two_rows():
    streams = cut_streams(11, num_rows=2, chunk_len=2)
    first, second, third = read_all(11, streams)
    np.testing.assert_array_equal(first.tokens, [[EOS, 10], [15, 16]])
    np.testing.assert_array_equal(first.targets, [[10, 11], [16, 17]])
    np.testing.assert_array_equal(second.targets, [[12, 13], [18, 19]])
    np.testing.assert_array_equal(third.targets, [[14, 15], [20, IGNORED]])


def test_two_rows_as_in_fairseq():
    streams = cut_streams(11, num_rows=2, chunk_len=3, fairseq_compat=True)
    first, second = read_all(11, streams)
    np.testing.assert_array_equal(first.tokens, [[10, 11, 12], [16, 17, 18]])
    np.testing.assert_array_equal(first.targets, [[11, 12, IGNORED], [17, 18, IGNORED]])
    np.testing.assert_array_equal(second.tokens, [[13, 14, 15], [19, 20, EOS]])
    np.testing.assert_array_equal(second.targets, [[14, 15, IGNORED], [20, IGNORED, IGNORED]])


def test_the_published_count():
    """fairseq's perplexity of WikiText-103's 245,569 test tokens is over 241,731 of them."""
    assert cut_streams(245_569, num_rows=1, chunk_len=64, fairseq_compat=True).num_targets == 241_731
    assert cut_streams(245_569, num_rows=10, chunk_len=64).num_targets == 245_569


@given(lengths, rows, chunk_lengths)
def test_every_token_is_a_target_once(num_tokens, num_rows, chunk_len):
    streams = cut_streams(num_tokens, num_rows=num_rows, chunk_len=chunk_len)
    assert sorted(target_offsets(read_all(num_tokens, streams))) == list(range(num_tokens))
    assert streams.num_targets == num_tokens


@given(lengths, rows, chunk_lengths)
def test_fairseq_scores_all_but_the_first_of_each_chunk_and_the_rest(num_tokens, num_rows, chunk_len):
    streams = cut_streams(num_tokens, num_rows=num_rows, chunk_len=chunk_len, fairseq_compat=True)
    num_chunks = -(-num_tokens // chunk_len) // num_rows * num_rows
    expected = [place for place in range(min(num_tokens, num_chunks * chunk_len)) if place % chunk_len]
    assert sorted(target_offsets(read_all(num_tokens, streams))) == expected
    assert streams.num_targets == len(expected)


@given(lengths, rows, chunk_lengths, st.booleans())
def test_a_row_is_contiguous_and_each_target_follows_its_input(num_tokens, num_rows, chunk_len, fairseq_compat):
    streams = cut_streams(num_tokens, num_rows=num_rows, chunk_len=chunk_len, fairseq_compat=fairseq_compat)
    steps = read_all(num_tokens, streams)
    for step in steps:
        scored = step.offsets >= 0
        np.testing.assert_array_equal(step.targets[scored], STREAM[step.offsets[scored]])
        expected = np.where(step.offsets > 0, STREAM[step.offsets - 1], EOS)
        np.testing.assert_array_equal(step.tokens[scored], expected[scored])
        assert (step.targets[~scored] == IGNORED).all()
    for row in range(num_rows if not fairseq_compat else 0):
        offsets = np.concatenate([step.offsets[row] for step in steps])
        offsets = offsets[offsets >= 0]
        assert (np.diff(offsets) == 1).all()


@given(lengths, st.integers(1, 4), st.integers(1, 4), chunk_lengths)
def test_replicas_read_the_rows_of_one_larger_batch(num_tokens, batch_size, dp_size, chunk_len):
    streams = cut_streams(num_tokens, num_rows=batch_size * dp_size, chunk_len=chunk_len)
    for step in range(streams.num_steps):
        shares = [streams.chunk_ids(step, slice(rank * batch_size, (rank + 1) * batch_size)) for rank in range(dp_size)]
        np.testing.assert_array_equal(np.concatenate(shares), streams.chunk_ids(step))


@given(lengths, st.integers(1, 4), st.integers(1, 4), chunk_lengths)
def test_replicas_read_equally_wide_chunks_until_the_last_step(num_tokens, batch_size, dp_size, chunk_len):
    """Theirs is one memory in a checkpoint, also where the split's short chunk is not in the last step."""
    streams = cut_streams(num_tokens, num_rows=batch_size * dp_size, chunk_len=chunk_len)
    for step in range(streams.num_steps - 1):
        for rank in range(dp_size):
            ids = streams.chunk_ids(step, slice(rank * batch_size, (rank + 1) * batch_size))
            chunks = read_chunks(STREAM[:num_tokens], streams, ids, eos_index=EOS)
            assert chunks.tokens.shape == chunks.targets.shape == (batch_size, chunk_len)


@given(lengths, rows, chunk_lengths, st.booleans(), st.integers(0, 50))
def test_an_extended_context_is_what_the_row_read_last(num_tokens, num_rows, chunk_len, fairseq_compat, ext_len):
    streams = cut_streams(num_tokens, num_rows=num_rows, chunk_len=chunk_len, fairseq_compat=fairseq_compat)
    before = np.zeros((num_rows, 0), dtype=np.int64)
    for step, expected in enumerate(read_all(num_tokens, streams)):
        ids = streams.chunk_ids(step)
        chunks = read_chunks(STREAM[:num_tokens], streams, ids, eos_index=EOS, ext_len=ext_len)
        np.testing.assert_array_equal(chunks.targets, expected.targets)
        np.testing.assert_array_equal(chunks.offsets, expected.offsets)
        going_on = ids >= 0
        whole = np.concatenate([before, expected.tokens], axis=1)
        width = expected.tokens.shape[1] + min(ext_len, before.shape[1])
        np.testing.assert_array_equal(chunks.tokens[going_on], whole[going_on, whole.shape[1] - width :])
        before = whole


@given(lengths, rows, chunk_lengths)
def test_which_chunk_a_token_is_in_does_not_depend_on_the_rows(num_tokens, num_rows, chunk_len):
    streams = cut_streams(num_tokens, num_rows=num_rows, chunk_len=chunk_len)
    for step in read_all(num_tokens, streams):
        for offsets in step.offsets:
            assert len({int(offset) // chunk_len for offset in offsets if offset >= 0}) <= 1


@pytest.mark.parametrize("fairseq_compat", [False, True])
def test_more_rows_than_chunks(fairseq_compat):
    streams = cut_streams(5, num_rows=4, chunk_len=3, fairseq_compat=fairseq_compat)
    assert streams.num_steps == (0 if fairseq_compat else 1)
    assert streams.num_targets == (0 if fairseq_compat else 5)


@pytest.mark.parametrize(("num_rows", "chunk_len"), [(4, 3), (1, 1)])
def test_a_split_of_which_nothing_is_predicted_is_refused(num_rows, chunk_len):
    cut_streams(5, num_rows=num_rows, chunk_len=chunk_len).require_targets("valid")
    with pytest.raises(DataError, match=f"valid: .* none of its 5 tokens is predicted in {num_rows} streams of chunks"):
        cut_streams(5, num_rows=num_rows, chunk_len=chunk_len, fairseq_compat=True).require_targets("valid")
