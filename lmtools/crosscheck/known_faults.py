"""Where fairseq is known to be wrong: told apart from a difference that nobody has explained yet."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from lmtools.crosscheck.compare import Scores

_BARE_RETURN = re.compile(rb"\r(?!\n)")


def faults_of_text(text: Path, *, sacremoses: str | None = None) -> list[str]:
    """What about a text makes fairseq's text programs give other bytes.

    Args:
        text: what both programs read.
        sacremoses: the version that fairseq's interpreter has, if it is used.
    """
    faults = []
    content = text.read_bytes()
    found = _BARE_RETURN.search(content)
    if found:
        line = content.count(b"\n", 0, found.start()) + 1
        faults.append(
            f"fairseq ends a line at a bare carriage return, lmtools at \\n alone; the first is in line {line}"
        )
    if sacremoses is not None and _numbers(sacremoses) < (0, 2) and not content.isascii():
        faults.append(
            f"sacremoses {sacremoses}, as fairseq has it, takes the edges of CJK blocks for other text; 0.2 does not"
        )
    return faults


def faults_of_parts(num_parts: int) -> list[str]:
    """What is not compared, since it is wrong in fairseq."""
    if num_parts == 1:
        return []
    return [f"fairseq's evaluation of {num_parts} parts hangs or gives wrong scores, so it was given one merged file"]


def faults_of_counts(num_ours: int, num_theirs: int) -> list[str]:
    """What makes fairseq score fewer tokens."""
    if num_theirs < num_ours:
        return ["fairseq leaves out, without a word, blocks that are longer than the model's maximum"]
    return []


def faults_of_sum(scores: Scores, printed_base2: float) -> list[str]:
    """What makes fairseq's printed loss another than the mean of its own scores."""
    exact = -float(np.sum(scores, dtype=np.float64)) / len(scores) / float(np.log(2))
    if abs(printed_base2 - exact) <= 1e-8 * exact:
        return []
    return [
        f"fairseq adds scores in float32: it prints {printed_base2:.7f} bits, its own scores have {exact:.7f} "
        f"({printed_base2 - exact:+.1e})"
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
