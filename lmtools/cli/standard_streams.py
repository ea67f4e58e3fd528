"""Standard output, whose failure is one line, whenever it shows; and standard streams that were closed.

Python writes what is printed when a buffer is full, at the end, or (PYTHONUNBUFFERED) at once. So a full disk shows at
any `print`, where nothing tells it from the error of another file, or after the program's end, as a traceback. What is
written at once is written without a buffer, where of a disk's last bytes nobody learns that they were too few.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from lmtools.errors import LmtoolsError


@contextmanager
def checked_standard_streams() -> Iterator[None]:
    """Have all that was printed written when the block ends, and as soon as without this.

    Where standard output fails, what printed raises an LmtoolsError, or the block's end says it. A SystemExit that
    leaves the block then has a code that is not 0. A reader that stops reading (`| head`) is no error to speak of.
    """
    _replace_closed()
    before = sys.__stdout__
    if before is None or sys.stdout is not before:  # another has put something in its place, a test
        yield
        return
    raw = _StandardOutput(before.fileno(), "w", closefd=False)
    # With a buffer in any case: it writes again what the system did not take at once.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors="backslashreplace",  # what a terminal's encoding has not, or is in a file's name and no text
        line_buffering=before.line_buffering or before.write_through,
    )
    stream = sys.stdout
    try:
        yield
    except SystemExit as end:
        _flush(stream)
        if raw.failed:
            sys.exit(end.code or 1)
        raise
    finally:
        _flush(stream)
        sys.stdout = before


def _replace_closed() -> None:
    """Let no other file take the number of a closed stream, nor messages go to standard output for want of another.

    Results have to be written somewhere: standard output that is closed refuses them. Messages need not be read.
    """
    for number, name, flags in ((1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process lives
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _flush(stream: TextIO) -> None:
    try:
        with suppress(BrokenPipeError):
            stream.flush()
    except LmtoolsError as error:
        print(f"lmtools: {error}", file=sys.stderr)


class _StandardOutput(io.FileIO):
    """Says of an error that it is standard output's, once.

    Attributes:
        failed: whether there was one; what is written then goes nowhere.
    """

    failed = False

    def write(self, data: Any, /) -> int:
        if self.failed:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise
            raise LmtoolsError(f"standard output: {error.strerror}; what was printed is not whole") from error
