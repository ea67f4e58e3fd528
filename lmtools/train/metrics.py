"""metrics.jsonl: what a run did, one JSON object a line.

`{"kind": "update", ...}` for every update, skipped ones included, `{"kind": "valid", ...}` for every validated split. A
number that is not finite is null. A run that goes on from a checkpoint first cuts off what came after that checkpoint,
so the file reads as if the run had never been interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtools.errors import DataError, LmtoolsError
from lmtools.files import disk_errors

METRICS_NAME = "metrics.jsonl"


class MetricsFile:
    """The file of a run that is going on. It is locked: no other run writes to the folder at the same time."""

    def __init__(self, path: Path) -> None:
        """Open the file, which need not exist.

        Raises:
            LmtoolsError: it may not be written, or another run has it.
        """
        self._path = path
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _lock(self._descriptor, path)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def cut(self, num_updates: int, num_skipped: int, *, owes_validation: bool = False) -> None:
        """Cut off what came after so many updates, made and skipped; after 0 it is all of another run.

        Args:
            num_updates: updates made.
            num_skipped: updates skipped.
            owes_validation: that after the last of them is still to come.

        Raises:
            DataError: a line is no JSON object.
        """
        num_tried = num_updates + num_skipped
        self._num_bytes = _bytes_until(self._path, num_tried, owes_validation) if num_updates else 0
        os.ftruncate(self._descriptor, self._num_bytes)

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line, the whole of it or nothing.

        Raises:
            LmtoolsError: the disk is full.
        """
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        with disk_errors(self._path):
            try:
                written = os.pwrite(self._descriptor, line, self._num_bytes)
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self._descriptor, self._num_bytes)
                raise
        self._num_bytes += len(line)

    def close(self) -> None:
        """Close it and let others have it."""
        os.close(self._descriptor)


def open_metrics(folder: Path) -> MetricsFile:
    """A run's metrics.jsonl, in a folder that is made if it is not there.

    Raises:
        LmtoolsError: the folder may not be written, or another run is writing to it.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return MetricsFile(folder / METRICS_NAME)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; what a killed process left of its last line is left out.

    Raises:
        DataError: a line is no JSON object.
    """
    lines = []
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, found {line[:40]!r}")
        lines.append(values)
    return lines


def _bytes_until(path: Path, num_tried: int, owes_validation: bool) -> int:
    """Length of the lines of the first `num_tried` updates, which come first, and of the validations up to there."""
    num_bytes = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for line, values in zip(lines, read_metrics(path), strict=False):
        tried = values.get("num_updates", 0) + values.get("num_skipped", 0)
        if tried > num_tried or (tried == num_tried and owes_validation and values.get("kind") == "valid"):
            break
        num_bytes += len(line)
    return num_bytes


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LmtoolsError(f"{path}: another run is writing to this folder; choose another --save-dir") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # some network file systems have no locks
            raise
