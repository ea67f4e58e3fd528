"""What `transform` promises beyond what the tests of the stages see."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtools.errors import DataError
from lmtools.preprocess.detok import detok


@pytest.mark.parametrize(("most", "num_pieces"), [(100, 10), (5, 5)], ids=["small text", "large text"])
def test_a_large_text_has_large_pieces_rather_than_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, num_pieces: int
) -> None:
    monkeypatch.setattr("lmtools.preprocess.detok._PIECE_BYTES", 50)
    monkeypatch.setattr("lmtools.preprocess.transform._MOST_PIECES", most)
    text, output = tmp_path / "a.raw", tmp_path / "a.detok"
    text.write_bytes(b"ten bytes\n" * 50)
    pieces: list[int] = []
    detok(str(text), str(output), progress=pieces.append)
    assert len(pieces) == num_pieces
    assert output.read_bytes() == text.read_bytes()


@pytest.mark.parametrize("change", ["grows", "is replaced", "goes"])
def test_a_text_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str) -> None:
    """One that is still being written would be cut short, and its output look complete."""
    text, output, other = tmp_path / "a.raw", tmp_path / "a.detok", tmp_path / "b.raw"
    text.write_bytes(b"ten bytes\n")
    other.write_bytes(b"TEN BYTES\n")

    def meanwhile(num_bytes: int) -> None:
        if change == "grows":
            text.write_bytes(b"ten bytes\nten bytes\n")
        elif change == "is replaced":
            other.replace(text)
        else:
            text.unlink()

    with pytest.raises(DataError, match=r"a\.raw: was changed while it was read"):
        detok(str(text), str(output), progress=meanwhile)
    assert not output.exists()
