"""The splits of a run: training blocks by epoch, validation blocks, and a check that they fit the dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from lmtools.artifacts import OriginalText, read_fresh_manifest
from lmtools.data.batches import (
    Batches,
    BlockIds,
    Position,
    Update,
    epoch_batches,
    require_room,
    shard_of_epoch,
    split_shards,
    training_updates,
)
from lmtools.data.blocks import Offsets, Tokens, cut_blocks, require_whole_sentences
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.data.streams import Streams, cut_streams, stream_updates
from lmtools.errors import DataError
from lmtools.train.config import TrainConfig


@dataclass(frozen=True)
class Blocks:
    """A split cut into blocks.

    Attributes:
        name: the subset.
        tokens: its stream, mapped from the disk.
        spans: int64 `(num_blocks, 2)`, start and end of each block.
        original: counts of the original text, where the manifest has them.
    """

    name: str
    tokens: Tokens
    spans: Offsets
    original: OriginalText | None

    @property
    def sizes(self) -> BlockIds:
        """Tokens of each block."""
        return self.spans[:, 1] - self.spans[:, 0]


def open_blocks(folder: str | Path, name: str, dictionary: Dictionary, config: TrainConfig) -> Blocks:
    """Open a split and cut it as the run asks.

    Raises:
        DataError: the split is missing, broken, empty or of another dictionary, or (in the break modes that keep
            sentences whole) has one that is longer than a block.
    """
    prefix = Path(folder) / name
    dataset = IndexedDataset(prefix)
    if dataset.num_tokens == 0:
        raise DataError(f"{prefix}: the split holds no tokens")
    largest = max(int(dataset.tokens[i : i + (1 << 22)].max()) for i in range(0, dataset.num_tokens, 1 << 22))
    if largest >= len(dictionary):
        raise DataError(
            f"{prefix}.bin: holds type {largest}, but the dictionary has {len(dictionary)} types; "
            "the split was binarized with another dictionary"
        )
    require_whole_sentences(dataset.tokens, dataset.sizes, dictionary.eos_index, str(prefix))
    spans = cut_blocks(dataset.sizes, config.tokens_per_sample, config.sample_break_mode)
    longest = int((spans[:, 1] - spans[:, 0]).max())
    if longest > config.tokens_per_sample:
        raise DataError(
            f"{prefix}: a sentence has {longest} tokens, more than the {config.tokens_per_sample} of a block; "
            "use --sample-break-mode none or a larger --tokens-per-sample"
        )
    manifest = read_fresh_manifest(prefix)
    return Blocks(name, dataset.tokens, spans, manifest.original if manifest else None)


@dataclass(frozen=True)
class RunData:
    """All data of a run.

    Attributes:
        dictionary: of every split and of the model's vocabulary.
        train: opens the training blocks of an epoch's shard.
        batches: the batches of an epoch, in order.
        valid: the validation splits.
        streams: how an epoch's shard is cut into streams, for truncated BPTT; else None.
    """

    dictionary: Dictionary
    train: Callable[[int], Blocks]
    batches: Callable[[int], Batches]
    valid: tuple[Blocks, ...]
    streams: Callable[[int], Streams] | None = None

    def updates(self, start: Position, config: TrainConfig) -> Iterator[Update]:
        """The run's updates from a place on, without an end."""
        if self.streams is not None:
            return stream_updates(self.streams, start, dp_size=config.dp, update_freq=config.update_freq)
        return training_updates(self.batches, start, dp_size=config.dp, update_freq=config.update_freq)


def open_data(config: TrainConfig) -> RunData:
    """Open everything that a run reads, so that what is wrong with it shows before a worker starts.

    Raises:
        DataError: see `open_blocks`; or the folders have different dictionaries.
        ConfigError: a block is longer than a batch may be.
    """
    shards = split_shards(config.data)
    if not shards:
        raise DataError(
            f"DATA {config.data!r}: names no folder, expected that of `lmtools binarize`, or several as a:b:c"
        )
    dictionary = Dictionary.load(Path(shards[0]) / "dict.txt")
    for shard in shards[1:]:
        if Dictionary.load(Path(shard) / "dict.txt").sha256 != dictionary.sha256:
            raise DataError(f"{shard}/dict.txt: differs from {shards[0]}/dict.txt; the shards of a run share one")

    @lru_cache(maxsize=1)
    def train_shard(folder: str) -> Blocks:
        return open_blocks(folder, config.train_subset, dictionary, config)

    def train(epoch: int) -> Blocks:
        return train_shard(shard_of_epoch(shards, epoch))

    @lru_cache(maxsize=1)
    def batches(epoch: int) -> Batches:
        return epoch_batches(
            train(epoch).sizes,
            seed=config.seed,
            epoch=epoch,
            batch_size=config.batch_size,
            max_tokens=config.max_tokens,
            required_batch_size_multiple=config.required_batch_size_multiple,
            regroup=len(shards) > 1,
        )

    def streams(epoch: int) -> Streams:
        return cut_blocks_into_streams(train(epoch), config, config.batch_size)

    for shard in shards:
        require_room(train_shard(shard).sizes, config.max_tokens)
    names = [name for name in config.valid_subset.split(",") if name]
    valid = tuple(open_blocks(shards[0], name, dictionary, config) for name in names)
    if config.task != "truncated_bptt_lm":
        return RunData(dictionary, train, batches, valid)
    for shard in shards:
        streams_of_shard = cut_blocks_into_streams(train_shard(shard), config, config.batch_size)
        streams_of_shard.require_targets(f"{shard}/{config.train_subset}")
    for blocks in valid:
        cut_blocks_for_validation(blocks, config).require_targets(f"{shards[0]}/{blocks.name}")
    return RunData(dictionary, train, batches, valid, streams)


def cut_blocks_into_streams(blocks: Blocks, config: TrainConfig, batch_size: int | None) -> Streams:
    """The rows of truncated BPTT: `batch_size` for each replica."""
    assert batch_size is not None, "see config_checks.py"
    return cut_streams(
        len(blocks.tokens),
        num_rows=batch_size * config.dp,
        chunk_len=config.tokens_per_sample,
        fairseq_compat=config.fairseq_compat,
    )


def cut_blocks_for_validation(blocks: Blocks, config: TrainConfig) -> Streams:
    """The same of a validation split, which may have more or fewer rows."""
    return cut_blocks_into_streams(blocks, config, config.batch_size_valid or config.batch_size)


def validation_batches(blocks: Blocks, config: TrainConfig) -> list[BlockIds]:
    """Blocks of a validation split in stream order, as many at a time as `--batch-size-valid` says."""
    size = config.batch_size_valid or config.batch_size
    if size is None:
        assert config.max_tokens is not None
        size = max(1, config.max_tokens // config.tokens_per_sample)
    ids = np.arange(len(blocks.spans))
    return [ids[start : start + size] for start in range(0, len(ids), size)]
