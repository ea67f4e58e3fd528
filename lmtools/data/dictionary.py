"""fairseq's dict.txt: which word has which index.

The file has one row `WORD COUNT` per type, in index order, UTF-8. The four special symbols come before the first
row and are not in the file, so its row r (counted from 0) has index r + 4:

    index 0  <s>     bos, begins a sequence
    index 1  <pad>   fills up a batch
    index 2  </s>    eos, ends every line
    index 3  <unk>   stands for every word that is not in the dictionary
    index 4  the word of the first row, and so on

A word may contain spaces (the count is what follows the last one). A row that ends in ` #fairseq:overwrite` may
name a word again, or a special symbol: the earlier index stays, but from then on the word means the later one.
A built dictionary is ordered by falling count, words of equal count by code point, and is padded with
`madeupword0000`, `madeupword0001` ... of count 0 to a multiple of 8.

Source: fairseq, `fairseq/data/dictionary.py`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

from lmtools.errors import DataError
from lmtools.files import atomic_write, open_binary

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")

_OVERWRITE = "#fairseq:overwrite"
_LFS_POINTER = "version https://git-lfs.github.com/spec/"


class Dictionary:
    """An immutable dictionary.

    Attributes:
        symbols: the symbol of every index, the special ones included.
        counts: how often each was seen when the dictionary was built; 1 for the special symbols, as in fairseq.
        indices: the index of every symbol.
    """

    bos_index = 0
    pad_index = 1
    eos_index = 2
    unk_index = 3

    def __init__(self, words: Sequence[str], counts: Sequence[int]) -> None:
        """Lay out the special symbols, then `words` in order; a word that comes again takes the later index."""
        self.symbols: Sequence[str] = (*SPECIAL_SYMBOLS, *words)
        self.counts: Sequence[int] = (*[1] * len(SPECIAL_SYMBOLS), *counts)
        self.indices: Mapping[str, int] = MappingProxyType({word: index for index, word in enumerate(self.symbols)})

    def __len__(self) -> int:
        return len(self.symbols)

    def __contains__(self, word: str) -> bool:
        return word in self.indices

    def index(self, word: str) -> int:
        """The index of `word`, or that of `<unk>`."""
        return self.indices.get(word, self.unk_index)

    @classmethod
    def load(cls, path: str | Path) -> Dictionary:
        """Read a dict.txt (or a compressed one).

        Raises:
            DataError: no such file, not UTF-8, a Git LFS pointer, a row that is not `WORD COUNT`, a word or a special
                symbol named twice without the overwrite flag, or no row at all; with `path:line`.
        """
        with open_binary(path) as stream:
            content = stream.read()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise DataError(f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})") from error
        rows = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        if not text:
            raise DataError(f"{path}: the dictionary is empty, expected rows 'WORD COUNT'")
        if rows[0].startswith(_LFS_POINTER):
            raise DataError(
                f"{path}:1: a Git LFS pointer instead of the dictionary; run `git lfs pull` to fetch the file"
            )
        return cls._parse(rows, path)

    @classmethod
    def _parse(cls, rows: Sequence[str], path: str | Path) -> Dictionary:
        first_line: dict[str, int] = dict.fromkeys(SPECIAL_SYMBOLS, 0)
        words: list[str] = []
        counts: list[int] = []
        for line, row in enumerate(rows, start=1):
            fields = row.rstrip().rsplit(" ", 1)
            overwrite = len(fields) == 2 and fields[1] == _OVERWRITE
            if overwrite:
                fields = fields[0].rsplit(" ", 1)
            try:
                word, count = fields[0], int(fields[1])
            except (IndexError, ValueError) as error:
                raise DataError(f"{path}:{line}: expected 'WORD COUNT', found {row[:80]!r}") from error
            if word in first_line and not overwrite:
                raise DataError(f"{path}:{line}: {_named_twice(word, first_line[word])}")
            first_line.setdefault(word, line)
            words.append(word)
            counts.append(count)
        return cls(words, counts)

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, threshold: int = 0, nwords: int = -1, padding_factor: int = 8
    ) -> Dictionary:
        """Build a dictionary exactly as fairseq's `finalize` does.

        Args:
            counts: how often each word was seen, in any order; special symbols among them are left out.
            threshold: a word seen less often is left out.
            nwords: the most types to keep, the four special symbols included but not the padding; 0 or less keeps all.
            padding_factor: the number of types is padded to a multiple of this.
        """
        kept = sorted((w, n) for w, n in counts.items() if n >= threshold and w not in SPECIAL_SYMBOLS)
        kept.sort(key=itemgetter(1), reverse=True)  # a stable sort: words of equal count stay in code point order
        if nwords > 0:
            del kept[max(nwords - len(SPECIAL_SYMBOLS), 0) :]
        words = [word for word, _ in kept]
        present = set(words)
        number = 0
        while padding_factor > 1 and (len(SPECIAL_SYMBOLS) + len(words)) % padding_factor:
            symbol = f"madeupword{number:04d}"
            if symbol not in present:
                words.append(symbol)
            number += 1
        return cls(words, [count for _, count in kept] + [0] * (len(words) - len(kept)))

    def padded(self, num_types: int) -> Dictionary:
        """The same dictionary with as many types as an embedding has rows, as fairseq's `pad_to_multiple_` makes it.

        Args:
            num_types: how many, no fewer than there are.
        """
        words = list(self.symbols[len(SPECIAL_SYMBOLS) :])
        counts = list(self.counts[len(SPECIAL_SYMBOLS) :])
        names = (name for number in itertools.count() if (name := f"madeupword{number:04d}") not in self)
        added = list(itertools.islice(names, max(num_types - len(self), 0)))
        return Dictionary(words + added, counts + [0] * len(added))

    def to_bytes(self) -> bytes:
        """The content of dict.txt.

        A word that comes again gets its overwrite flag; fairseq leaves it out and cannot read the file back.
        """
        rows = []
        seen = set(SPECIAL_SYMBOLS)
        first = len(SPECIAL_SYMBOLS)
        for word, count in zip(self.symbols[first:], self.counts[first:], strict=True):
            rows.append(f"{word} {count} {_OVERWRITE}\n" if word in seen else f"{word} {count}\n")
            seen.add(word)
        return "".join(rows).encode("utf-8")

    def save(self, path: str | Path) -> None:
        """Write dict.txt (complete or absent)."""
        with atomic_write(path) as stream:
            stream.write(self.to_bytes())

    @property
    def sha256(self) -> str:
        """The hex sha256 of dict.txt as `save` writes it: equal for two dictionaries that give every word one index."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def _named_twice(word: str, first_line: int) -> str:
    if word in SPECIAL_SYMBOLS:
        return f"{word!r} is a special symbol, which every dictionary has before its first row; remove this row"
    return f"the word {word!r} is already in line {first_line}; remove one, or end this row with ' {_OVERWRITE}'"
