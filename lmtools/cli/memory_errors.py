"""What a machine's memory, or the width of its numbers, cannot hold: one line, from whatever library found it."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmtools.errors import LmtoolsError

_SIZES = (
    *("--batch-size", "--max-sentences", "--max-tokens", "--tokens-per-sample", "--mem-len", "--ext-len"),
    *("--max-new-tokens", "--beam", "--num-tokens"),
)
"""Options on which it depends how much is asked for at once."""

_MANY_DIGITS = 10
"""A number of so many, of whatever option, is more than any size."""

_OUT_OF_MEMORY = ("DefaultCPUAllocator: ", "CUDA out of memory", "CUDA error: out of memory")  # torch's RuntimeErrors
_TOO_LARGE = (
    "too large to convert",  # Python's OverflowError
    "too big to convert",
    "Maximum allowed size exceeded",  # numpy's ValueError
    "Storage size calculation overflowed",  # torch's RuntimeErrors
    "Overflow when unpacking long",  # a TypeError too
)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn memory that cannot be had, and numbers too large to compute with, into one clear line.

    Raises:
        LmtoolsError: of either.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError, TypeError, ValueError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY):
            asked = re.search(r"allocate ([\d.]+ \w+)", text)
            amount = f" ({asked[1]} were asked for at once)" if asked else ""
            raise LmtoolsError(f"out of memory{amount}; {_advice(sys.argv)}") from error
        if any(words in text for words in _TOO_LARGE):
            raise LmtoolsError(f"a size is too large to compute with; {_advice(sys.argv)}") from error
        raise


def _advice(arguments: Sequence[str]) -> str:
    """What to make smaller: numbers that no size can be, or the sizes that were given, or else what there always is."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = [(name, value) for name, value in itertools.pairwise(words) if name.startswith("--")]
    too_large = [(name, value) for name, value in given if value.isdecimal() and len(value) >= _MANY_DIGITS]
    sizes = too_large or [(name, value) for name, value in given if name in _SIZES]
    if sizes:
        return f"use a smaller {' or '.join(f'{name} {value}' for name, value in sizes)}"
    return "use a smaller --batch-size or model; `lmtools plan` says what one needs"
