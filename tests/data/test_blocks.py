"""Every token is scored exactly once, with the context that fairseq gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.blocks import add_context, cut_blocks, eval_windows, require_whole_sentences, window_input
from lmtools.errors import ConfigError, DataError
from tests.support.arrays import read_npz

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(lambda sizes: np.array(sizes, dtype=np.int32))
MODES = st.sampled_from(["none", "complete", "eos"])


@given(SIZES, st.integers(1, 50), MODES)
def test_blocks_cover_the_stream_once_and_in_order(sizes, tokens_per_block, mode):
    blocks = cut_blocks(sizes, tokens_per_block, mode)
    covered = np.concatenate([np.arange(start, end) for start, end in blocks])
    assert covered.tolist() == list(range(int(sizes.sum())))


@given(SIZES, st.integers(1, 50))
def test_none_cuts_every_so_many_tokens(sizes, tokens_per_block):
    lengths = np.diff(cut_blocks(sizes, tokens_per_block, "none"), axis=1)[:, 0]
    assert (lengths[:-1] == tokens_per_block).all()
    assert 1 <= lengths[-1] <= tokens_per_block


@given(SIZES, st.integers(1, 50))
def test_complete_breaks_only_between_sentences_and_takes_as_many_as_fit(sizes, tokens_per_block):
    blocks = cut_blocks(sizes, tokens_per_block, "complete")
    ends = set(np.cumsum(sizes).tolist())
    assert {int(end) for end in blocks[:, 1]} <= ends
    lengths = (blocks[:, 1] - blocks[:, 0]).tolist()
    next_sentence = {int(start): int(size) for start, size in zip(np.cumsum(sizes) - sizes, sizes, strict=True)}
    for (start, end), length in zip(blocks.tolist(), lengths, strict=True):
        assert length <= tokens_per_block or length == next_sentence[start], "only a lone long sentence is longer"
        if end in next_sentence:
            assert length + next_sentence[end] > tokens_per_block, "the next sentence would have fitted"


def test_eos_makes_each_sentence_a_block():
    assert cut_blocks(np.array([3, 1, 5]), 2, "eos").tolist() == [[0, 3], [3, 4], [4, 9]]


def test_an_empty_split_has_no_blocks():
    assert cut_blocks(np.array([], dtype=np.int32), 8, "none").shape == (0, 2)


@given(SIZES, st.integers(2, 50), st.data(), MODES)
def test_a_window_is_its_block_and_what_stands_before_it(sizes, tokens_per_sample, data, mode):
    context_window = data.draw(st.integers(0, tokens_per_sample - 1))
    windows = eval_windows(sizes, tokens_per_sample=tokens_per_sample, context_window=context_window, break_mode=mode)
    context = windows[:, 1] - windows[:, 0]
    assert (context == np.minimum(windows[:, 1], context_window)).all()
    if mode == "none":
        assert (windows[:, 2] - windows[:, 0] <= tokens_per_sample).all()


@pytest.mark.parametrize("context_window", [-1, 8, 9])
def test_a_context_that_leaves_no_room_is_refused(context_window):
    with pytest.raises(ConfigError, match="--context-window"):
        eval_windows(np.array([20]), tokens_per_sample=8, context_window=context_window, break_mode="none")


def test_the_published_protocol_has_8464_windows():
    # 270,847 tokens at 1024 with context 992: the count in a user's log of the Megatron-11b evaluation.
    windows = eval_windows(np.array([270_847]), tokens_per_sample=1024, context_window=992, break_mode="none")
    assert len(windows) == 8_464


def test_input_is_the_stream_shifted_with_end_of_sentence_before_its_first_token():
    stream = np.array([10, 11, 12, 13], dtype=np.uint16)
    assert window_input(stream, 0, 3, eos_index=2).tolist() == [2, 10, 11]
    assert window_input(stream, 2, 4, eos_index=2).tolist() == [11, 12]


def test_contexts_run_across_block_borders():
    assert add_context(np.array([[0, 16], [16, 32], [32, 48], [48, 64], [64, 70]]), 48).tolist() == [
        [0, 0, 16],
        [0, 16, 32],
        [0, 32, 48],
        [0, 48, 64],
        [16, 64, 70],
    ]


def test_a_split_without_end_of_sentence_is_refused_with_the_first_sentence_that_lacks_it():
    with pytest.raises(DataError, match="sentence 2 does not end in </s>"):
        require_whole_sentences(np.array([5, 2, 6, 7]), np.array([2, 2]), 2, "test")


@pytest.mark.parametrize(("case", "context_window"), [("noctx", 0), ("ctx24", 24)])
def test_windows_are_fairseqs(golden: Path, case, context_window):
    """The golden evaluations record each example: its block's id, context length and length."""
    recorded = read_npz(golden / "plain" / "eval" / f"{case}.npz")
    num_tokens = int(recorded["len"].sum())
    windows = eval_windows(
        np.array([num_tokens]), tokens_per_sample=32, context_window=context_window, break_mode="none"
    )
    order = np.argsort(recorded["id"])
    assert (recorded["len"][order] == windows[:, 2] - windows[:, 1]).all()
    assert (recorded["start"][order] == windows[:, 1] - windows[:, 0]).all()
