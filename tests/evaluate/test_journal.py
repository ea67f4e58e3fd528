"""A killed evaluation continues with its next round, and never with another evaluation's scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import ConfigError
from lmtools.evaluate.journal import ScoreJournal

ROUNDS = np.array([4, 8, 12, 14])
IDENTITY = {"path": "model.pt", "context_window": 4}


def write(path: Path, *rounds: list[float]) -> None:
    journal = ScoreJournal.create(path, IDENTITY, lambda line: None)
    for scores in rounds:
        journal.append(np.array(scores, dtype=np.float32))
    journal.close()


def test_continues_after_the_last_whole_round(tmp_path):
    path = tmp_path / "journal"
    write(path, [-1.0] * 4, [-2.0] * 6)  # 4 + 4 tokens are two rounds, two more begin a third
    journal, scores, num_rounds = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    assert num_rounds == 2
    assert scores.tolist() == [-1.0] * 4 + [-2.0] * 4
    journal.append(np.array([-3.0] * 4, dtype=np.float32))
    journal.close()
    journal, scores, num_rounds = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.close()
    assert num_rounds == 3
    assert scores.tolist() == [-1.0] * 4 + [-2.0] * 4 + [-3.0] * 4


def test_rounds_of_another_size_continue_at_one_of_their_own_ends(tmp_path):
    path = tmp_path / "journal"
    write(path, [-1.0] * 4, [-2.0] * 4, [-3.0] * 4)
    journal, scores, num_rounds = ScoreJournal.reopen(path, IDENTITY, np.array([8, 14]))
    journal.close()
    assert num_rounds == 1
    assert scores.tolist() == [-1.0] * 4 + [-2.0] * 4


@given(st.integers(0, 14 * 4))
def test_any_cut_leaves_whole_rounds(tmp_path_factory, num_bytes):
    path = tmp_path_factory.mktemp("cut") / "journal"
    expected = -1 - np.arange(14, dtype=np.float32)
    write(path, expected.tolist())
    header = path.read_bytes().index(b"\n") + 1
    path.write_bytes(path.read_bytes()[: header + num_bytes])
    journal, scores, num_rounds = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.close()
    num_tokens = int(ROUNDS[num_rounds - 1]) if num_rounds else 0
    assert scores.tolist() == expected[:num_tokens].tolist()
    assert num_bytes < 4 * 14 or num_rounds == len(ROUNDS)
    assert path.stat().st_size == header + 4 * num_tokens


@pytest.mark.parametrize("lost", [[0.0] * 9, [np.nan, -1.0, -1.0], [3.5, -1.0], [-np.inf, 0.0], [0.0, 0.0, 1.0]])
def test_what_can_be_no_scores_is_scored_again(tmp_path, lost):
    """After a power cut the file may have its length, but not its content."""
    path = tmp_path / "journal"
    write(path, [-1.0, 0.0, -1.0, -2.0], [-1.0] * 2 + lost)
    journal, scores, num_rounds = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.append(np.array([-3.0] * 4, dtype=np.float32))
    journal.close()
    assert (num_rounds, scores.tolist()) == (1, [-1.0, 0.0, -1.0, -2.0])
    journal, scores, num_rounds = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.close()
    assert scores.tolist() == [-1.0, 0.0, -1.0, -2.0] + [-3.0] * 4


def test_a_new_journal_replaces_an_old_one(tmp_path):
    path = tmp_path / "journal"
    write(path, [-1.0] * 14)
    write(path, [-2.0] * 4)
    journal, scores, _ = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.close()
    assert scores.tolist() == [-2.0] * 4


KEPT = "--resume would have kept them"
OTHER = "with context_window 4 had scored are discarded; this one has 8"


@pytest.mark.parametrize(("context_window", "end"), [(4, f"had scored are discarded; {KEPT}"), (8, OTHER)])
def test_what_a_new_journal_throws_away_is_said(tmp_path, context_window, end):
    path = tmp_path / "journal"
    write(path, [-1.0] * 4, [-2.0] * 6)
    lines: list[str] = []
    ScoreJournal.create(path, IDENTITY | {"context_window": context_window}, lines.append).close()
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}: 10 tokens that an unfinished run ")
    assert lines[0].endswith(end)
    ScoreJournal.create(path, IDENTITY, pytest.fail).close()  # nothing is scored any more


@pytest.mark.parametrize("content", [b"", b"not json\n", b'{"path": "mod', b"[1]\n\x00\x00\x80\xbf"])
def test_of_what_is_no_journal_nothing_is_said(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    ScoreJournal.create(path, IDENTITY, pytest.fail).close()
    ScoreJournal.reopen(path, IDENTITY, ROUNDS)[0].close()


def test_one_evaluation_at_a_time(tmp_path):
    path = tmp_path / "journal"
    journal = ScoreJournal.create(path, IDENTITY, pytest.fail)
    journal.append(np.array([-1.0] * 4, dtype=np.float32))
    with pytest.raises(ConfigError, match="another evaluation is writing it"):
        ScoreJournal.create(path, IDENTITY, pytest.fail)
    with pytest.raises(ConfigError, match="another evaluation is writing it"):
        ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.close()
    journal, scores, _ = ScoreJournal.reopen(path, IDENTITY, ROUNDS)
    journal.close()
    assert scores.tolist() == [-1.0] * 4, "who was refused took nothing away"


def test_another_evaluation_is_refused_by_what_differs(tmp_path):
    path = tmp_path / "journal"
    write(path, [-1.0] * 4)
    with pytest.raises(ConfigError, match="context_window 4, this one has 8"):
        ScoreJournal.reopen(path, IDENTITY | {"context_window": 8}, ROUNDS)


@pytest.mark.parametrize("content", [b"", b"not json\n", b'{"path": "mod', b"[1]\n"])
def test_what_is_no_journal_is_refused(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a journal"):
        ScoreJournal.reopen(path, IDENTITY, ROUNDS)
