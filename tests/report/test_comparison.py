"""Several results side by side: what differs, what is best, and whether they can be compared."""

from __future__ import annotations

import math

import pytest

from lmtools.report.comparison import comparability, compare, rounded, short
from lmtools.report.sources import read_evaluations
from tests.support.results import write_data, write_result

UNKNOWN = {"word_perplexity": None, "bits_per_byte": None}


@pytest.fixture
def evaluations(tmp_path):
    """Results of the same data, with given changes."""
    data = write_data(tmp_path)

    def read(*changes):
        files = []
        for number, change in enumerate(changes):
            files.append(tmp_path / f"{number}.json")
            # What the results say is enough: nothing that belongs to them is looked for.
            changes_here = {"data": "moved", "scores": None} | change
            write_result(files[-1], data, tmp_path / f"{number}.npy", **changes_here)
        return read_evaluations(files)

    return read


def test_the_lowest_is_marked_and_what_differs(evaluations):
    rows = {
        row.label: row for row in compare(evaluations({"bits": math.log2(9.5)}, {"bits": math.log2(8.46), "mp": 8}))
    }
    row = rows["perplexity per token"]
    assert (row.cells, row.differs, row.best) == (["9.50", "8.46"], True, 1)
    assert (rows["mp × dp"].cells, rows["mp × dp"].differs) == (["1 × 1", "8 × 1"], True)
    assert (rows["tokens scored"].cells, rows["tokens scored"].differs) == (["400", "400"], False)
    assert "memory" not in rows, "neither has one"
    assert rows["torch"].cells == ["2.13.0", "2.13.0"]
    assert rows["lmtools"].cells == ["0.1.0", "0.1.0"]


def test_equal_numbers_and_unknown_ones_have_no_best(evaluations):
    rows = {row.label: row for row in compare(evaluations({"bits": 5.0}, {"bits": 5.0, "bits_per_byte": None}))}
    assert (rows["bits per byte"].cells, rows["bits per byte"].best) == (["1.0000", "–"], None)
    assert rows["perplexity per token"].best is None


def test_whether_they_can_be_compared(evaluations):
    hashes = {"test.bin": "0", "test.idx": "0", "dict.txt": "0"}
    assert comparability(evaluations({})) == []
    [same] = comparability(evaluations({}, {}))
    assert "the same 400 tokens" in same
    [other_tokens] = comparability(evaluations({}, {"data_sha256": hashes}))
    assert "compare per original token" in other_tokens
    [other_text] = comparability(evaluations({}, {"data_sha256": hashes, "original": None, **UNKNOWN}))
    assert "not all of one text" in other_text
    _, windows, skipped = comparability(evaluations({}, {"context_window": 2, "tokens_skipped": 4}))
    assert "contexts or memories differ" in windows
    assert "Not every token was scored" in skipped


def test_numbers_of_any_size_are_short():
    assert [rounded(10.544), rounded(2070.5), rounded(1e300)] == ["10.54", "2,070.50", "1e+300"]
    assert [short("a" * 64), short("a" * 64, "b" * 64), short("")] == ["aaaaaaaaaaaa", "aaaaaaaaaaaa +1", "–"]
