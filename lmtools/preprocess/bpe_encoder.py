"""GPT-2 BPE of whole lines, fast: the same ids as `bpe_reference.py`.

Three things make it so:

1. A space that stands between two words always begins a new piece, so a line is cut at its spaces by `bytes.split` and
   each word is encoded alone. Where a space stands beside other white space that need not be so; such a line is
   split as a whole by GPT-2's regular expression.
2. A word that was seen before is looked up, and what is stored is the text of its ids. Text repeats its words; text
   that does not costs time, not memory: the tables are emptied when they are full.
3. Merging is tiktoken's.
"""

from __future__ import annotations

import tiktoken

from lmtools.preprocess.bpe_reference import SPLIT
from lmtools.preprocess.gpt2_vocabulary import Vocabulary

_MAX_WORDS = 1 << 17
_MAX_WORD_BYTES = 64  # longer ones are rare, and not kept: with these bounds a table takes less than 64 MiB


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
        self._first_words = _Words(self, prefix="")
        self._later_words = _Words(self, prefix=" ")

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
        encode = self._tiktoken.encode_ordinary
        return b" ".join([self._ids[rank] for piece in SPLIT.findall(text) for rank in encode(piece)])


class _OtherWhiteSpaceError(Exception):
    """A word begins or ends with white space other than the space: its line may not be cut there."""


class _Words(dict[bytes, bytes]):
    """The ids of words, each behind the same prefix; computes what it lacks.

    The empty word stands between two spaces, of which the first is a piece of its own (there are no three in a row).
    """

    def __init__(self, encoder: Encoder, *, prefix: str) -> None:
        super().__init__()
        self._encoder = encoder
        self._prefix = prefix

    def __missing__(self, key: bytes) -> bytes:
        word = key.decode("utf-8")
        if word != word.strip():
            raise _OtherWhiteSpaceError
        ids = self._encoder.encode_text(self._prefix + word)
        if len(key) <= _MAX_WORD_BYTES:
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[key] = ids
        return ids
