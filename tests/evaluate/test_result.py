"""What an evaluation reports: exact counts, sums in float64, and nothing that the counts do not allow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed_writer import write_dataset
from lmtools.errors import DataError
from lmtools.evaluate.result import result_of, summary_of
from lmtools.evaluate.run import ScoredSplit
from lmtools.evaluate.splits import EvalSplit, open_split

DICTIONARY = Dictionary([f"word{n}" for n in range(16)], [1] * 16)
EOS, UNK = Dictionary.eos_index, Dictionary.unk_index
SETTINGS = {"tokens_per_sample": 4, "context_window": 0, "dtype": "float32"}
ORIGINAL = {"path": "test.raw", "lines": 2, "words": 5, "tokens": 7, "num_bytes": 30}


@pytest.fixture
def split(tmp_path: Path) -> EvalSplit:
    return opened(tmp_path, skip=False)


def opened(folder: Path, *, skip: bool) -> EvalSplit:
    """Three tokens and five; with `skip`, the latter are left out."""
    DICTIONARY.save(folder / "dict.txt")
    write_dataset(folder / "test", [[5, UNK, EOS], [7, 8, 9, UNK, EOS]], vocab_size=20)
    return open_split(
        folder,
        "test",
        DICTIONARY,
        tokens_per_sample=4,
        context_window=0,
        break_mode="eos" if skip else "none",
        skip_too_long=skip,
    )


def result(split: EvalSplit, scores: list[float], original: Any = None, **scored: Any) -> dict[str, Any]:
    outcome = ScoredSplit(np.array(scores, dtype=np.float32), **({"tokens_resumed": 0, "seconds": 2.0} | scored))
    return result_of(split, outcome, settings=SETTINGS, original=original, original_from=original and "manifest")


def test_every_unit_of_one_loss(split: EvalSplit) -> None:
    found = result(split, [-1.0] * 4 + [-3.0] * 4, ORIGINAL)
    assert (found["total_nats"], found["loss_nats"]) == (16.0, 2.0)
    assert found["loss_base2"] == pytest.approx(2 / math.log(2), rel=1e-15)
    assert found["perplexity"] == pytest.approx(math.exp(2), rel=1e-14)
    assert found["word_perplexity"] == pytest.approx(math.exp(16 / 7), rel=1e-14)
    assert found["bits_per_byte"] == pytest.approx(16 / math.log(2) / 30, rel=1e-14)
    assert (found["tokens_scored"], found["tokens_in_split"], found["tokens_unk"]) == (8, 8, 2)


def test_sums_are_in_float64(tmp_path: Path) -> None:
    """In float32 the small ones would be lost beside the large one."""
    write_dataset(tmp_path / "test", [[5] * 1999 + [EOS]], vocab_size=20)
    DICTIONARY.save(tmp_path / "dict.txt")
    options: dict[str, Any] = {"tokens_per_sample": 4, "context_window": 0, "break_mode": "none"}
    split = open_split(tmp_path, "test", DICTIONARY, **options, skip_too_long=False)
    scores = [-float(2**20), *[-(2.0**-8)] * 1999]
    assert result(split, scores)["total_nats"] == 2**20 + 1999 * 2**-8


def test_what_is_known_of_a_part_is_not_said_of_the_whole(tmp_path: Path) -> None:
    found = result(opened(tmp_path, skip=True), [-1.0] * 3, ORIGINAL)
    assert (found["tokens_scored"], found["tokens_skipped"], found["tokens_unk"]) == (3, 5, 1)
    assert (found["word_perplexity"], found["bits_per_byte"]) == (None, None)


def test_unknown_counts_leave_their_numbers_open(split: EvalSplit) -> None:
    nothing = result(split, [-1.0] * 8)
    assert (nothing["word_perplexity"], nothing["bits_per_byte"], nothing["original_from"]) == (None, None, None)
    tokens = result(split, [-1.0] * 8, ORIGINAL | {"num_bytes": None})
    assert tokens["word_perplexity"] is not None
    assert tokens["bits_per_byte"] is None


def test_speed_is_of_this_run_alone(split: EvalSplit) -> None:
    found = result(split, [-1.0] * 8, tokens_resumed=6, seconds=4.0)
    assert (found["tokens_resumed"], found["tokens_per_second"]) == (6, 0.5)
    assert result(split, [-1.0] * 8, tokens_resumed=8, seconds=0.0)["tokens_per_second"] is None


def test_a_missing_score_is_a_bug(split: EvalSplit) -> None:
    with pytest.raises(AssertionError, match="scored exactly once"):
        result(split, [-1.0] * 7)


def test_a_perplexity_that_no_float_holds_is_an_error(split: EvalSplit) -> None:
    with pytest.raises(DataError, match="too large for a float"):
        result(split, [-1000.0] * 8)


def test_hashes_are_of_the_files_that_were_read(split: EvalSplit, tmp_path: Path) -> None:
    hashes = result(split, [-1.0] * 8)["data_sha256"]
    assert hashes.keys() == {"test.bin", "test.idx", "dict.txt"}
    assert hashes["dict.txt"] == DICTIONARY.sha256


def test_the_summary_in_full(split: EvalSplit) -> None:
    assert summary_of(result(split, [-1.0] * 4 + [-3.0] * 4, ORIGINAL)).splitlines() == [
        "test: loss 2.8854 bits, perplexity 7.39 over 8 tokens (window 4, context 0, float32)",
        "  <unk>: 2 of the tokens (25.00 %)",
        "  per original token: perplexity 9.83 over 7 (words and line ends of test.raw)",
        "  per original byte: 0.7694 bits over 30",
    ]


def test_the_summary_says_what_was_not_scored(tmp_path: Path) -> None:
    lines = summary_of(result(opened(tmp_path, skip=True), [-1.0] * 3, ORIGINAL)).splitlines()
    assert lines[1] == "  NOT scored: 5 of 8 tokens, in sentences that do not fit a window"
    assert len(lines) == 3, "and nothing of the original text"
