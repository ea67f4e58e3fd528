"""A split is opened, checked and laid out before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.artifacts import FileRecord, Manifest, OriginalText, write_manifest
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed_writer import write_dataset
from lmtools.errors import ConfigError, DataError
from lmtools.evaluate.run import scores_of_every_token
from lmtools.evaluate.splits import EvalSplit, open_split

DICTIONARY = Dictionary([f"word{n}" for n in range(16)], [1] * 16)
EOS, UNK, PAD = Dictionary.eos_index, Dictionary.unk_index, Dictionary.pad_index
SENTENCES = [[5, 6, EOS], [UNK, 8, 9, 10, UNK, 11, EOS], [EOS], [12, UNK, EOS]]
Open = Callable[..., EvalSplit]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Writes a split and opens it."""

    def write_and_open(sentences: Sequence[Sequence[int]] = SENTENCES, name: str = "test", **options: Any) -> EvalSplit:
        write_dataset(tmp_path / name, sentences, vocab_size=20)
        settings = {"tokens_per_sample": 8, "context_window": 0, "break_mode": "none", "skip_too_long": False}
        return open_split(tmp_path, name, DICTIONARY, **(settings | options))

    return write_and_open


def test_counts_and_windows(opened: Open) -> None:
    split = opened(context_window=3)
    assert split.tokens.tolist() == [token for sentence in SENTENCES for token in sentence]
    assert (split.num_sentences, split.tokens_in_split, split.tokens_skipped, split.tokens_to_score) == (4, 14, 0, 14)
    assert split.windows.tolist() == [[0, 0, 5], [2, 5, 10], [7, 10, 14]]
    assert split.original is None


def test_sentences_that_do_not_fit_are_refused_or_left_out(opened: Open) -> None:
    options = {"break_mode": "eos", "tokens_per_sample": 4}
    with pytest.raises(
        ConfigError, match=r"test: 1 sentences are longer than the 4 tokens of a block .* token 3, has 7"
    ):
        opened(**options)
    split = opened(**options, skip_too_long=True)
    assert split.windows.tolist() == [[0, 0, 3], [10, 10, 11], [11, 11, 14]]
    assert (split.tokens_skipped, split.tokens_to_score) == (7, 7)
    with pytest.raises(ConfigError, match="every sentence is longer than the 2 tokens of a block, nothing to score"):
        opened([[5, 6, EOS], [7, 8, EOS]], break_mode="eos", tokens_per_sample=2, skip_too_long=True)


def test_the_longest_block_is_what_the_context_leaves(opened: Open) -> None:
    with pytest.raises(ConfigError, match="longer than the 5 tokens of a block"):
        opened(break_mode="complete", tokens_per_sample=8, context_window=3)


def test_scored_tokens_of_a_type(opened: Open) -> None:
    assert opened().count_scored(UNK) == 3
    assert opened().count_scored(EOS) == 4
    assert opened().count_scored(13) == 0
    left_out = opened(break_mode="eos", tokens_per_sample=4, skip_too_long=True)
    assert left_out.count_scored(UNK) == 1, "two are in the sentence that is left out"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 9))
def test_each_score_is_at_its_tokens_place(tmp_path_factory, sizes, tokens_per_sample):
    folder = tmp_path_factory.mktemp("split")
    write_dataset(folder / "test", [[5] * (size - 1) + [EOS] for size in sizes], vocab_size=20)
    options = {"tokens_per_sample": tokens_per_sample, "context_window": 0, "break_mode": "eos", "skip_too_long": True}
    if min(sizes) > tokens_per_sample:
        return
    split = open_split(folder, "test", DICTIONARY, **options)
    numbers = np.concatenate([np.arange(start, end) for _, start, end in split.windows])
    scores = scores_of_every_token(split, numbers.astype(np.float32))
    fits = np.repeat(np.array(sizes) <= tokens_per_sample, sizes)
    assert np.isnan(scores).tolist() == (~fits).tolist()
    assert scores[fits].tolist() == np.flatnonzero(fits).tolist()


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([], "test: the split holds no tokens, nothing to evaluate"),
        ([[]], "test: the split holds no tokens, nothing to evaluate"),
        ([[5, EOS], [6, 20, EOS]], "test.bin: token 3 is type 20, but the dictionary has 20 types"),
        ([[5, EOS], [PAD, 6, EOS]], "test.bin: token 2 is <pad>, which a model neither reads nor predicts"),
        ([[5, EOS], [6, 7]], "test: sentence 2 does not end in </s>"),
    ],
)
def test_tokens_that_cannot_be_scored(opened: Open, sentences, message):
    with pytest.raises(DataError, match=message):
        opened(sentences)


def test_what_scores_depend_on_tells_evaluations_apart(opened: Open) -> None:
    same = [opened().identity(), opened(name="copy").identity()]
    assert same[0] == same[1]
    others = [
        opened([*SENTENCES[:-1], [12, 13, EOS]]).identity(),
        opened(context_window=1).identity(),
        opened(tokens_per_sample=7).identity(),
        opened(break_mode="complete").identity(),
        opened(break_mode="eos").identity(),
    ]
    distinct = {tuple(sorted(identity.items())) for identity in [same[0], *others]}
    assert len(distinct) == 6


def test_counts_of_the_original_text_come_with_the_split(opened: Open, tmp_path: Path) -> None:
    split = opened()
    original = OriginalText(path="test.raw", lines=4, words=10, tokens=14, num_bytes=60)
    outputs = [FileRecord.of(Path(f"{split.prefix}.{suffix}")) for suffix in ("bin", "idx")]
    write_manifest(split.prefix, Manifest("tool", {}, [], outputs, {}, original))
    assert opened().original == original
    assert opened(SENTENCES[1:]).original is None, "the manifest is of other bytes"
