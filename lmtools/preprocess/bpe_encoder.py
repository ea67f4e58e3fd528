"""GPT-2 BPE of whole lines, fast: the same ids as `bpe_reference.py`.

Three things make it so:

1. A space that stands between two words always begins a new piece, so a line is cut at its spaces by `bytes.split` and
   each word is encoded alone. Where a space stands beside other white space that need not be so; such a line is
   split as a whole by GPT-2's regular expression.
2. A word that was seen before is looked up, and so are the pieces of a new one; what is stored is the text of their
   ids. Text repeats itself; text that does not costs time, not memory: a table is emptied when it is full.
3. Merging is tiktoken's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tiktoken

from lmtools.preprocess.bpe_reference import SPLIT
from lmtools.preprocess.gpt2_vocabulary import Vocabulary

Text = TypeVar("Text", bound=bytes | str)

_MAX_ENTRIES = 1 << 17
_MAX_LENGTH = 32  # longer words are rare, and not kept: a full table of words takes 50 MB at most


class Encoder:
    """Encodes lines of text with one vocabulary.

    Args:
        vocabulary: one whose every token's own bytes merge back to it, as GPT-2's do. tiktoken merges two neighbours
            when their joined bytes are a token, GPT-2 when the very pair is in its list; then they agree.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in vocabulary.merges]
        self._ids = [b"%d" % vocabulary.ids[token] for token in tokens]
        # tiktoken is given one piece at a time, so its own pattern takes all of it.
        self._tiktoken = tiktoken.Encoding(
            "one-piece",
            pat_str=r"(?s:.+)",
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={},
        )
        self._pieces = _Memo(self._encode_piece)
        self._first_words: _Memo[bytes] = _Memo(lambda word: self._encode_word(word, prefix=""))
        self._later_words: _Memo[bytes] = _Memo(lambda word: self._encode_word(word, prefix=" "))

    def encode_line(self, line: str) -> bytes:
        """The ids of a line without white space at its ends, as decimal numbers with a space between them."""
        if not line:
            return b""
        if "   " in line:
            return self.encode_text(line)
        first, space, rest = line.encode("utf-8").partition(b" ")
        try:
            if not space:
                return self._first_words[first]
            return self._first_words[first] + b" " + b" ".join(map(self._later_words.__getitem__, rest.split(b" ")))
        except _OtherWhiteSpaceError:
            return self.encode_text(line)

    def encode_text(self, text: str) -> bytes:
        """The ids of any text, in the same form."""
        return b" ".join([self._pieces[piece] for piece in SPLIT.findall(text)])

    def _encode_word(self, key: bytes, *, prefix: str) -> bytes:
        if key.isalpha():  # ASCII letters alone, as bytes have no others: one piece
            return self._encode_piece(prefix + key.decode("ascii"))
        # An empty word is what stands between two spaces, of which the first is a piece (never are there three here).
        word = key.decode("utf-8")
        if word != word.strip():
            raise _OtherWhiteSpaceError
        return self.encode_text(prefix + word)

    def _encode_piece(self, piece: str) -> bytes:
        return b" ".join([self._ids[rank] for rank in self._tiktoken.encode_ordinary(piece)])


class _OtherWhiteSpaceError(Exception):
    """A word begins or ends with white space other than the space: its line may not be cut there."""


class _Memo(dict[Text, bytes]):
    """Results of a function, computed where they are lacking; bounded in number and size."""

    def __init__(self, compute: Callable[[Text], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: Text) -> bytes:
        result = self._compute(key)
        if len(key) <= _MAX_LENGTH:
            if len(self) >= _MAX_ENTRIES:
                self.clear()
            self[key] = result
        return result
