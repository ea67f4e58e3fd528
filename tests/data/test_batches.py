"""Batches are fairseq's, every block is trained on once an epoch, and a run goes on where it stopped on any ranks."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.batches import (
    Batches,
    Position,
    deal_out,
    epoch_batches,
    num_updates,
    shard_of_epoch,
    split_shards,
    training_updates,
)
from lmtools.data.blocks import cut_blocks
from lmtools.data.indexed import IndexedDataset
from lmtools.errors import ConfigError, DataError

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=60).map(lambda sizes: np.array(sizes, dtype=np.int64))
LIMITS = st.sampled_from(
    [
        {"batch_size": 1},
        {"batch_size": 4},
        {"batch_size": 12},
        {"max_tokens": 12},
        {"max_tokens": 100},
        {"batch_size": 9, "max_tokens": 60},
    ]
)


def as_lists(batches: Batches) -> list[list[int]]:
    return [batches[index].tolist() for index in range(len(batches))]


def block_sizes(folder: Path, tokens_per_block: int) -> np.ndarray:
    blocks = cut_blocks(IndexedDataset(folder / "train").sizes, tokens_per_block, "none")
    return blocks[:, 1] - blocks[:, 0]


def recorded_ids(run: Path) -> list[list[int]]:
    rows = [json.loads(line) for line in (run / "updates.rank0.jsonl").read_text().splitlines()]
    return [micro["ids"] for row in rows for micro in row["micro"]]


def ordered_ids(sizes: np.ndarray, count: int, *, seed: int, start: Position, drop_last: bool) -> list[list[int]]:
    updates = training_updates(
        lambda epoch: epoch_batches(sizes, seed=seed, epoch=epoch, batch_size=8, drop_last=drop_last),
        start,
        dp_size=1,
        update_freq=1,
    )
    return [update.micro_steps[0][0].tolist() for update in itertools.islice(updates, count)]


# The last fairseq drops the incomplete batch. The one of April 2020 keeps it, and draws the groups from the seed where
# the last one draws them from seed + 1: its seed 1 is seed 0 here, an epoch later.
LAST = {"seed": 1, "start": Position(), "drop_last": True}
APRIL_2020 = {"seed": 0, "start": Position(epoch=2), "drop_last": False}


@pytest.mark.parametrize(("run", "how"), [("plain", LAST), ("mp4", LAST), ("mp2_2020", APRIL_2020)])
def test_recorded_runs_of_fairseq_had_this_order(golden: Path, run, how):
    """Over 3 and 6 epochs."""
    recorded = recorded_ids(golden / run)
    assert ordered_ids(block_sizes(golden / "bin", 32), len(recorded), **how) == recorded


@pytest.mark.shared
@pytest.mark.parametrize(
    ("run", "how"), [("plain", LAST), ("mp8", LAST), ("mp8/train40", LAST), ("mp2_2020", APRIL_2020)]
)
def test_recorded_runs_on_wikitext_had_this_order(shared_golden: Path, run, how):
    recorded = recorded_ids(shared_golden / run)
    assert ordered_ids(block_sizes(shared_golden / "bin" / "built_1k", 64), len(recorded), **how) == recorded


def test_batches_by_tokens_are_fairseqs():
    """From fairseq 0.12: lexsort under numpy_seed(4), batch_by_size, a shuffle under numpy_seed(3 + epoch)."""
    sizes = np.array([5, 3, 9, 9, 2, 9, 4, 9, 1, 9, 6, 9, 9, 9, 2, 9, 9, 7, 9, 9, 3, 9, 8, 9, 9, 9, 9])
    limits = {"seed": 3, "max_tokens": 40, "required_batch_size_multiple": 4, "drop_last": True}
    assert as_lists(epoch_batches(sizes, epoch=1, **limits)) == [
        [7, 16, 25, 13],
        [19, 12, 11, 2],
        [23, 21, 18, 5],
        [8, 4, 14, 1],
        [20, 6, 0, 10],
        [17, 22, 3, 9],
    ]
    assert as_lists(epoch_batches(sizes, epoch=2, **limits)) == [
        [19, 12, 11, 2],
        [17, 22, 3, 9],
        [7, 16, 25, 13],
        [20, 6, 0, 10],
        [8, 4, 14, 1],
        [23, 21, 18, 5],
    ]


@given(SIZES, LIMITS, st.integers(0, 2**32), st.integers(1, 5), st.booleans())
def test_every_block_is_in_one_batch_and_every_batch_within_its_limits(sizes, limits, seed, epoch, regroup):
    batches = as_lists(epoch_batches(sizes, seed=seed, epoch=epoch, regroup=regroup, **limits))
    assert sorted(itertools.chain(*batches)) == list(range(len(sizes)))
    for batch in batches:
        assert 1 <= len(batch) <= limits.get("batch_size", len(sizes))
        assert len(batch) * sizes[batch].max() <= limits.get("max_tokens", np.inf)
        assert len(batch) <= 8 or len(batch) % 8 == 0 or len(batch) == limits.get("batch_size")


@given(SIZES, st.integers(0, 100))
def test_the_order_is_one_of_seed_and_epoch_alone(sizes, seed):
    first, again = (as_lists(epoch_batches(sizes, seed=seed, epoch=3, batch_size=2)) for _ in range(2))
    assert first == again


def test_epochs_shuffle_the_same_batches_unless_they_are_regrouped():
    sizes = np.full(100, 8)
    epochs = [as_lists(epoch_batches(sizes, seed=1, epoch=epoch, batch_size=4)) for epoch in (1, 2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert sorted(as_lists(epoch_batches(sizes, seed=1, epoch=2, batch_size=4, regroup=True))) != sorted(epochs[0])


def test_a_batch_size_that_is_no_multiple_of_8_is_taken_as_it_is():
    """fairseq makes batches of 8 of it, and says nothing."""
    assert [len(batch) for batch in as_lists(epoch_batches(np.full(36, 8), seed=1, epoch=1, batch_size=12))] == [12] * 3


def test_an_incomplete_last_batch_is_trained_on_unless_it_is_to_be_dropped():
    sizes = np.full(21, 8)
    kept = as_lists(epoch_batches(sizes, seed=1, epoch=1, batch_size=8))
    dropped = as_lists(epoch_batches(sizes, seed=1, epoch=1, batch_size=8, drop_last=True))
    assert sorted(map(len, kept)) == [5, 8, 8]
    assert sorted(map(len, dropped)) == [8, 8]
    full = as_lists(epoch_batches(sizes[:10], seed=1, epoch=1, batch_size=2, drop_last=True))
    assert [len(batch) for batch in full] == [2] * 5, "a full batch is not incomplete, however small"


def test_numpys_global_generator_is_left_alone():
    np.random.seed(7)
    before = np.random.get_state()[1].tolist()
    epoch_batches(np.full(100, 8), seed=1, epoch=1, batch_size=4)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(
    ("sizes", "limits", "error", "message"),
    [
        ([4, 4], {}, ConfigError, "--batch-size or --max-tokens"),
        ([4, 4], {"batch_size": 0}, ConfigError, "--batch-size 0"),
        ([4, 9], {"max_tokens": 8}, ConfigError, "--max-tokens 8: block 1 has 9 tokens"),
        ([4], {"batch_size": 1, "required_batch_size_multiple": 0}, ConfigError, "multiple 0"),
        ([], {"batch_size": 8}, DataError, "no tokens"),
        ([4] * 5, {"batch_size": 8, "drop_last": True}, DataError, "only 5 blocks"),
    ],
)
def test_what_makes_no_batches_is_refused(sizes, limits, error, message):
    with pytest.raises(error, match=message):
        epoch_batches(np.array(sizes, dtype=np.int64), seed=1, epoch=1, **limits)


def in_order(num_batches: int) -> Batches:
    """An epoch whose batch b is the one block b."""
    return Batches(np.arange(num_batches), np.arange(num_batches + 1))


def test_an_update_deals_out_the_next_batches_and_the_last_one_what_is_left():
    updates = training_updates(lambda _epoch: in_order(9), Position(), dp_size=2, update_freq=2)
    dealt = [
        (
            update.epoch,
            [[ids.tolist() for ids in ranks] for ranks in update.micro_steps],
            update.after,
        )
        for update in itertools.islice(updates, 4)
    ]
    assert dealt == [
        (1, [[[0], [1]], [[2], [3]]], Position(1, 4)),
        (1, [[[4], [5]], [[6], [7]]], Position(1, 8)),
        (1, [[[8], []]], Position(2, 0)),
        (2, [[[0], [1]], [[2], [3]]], Position(2, 4)),
    ]


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4))
def test_each_rank_has_a_batch_in_each_micro_step_but_the_last(num_batches, dp_size, update_freq):
    updates = training_updates(
        lambda _epoch: in_order(num_batches), Position(), dp_size=dp_size, update_freq=update_freq
    )
    epoch = list(itertools.takewhile(lambda update: update.epoch == 1, updates))
    assert len(epoch) == num_updates(num_batches, dp_size=dp_size, update_freq=update_freq)
    steps = [ranks for update in epoch for ranks in update.micro_steps]
    assert all(len(ranks) == dp_size for ranks in steps)
    assert all(len(ids) == 1 for ranks in steps[:-1] for ids in ranks)
    assert all(len(update.micro_steps) == update_freq for update in epoch[:-1])


@given(
    st.integers(1, 25),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=6),
)
def test_a_run_that_is_resumed_on_other_ranks_leaves_nothing_out_and_repeats_nothing(num_batches, legs):
    """Each leg is (dp_size, update_freq, updates made before it stops), over epochs of different lengths."""

    def batches_of_epoch(epoch: int) -> Batches:
        return epoch_batches(np.full(num_batches + epoch % 3, 8), seed=5, epoch=epoch, batch_size=1, regroup=True)

    position, trained = Position(), []
    for dp_size, update_freq, count in legs:
        updates = training_updates(batches_of_epoch, position, dp_size=dp_size, update_freq=update_freq)
        for update in itertools.islice(updates, count):
            trained += [(update.epoch, int(ids[0])) for ranks in update.micro_steps for ids in ranks if len(ids)]
            position = update.after
    straight = training_updates(batches_of_epoch, Position(), dp_size=1, update_freq=1)
    expected = [(update.epoch, int(update.micro_steps[0][0][0])) for update in itertools.islice(straight, len(trained))]
    assert trained == expected


def test_a_position_past_the_end_of_its_epoch_is_refused():
    updates = training_updates(lambda _epoch: in_order(4), Position(2, 7), dp_size=1, update_freq=1)
    with pytest.raises(DataError, match="epoch 2 has 4 batches and 7 of them are done"):
        next(updates)


def test_ranks_without_a_batch_get_an_empty_one():
    assert [[ids.tolist() for ids in ranks] for ranks in deal_out([np.array([3, 1])], 3)] == [[[3, 1], [], []]]


def test_shards_are_taken_in_turn():
    shards = split_shards("a:b:c")
    assert [shard_of_epoch(shards, epoch) for epoch in range(1, 6)] == ["a", "b", "c", "a", "b"]
    assert split_shards("data") == ["data"]


def test_a_million_blocks_take_about_a_second():
    start = time.process_time()
    batches = epoch_batches(np.full(1_000_000, 512), seed=1, epoch=1, max_tokens=4096)
    assert len(batches) == 125_000
    assert time.process_time() - start < 10
