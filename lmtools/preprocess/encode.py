r"""What the workers of `binarize` do: count the words of some lines, look them up, put parts together.

A line is what `\n` ends; its words are what stands between white space, Unicode's included, as in fairseq's
`tokenize_line`. Each line becomes the indices of its words and one `</s>`; a word that the dictionary does not know
becomes `<unk>`. Each function here is a task that reads files and writes files, so it can run in any process; those
that put parts together use the parts up, and so run only once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from lmtools.data.dictionary import SPECIAL_SYMBOLS, Dictionary
from lmtools.data.indexed_writer import bin_path, idx_path, little_endian, token_typecode, write_index
from lmtools.errors import DataError
from lmtools.files import fsync_file
from lmtools.preprocess.lines import ByteRange, join_parts, read_text_lines, write_part


@dataclass(frozen=True)
class SplitCounts:
    """What a split, or a part of one, holds.

    Attributes:
        sentences: its lines.
        tokens: words, and one end-of-sentence for each line.
        unk_tokens: tokens that are `<unk>`.
        replaced_tokens: those of them that were another word in the text.
    """

    sentences: int = 0
    tokens: int = 0
    unk_tokens: int = 0
    replaced_tokens: int = 0

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(
            self.sentences + other.sentences,
            self.tokens + other.tokens,
            self.unk_tokens + other.unk_tokens,
            self.replaced_tokens + other.replaced_tokens,
        )

    @property
    def replaced_share(self) -> float:
        """Replaced words in all tokens, ends of sentence included, as fairseq counts."""
        return self.replaced_tokens / self.tokens if self.tokens else 0.0


def count_words(text: ByteRange, part: Path) -> None:
    """Count the words of a range and write the counts, as JSON, to `part`."""
    counts = Counter(chain.from_iterable(map(str.split, read_text_lines(text))))
    with write_part(part) as stream:
        stream.write(json.dumps(counts, ensure_ascii=False).encode())


def build_dictionary(
    parts: Sequence[Path], path: Path, source: str, *, threshold: int, nwords: int, padding_factor: int
) -> int:
    """Add up the counts of all parts, write the dictionary to `path`, and return its number of types.

    Raises:
        DataError: no word is left for it.
    """
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(json.loads(part.read_text(encoding="utf-8")))
        part.unlink()
    dictionary = Dictionary.from_counts(counts, threshold=threshold, nwords=nwords, padding_factor=padding_factor)
    if not any(dictionary.counts[len(SPECIAL_SYMBOLS) :]):
        raise DataError(
            f"{source}: no word is left for a dictionary, of {len(counts):,} different ones; lower --thresholdsrc, "
            "raise --nwordssrc, or name a dictionary with --srcdict"
        )
    path.write_bytes(dictionary.to_bytes())
    return len(dictionary)


def copy_dictionary(source: str, path: Path) -> int:
    """Read a dictionary, write it to `path` as lmtools writes it, and return its number of types."""
    dictionary = Dictionary.load(source)
    with write_part(path) as stream:
        stream.write(dictionary.to_bytes())
    return len(dictionary)


class _Lookup(dict[str, int]):
    """Index of every word that is not `<unk>`; counts the others as they come, which saves a pass over the tokens."""

    unk_tokens = 0
    replaced_tokens = 0

    def __missing__(self, word: str) -> int:
        self.unk_tokens += 1
        self.replaced_tokens += word != SPECIAL_SYMBOLS[Dictionary.unk_index]
        return Dictionary.unk_index


@lru_cache(maxsize=1)
def _known_words(dictionary: Path) -> dict[str, int]:
    """The dictionary of this run, which a worker reads once."""
    indices = Dictionary.load(dictionary).indices
    return {word: index for word, index in indices.items() if index != Dictionary.unk_index}


def encode(text: ByteRange, dictionary: Path, num_types: int, part: Path) -> SplitCounts:
    """Write the tokens of a range to `PART.bin`, and the number of tokens of each line to `PART.sizes`."""
    lookup = _Lookup(_known_words(dictionary))
    tokens: list[int] = []
    sizes: list[int] = []
    for line in read_text_lines(text):
        words = line.split()
        # One call in C for a whole line: this loop is where a run spends its time.
        tokens += map(lookup.__getitem__, words)
        tokens.append(Dictionary.eos_index)
        sizes.append(len(words) + 1)
    with write_part(bin_path(part)) as stream:
        stream.write(little_endian(token_typecode(num_types), tokens))
    with write_part(sizes_path(part)) as stream:
        stream.write(little_endian("i", sizes))
    return SplitCounts(len(sizes), len(tokens), lookup.unk_tokens, lookup.replaced_tokens)


def sizes_path(part: Path) -> Path:
    """`PART.sizes`."""
    return Path(f"{part}.sizes")


def assemble(parts: Sequence[Path], prefix: Path, num_types: int) -> None:
    """Join the parts of a split into `PREFIX.bin` and `PREFIX.idx`, flushed to the disk."""
    with open(bin_path(prefix), "wb") as tokens:
        join_parts(map(bin_path, parts), tokens)
    with open(sizes_path(prefix), "wb") as sizes:
        join_parts(map(sizes_path, parts), sizes)
    with open(idx_path(prefix), "wb") as index:
        write_index(index, sizes_path(prefix), token_typecode(num_types))
    for output in (bin_path(prefix), idx_path(prefix)):
        fsync_file(output)
