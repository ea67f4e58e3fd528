r"""Detokenise WikiText, byte for byte as the published step of fairseq's megatron_11b example does.

    raw:    " Two later groups are recognised : Palaeozoic @-@ era clams , and 3 @.@ 5 m of snails . \n"
    detok:  "Two later groups are recognised: Palaeozoic-era clams, and 3.5 m of snails.\n"

Each line goes through sacremoses' Moses detokeniser and then through five replacements. The step loses information on
purpose: it cannot tell WikiText's marks from the same characters in the text (docs/text.md has examples).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmtools.artifacts import OriginalText
from lmtools.files import disk_errors
from lmtools.preprocess.lines import read_text_lines, write_part
from lmtools.preprocess.transform import Piece, manifests_if_unchanged, transform, write_manifests

if TYPE_CHECKING:
    from sacremoses.tokenize import MosesDetokenizer

_TOOL = "lmtools detok"
_PIECE_BYTES = 256 << 10  # sacremoses takes about a tenth of a second for it

# fairseq/examples/megatron_11b/detok.py, in its order.
_REPLACEMENTS = ((" @", ""), ("@ ", ""), (" =", "="), ("= ", "="), (" – ", "–"))


@dataclass(frozen=True)
class TextCounts:
    """What a text holds.

    Attributes:
        lines: its lines, a last one without a line end included.
        words: what stands between white space.
        num_bytes: its size.
    """

    lines: int = 0
    words: int = 0
    num_bytes: int = 0

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(self.lines + other.lines, self.words + other.words, self.num_bytes + other.num_bytes)

    @property
    def tokens(self) -> int:
        """Words and line ends, as word-level WikiText counts."""
        return self.words + self.lines


@dataclass(frozen=True)
class Detokenized:
    """What `detok` made.

    Attributes:
        counts: of the output.
        original: of the input or, where the input's manifest says so, of the text that it was made from.
    """

    counts: TextCounts
    original: OriginalText


def detok(
    source: str,
    output: str,
    *,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Detokenized:
    """Detokenise a text file line by line, and write a manifest beside the output.

    Args:
        source: a plain or compressed file, or `-`.
        output: the file to write, or `-`.
        workers: how many tasks run at a time; the output does not depend on it.
        executor: where they run, if not in processes of this call's own; it must see the same files.
        progress: called with the number of bytes of text that were just detokenised.

    Raises:
        DataError: the input is missing, broken or not UTF-8.
        LmtoolsError: the disk is full or may not be written. The output is as it was.
    """
    done = transform(
        _detok_piece,
        [source],
        [output],
        piece_bytes=_PIECE_BYTES,
        workers=workers,
        executor=executor,
        preload=[__name__, "sacremoses.tokenize"],
        progress=progress,
    )
    raw = sum((before for before, _ in done.results), TextCounts())
    counts = sum((after for _, after in done.results), TextCounts())
    original = done.originals[0] or OriginalText(Path(source).name, raw.lines, raw.words, raw.tokens, raw.num_bytes)
    write_manifests([output], done, tool=_TOOL, options={}, counts=[asdict(counts)], originals=[original])
    return Detokenized(counts, original)


def find_detokenized(source: str, output: str) -> Detokenized | None:
    """What is there already, if the same input made it; else None."""
    manifests = manifests_if_unchanged([output], tool=_TOOL, options={}, inputs=[source])
    if manifests is None or manifests[0].original is None:
        return None
    return Detokenized(TextCounts(**manifests[0].counts), manifests[0].original)


def detokenize(line: str) -> str:
    """Detokenise one line; neither it nor the result has a line end."""
    # fairseq passes the line cut at spaces; sacremoses puts them back before it does anything.
    text: str = _moses().detokenize([line.strip()])
    for mark, replacement in _REPLACEMENTS:
        text = text.replace(mark, replacement)
    return text


@functools.lru_cache(maxsize=1)
def _moses() -> MosesDetokenizer:
    from sacremoses.tokenize import MosesDetokenizer  # half a second, which only a worker need pay

    return MosesDetokenizer()


def _detok_piece(piece: Piece) -> tuple[TextCounts, TextCounts]:
    """Detokenise the lines of a piece into its part; returns the counts before and after."""
    [source], [part] = piece.inputs, piece.parts
    num_lines = raw_words = words = num_bytes = 0
    with disk_errors(piece.output), write_part(part) as stream:
        for line in read_text_lines(source):
            text = detokenize(line)
            num_bytes += stream.write(f"{text}\n".encode())
            num_lines += 1
            raw_words += len(line.split())
            words += len(text.split())
    return TextCounts(num_lines, raw_words, source.num_bytes), TextCounts(num_lines, words, num_bytes)
