"""A killed evaluation continues with its next window, and never with another evaluation's scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import ConfigError
from lmtools.evaluate.journal import ScoreJournal

WINDOWS = np.array([[0, 0, 4], [0, 4, 8], [4, 8, 12], [8, 12, 14]])
IDENTITY = {"path": "model.pt", "context_window": 4}


def write(path: Path, *rounds: list[float]) -> None:
    journal = ScoreJournal.create(path, IDENTITY)
    for scores in rounds:
        journal.append(np.array(scores, dtype=np.float32))
    journal.close()


def test_continues_after_the_last_whole_window(tmp_path):
    path = tmp_path / "journal"
    write(path, [-1.0] * 4, [-2.0] * 6)  # 4 + 4 tokens are two windows, two more begin a third
    journal, scores, num_windows = ScoreJournal.reopen(path, IDENTITY, WINDOWS)
    assert num_windows == 2
    assert scores.tolist() == [-1.0] * 4 + [-2.0] * 4
    journal.append(np.array([-3.0] * 4, dtype=np.float32))
    journal.close()
    journal, scores, num_windows = ScoreJournal.reopen(path, IDENTITY, WINDOWS)
    journal.close()
    assert num_windows == 3
    assert scores.tolist() == [-1.0] * 4 + [-2.0] * 4 + [-3.0] * 4


@given(st.integers(0, 14 * 4))
def test_any_cut_leaves_whole_windows(tmp_path_factory, num_bytes):
    path = tmp_path_factory.mktemp("cut") / "journal"
    expected = np.arange(14, dtype=np.float32)
    write(path, expected.tolist())
    header = path.read_bytes().index(b"\n") + 1
    path.write_bytes(path.read_bytes()[: header + num_bytes])
    journal, scores, num_windows = ScoreJournal.reopen(path, IDENTITY, WINDOWS)
    journal.close()
    num_tokens = int(WINDOWS[num_windows - 1, 2]) if num_windows else 0
    assert scores.tolist() == expected[:num_tokens].tolist()
    assert num_bytes < 4 * 14 or num_windows == len(WINDOWS)
    assert path.stat().st_size == header + 4 * num_tokens


def test_another_evaluation_is_refused_by_what_differs(tmp_path):
    path = tmp_path / "journal"
    write(path, [-1.0] * 4)
    with pytest.raises(ConfigError, match="context_window 4, this one has 8"):
        ScoreJournal.reopen(path, IDENTITY | {"context_window": 8}, WINDOWS)


@pytest.mark.parametrize("content", [b"", b"not json\n", b'{"path": "mod', b"[1]\n"])
def test_what_is_no_journal_is_refused(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a journal"):
        ScoreJournal.reopen(path, IDENTITY, WINDOWS)
