"""What `transform` promises beyond what the tests of the stages see."""

from __future__ import annotations

from pathlib import Path

import pytest

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
