"""What a long evaluation has scored so far, on disk, so that a killed run goes on where it was.

Scores arrive in stream order, so the state of a run is a prefix. The file is one line of JSON that says what is being
scored, then float32 log-probabilities, little-endian, appended round by round. What a killed process left of an
unfinished round is cut off when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmtools.data.blocks import Offsets
from lmtools.errors import ConfigError
from lmtools.evaluate.scoring import Scores
from lmtools.files import disk_errors

_SCORE = np.dtype("<f4")


class ScoreJournal:
    """An open journal."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream

    @classmethod
    def create(cls, path: Path, identity: Mapping[str, Any]) -> ScoreJournal:
        """Start a new journal, in place of any that is there.

        Args:
            path: the file.
            identity: everything that the scores depend on; JSON values.
        """
        with disk_errors(path):
            stream = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
            stream.write(json.dumps(identity, sort_keys=True).encode() + b"\n")
        return cls(path, stream)

    @classmethod
    def reopen(cls, path: Path, identity: Mapping[str, Any], windows: Offsets) -> tuple[ScoreJournal, Scores, int]:
        """Continue a journal.

        Args:
            path: the file.
            identity: must equal the one that the journal was created with.
            windows: the evaluation's windows, `(num_windows, 3)`.

        Returns:
            The journal, the scores of all whole windows in it, and how many windows these are.

        Raises:
            ConfigError: the journal is of another evaluation; names the first thing that differs.
        """
        with disk_errors(path):
            with open(path, "rb") as existing:
                header, data = existing.readline(), existing.read()
            _require_same(path, header, identity)
            scores = np.frombuffer(data[: len(data) - len(data) % _SCORE.itemsize], dtype=_SCORE)
            ends = np.cumsum(windows[:, 2] - windows[:, 1])
            num_windows = int(np.searchsorted(ends, len(scores), side="right"))
            num_tokens = int(ends[num_windows - 1]) if num_windows else 0
            os.truncate(path, len(header) + num_tokens * _SCORE.itemsize)
            stream = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        return cls(path, stream), scores[:num_tokens].astype(np.float32), num_windows

    def append(self, scores: Scores) -> None:
        """Add a round's scores; they survive the process when this returns."""
        with disk_errors(self.path):
            _write_all(self._stream, scores.astype(_SCORE).tobytes())

    def close(self) -> None:
        """Close the file; it stays until its evaluation is complete and written elsewhere."""
        self._stream.close()


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _require_same(path: Path, header: bytes, identity: Mapping[str, Any]) -> None:
    try:
        found = json.loads(header)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not header.endswith(b"\n"):
        raise ConfigError(f"{path}: not a journal of an evaluation; remove it, or run without --resume")
    for key in sorted(identity.keys() | found.keys()):
        if found.get(key) != identity.get(key):
            raise ConfigError(
                f"{path}: is of an evaluation with {key} {found.get(key)!r}, this one has {identity.get(key)!r}; "
                "run it with the same, or without --resume to start over"
            )
