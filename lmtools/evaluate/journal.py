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
from collections.abc import Callable, Iterator, Mapping
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
    def create(cls, path: Path, identity: Mapping[str, Any], say: Callable[[str], None]) -> ScoreJournal:
        """Start a new journal, in place of any that is there.

        Args:
            path: the file.
            identity: everything that the scores depend on; JSON values.
            say: called with a line about the scores that are lost with an old one, if it has any.

        Raises:
            ConfigError: a running evaluation has it open.
        """
        with disk_errors(path), _opened(path) as stream:
            header, scores = stream.readline(), _sound_scores(stream.read())
            found = _identity_of(header)
            if found is not None and len(scores):
                say(f"{path}: {_discarded(len(scores), found, identity)}")
            stream.truncate(stream.seek(0))
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
            header, scores = stream.readline(), _sound_scores(stream.read())
            _require_same(path, header, identity)
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


def _sound_scores(data: bytes) -> Scores:
    """What can be scores, up to the first that cannot: after a power cut, blocks of a file may be zeros, or anything.

    A log-probability may be 0, but not all at the end: these are scored again.
    """
    scores = np.frombuffer(data[: len(data) - len(data) % _SCORE.itemsize], dtype=_SCORE)
    unsound = np.flatnonzero(~(np.isfinite(scores) & (scores <= 0)))
    prefix = scores[: unsound[0]] if len(unsound) else scores
    return np.trim_zeros(prefix, "b")


def _discarded(num_tokens: int, found: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """What is said of scores that no run goes on from."""
    key = _first_difference(found, identity)
    if key is None:
        return f"{num_tokens:,} tokens that an unfinished run had scored are discarded; --resume would have kept them"
    return (
        f"{num_tokens:,} tokens that an unfinished run with {key} {found.get(key)!r} had scored are discarded; "
        f"this one has {identity.get(key)!r}"
    )


def _identity_of(header: bytes) -> dict[str, Any] | None:
    """What a journal says that it is of; None if it is no journal."""
    try:
        found = json.loads(header)
    except ValueError:
        return None
    return found if isinstance(found, dict) and header.endswith(b"\n") else None


def _first_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    return next((key for key in sorted(wanted.keys() | found.keys()) if found.get(key) != wanted.get(key)), None)


def _require_same(path: Path, header: bytes, identity: Mapping[str, Any]) -> None:
    found = _identity_of(header)
    if found is None:
        raise ConfigError(f"{path}: not a journal of an evaluation; remove it, or run without --resume")
    key = _first_difference(found, identity)
    if key is not None:
        raise ConfigError(
            f"{path}: is of an evaluation with {key} {found.get(key)!r}, this one has {identity.get(key)!r}; "
            "run it with the same, or without --resume to start over"
        )
