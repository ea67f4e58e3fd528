"""What a long evaluation has scored so far, on disk, so that a killed run goes on where it was.

Scores arrive in stream order, so the state of a run is a prefix. The file is one line of JSON that says what is being
scored, then float32 log-probabilities, little-endian, appended round by round. What a killed process
or a power cut left of an unfinished round is cut off when the file is opened again. One process at a time has
it open.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lmtools.errors import ConfigError
from lmtools.evaluate.scoring import Scores
from lmtools.files import disk_errors

_SCORE = np.dtype("<f4")


class ScoreJournal:
    """An open journal, locked until it is closed."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream

    @classmethod
    def create(cls, path: Path, identity: Mapping[str, Any]) -> ScoreJournal:
        """Start a new journal, in place of any that is there.

        Args:
            path: the file.
            identity: everything that the scores depend on; JSON values.

        Raises:
            ConfigError: a running evaluation has it open.
        """
        with disk_errors(path), _opened(path) as stream:
            stream.truncate()
            _write_all(stream, json.dumps(identity, sort_keys=True).encode() + b"\n")
            return cls(path, stream)

    @classmethod
    def reopen(
        cls, path: Path, identity: Mapping[str, Any], tokens_after_rounds: npt.NDArray[np.int64]
    ) -> tuple[ScoreJournal, Scores, int]:
        """Continue a journal.

        Args:
            path: the file.
            identity: must equal the one that the journal was created with.
            tokens_after_rounds: how many tokens are scored when each round is done.

        Returns:
            The journal, the scores of all whole rounds in it, and how many rounds these are.

        Raises:
            ConfigError: a running evaluation has it open, or it is of another evaluation; names the first thing that
                differs.
        """
        with disk_errors(path), _opened(path) as stream:
            header, data = stream.readline(), stream.read()
            _require_same(path, header, identity)
            scores = _sound_prefix(np.frombuffer(data[: len(data) - len(data) % _SCORE.itemsize], dtype=_SCORE))
            num_rounds = int(np.searchsorted(tokens_after_rounds, len(scores), side="right"))
            num_tokens = int(tokens_after_rounds[num_rounds - 1]) if num_rounds else 0
            stream.truncate(stream.seek(len(header) + num_tokens * _SCORE.itemsize))
            return cls(path, stream), scores[:num_tokens].astype(np.float32), num_rounds

    def append(self, scores: Scores) -> None:
        """Add a round's scores; they survive the process when this returns."""
        with disk_errors(self.path):
            _write_all(self._stream, scores.astype(_SCORE).tobytes())

    def close(self) -> None:
        """Close the file; it stays until its evaluation is complete and written elsewhere."""
        self._stream.close()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, made if need be, locked; it stays open after the block if that succeeds."""
    # Not by open(): no mode of it reads and writes, makes a new file and keeps what is in an old one.
    stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
    try:
        _lock(stream, path)
        yield stream
    except BaseException:
        stream.close()
        raise


def _lock(stream: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{path}: another evaluation is writing it; wait for its end, or choose another --output"
        ) from error
    except OSError as error:
        # Some cluster file systems have no locks; there it is up to the user to give each run its own --output.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _sound_prefix(scores: Scores) -> Scores:
    """What can be scores, up to the first that cannot: after a power cut, blocks of a file may be zeros, or anything.

    A log-probability may be 0, but not all at the end: these are scored again.
    """
    unsound = np.flatnonzero(~(np.isfinite(scores) & (scores <= 0)))
    prefix = scores[: unsound[0]] if len(unsound) else scores
    return np.trim_zeros(prefix, "b")


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
