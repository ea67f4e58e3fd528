"""A few lines of text to the dictionary's indices and back: what a person types to a model, and what it answers.

Files go through `bpe.py` and `binarize.py`; a line gives the same indices here, without the end of sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from lmtools.data.dictionary import Dictionary
from lmtools.errors import ConfigError, DataError
from lmtools.preprocess.gpt2_vocabulary import Vocabulary

_UNWORDED = re.compile(r"<s>|<pad>|</s>|madeupword\d+")
"""Symbols that stand for no text: fairseq's padding of dictionaries, and special symbols but `<unk>`."""


class Codec(Protocol):
    """Between text and indices.

    Attributes:
        known: the indices that stand for some text.
    """

    known: list[int]

    def encode(self, text: str) -> list[int]:
        """The indices of a text, white space at its ends and all; an empty one has none.

        Raises:
            DataError: it has something that no index stands for.
        """

    def decode(self, indices: Sequence[int]) -> str:
        """The text of indices; special symbols but `<unk>` have none."""

    def token(self, index: int) -> str:
        """One index, for a person to read."""


class WordCodec:
    """Text whose words, between white space, are the dictionary's."""

    def __init__(
        self,
        dictionary: Dictionary,
        *,
        on_unknown: Callable[[str], None] | None = None,
        spellings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Words of a dictionary.

        Args:
            dictionary: which words there are.
            on_unknown: called with each other word, which is then read as `<unk>`; without it such a word is refused.
            spellings: the dictionary's words for some that are written otherwise.
        """
        self._dictionary = dictionary
        self._on_unknown = on_unknown
        self._spellings = spellings
        self.known = [index for index, word in enumerate(dictionary.symbols) if not _UNWORDED.fullmatch(word)]

    def encode(self, text: str) -> list[int]:
        """See `Codec`."""
        words = [self._spellings.get(word, word) for word in text.split()]
        for word in words:
            if word in self._dictionary:
                continue
            if self._on_unknown is not None:
                self._on_unknown(word)
            else:
                raise DataError(f"the word {word!r} is not in the dictionary; take another, or write <unk> for it")
        return [self._dictionary.index(word) for word in words]

    def decode(self, indices: Sequence[int]) -> str:
        """See `Codec`."""
        words = [self._dictionary.symbols[index] for index in indices]
        return " ".join(word for word in words if not _UNWORDED.fullmatch(word))

    def token(self, index: int) -> str:
        """See `Codec`."""
        return self._dictionary.symbols[index]


class RowsCodec:
    """The text of another codec, whose indices are words of a model that has them in another order."""

    def __init__(self, codec: Codec, rows: Sequence[int]) -> None:
        """Rows instead of indices.

        Args:
            codec: between text and indices.
            rows: the model's row for each index, -1 where it has none.
        """
        self._codec = codec
        self._rows = rows
        self._indices = {row: index for index, row in enumerate(rows) if row >= 0}
        self.known = [rows[index] for index in codec.known]

    def encode(self, text: str) -> list[int]:
        """See `Codec`."""
        return [self._rows[index] for index in self._codec.encode(text)]

    def decode(self, indices: Sequence[int]) -> str:
        """See `Codec`."""
        return self._codec.decode([self._indices[row] for row in indices])

    def token(self, index: int) -> str:
        """See `Codec`."""
        return self._codec.token(self._indices[index])


class BpeCodec:
    """Text as GPT-2's BPE, whose ids are the dictionary's words."""

    def __init__(self, dictionary: Dictionary, vocabulary: Vocabulary) -> None:
        from lmtools.preprocess.bpe_encoder import Encoder

        self._dictionary = dictionary
        self._encode_text = Encoder(vocabulary).encode_text
        bytes_of_id = {str(id_): token for token, id_ in vocabulary.ids.items()} | {"<unk>": b"<unk>"}
        self._bytes = {index: bytes_of_id[word] for index, word in enumerate(dictionary.symbols) if word in bytes_of_id}
        self.known = list(self._bytes)

    def encode(self, text: str) -> list[int]:
        """See `Codec`."""
        ids = self._encode_text(text).decode("ascii").split()
        for id_ in ids:
            if id_ not in self._dictionary:
                raise DataError(
                    f"the BPE token {id_} is not in the dictionary; take other words, or give --bpe none if the prompt "
                    "is encoded already"
                )
        return [self._dictionary.index(id_) for id_ in ids]

    def decode(self, indices: Sequence[int]) -> str:
        """See `Codec`. Bytes that are no UTF-8, of a character whose tokens are not all there, become U+FFFD."""
        return b"".join(self._bytes.get(index, b"") for index in indices).decode("utf-8", "replace")

    def token(self, index: int) -> str:
        """See `Codec`."""
        return self.decode([index]) if index in self._bytes else self._dictionary.symbols[index]


class TokenizerCodec:
    """Text as a Hugging Face tokenizer.json cuts it."""

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        """Open a tokenizer.json.

        Args:
            path: the file.
            vocab_size: rows of the model; a token beyond them is unknown.

        Raises:
            ConfigError: the package `tokenizers` is not installed.
            DataError: the file is missing or broken.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"{path}: needs the package tokenizers; run `pip install 'lmtools[hf]'`") from error
        if not path.is_file():
            raise DataError(f"{path}: no such file; the model's tokenizer is expected beside it")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower kind
            raise DataError(f"{path}: not a tokenizer.json ({error})") from error
        special = {id_ for id_, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        ids = self._tokenizer.get_vocab().values()
        self.known = sorted(id_ for id_ in ids if id_ < vocab_size and id_ not in special)

    def encode(self, text: str) -> list[int]:
        """See `Codec`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, indices: Sequence[int]) -> str:
        """See `Codec`."""
        return str(self._tokenizer.decode(list(indices), skip_special_tokens=True))

    def token(self, index: int) -> str:
        """See `Codec`."""
        return str(self._tokenizer.decode([index], skip_special_tokens=False))


def encode_prompt(codec: Codec, text: str) -> list[int]:
    """The indices of a prompt, without white space at its ends, as `bpe-encode` leaves it out.

    Raises:
        DataError: it is empty, or has something that no index stands for.
    """
    if not text.strip():
        raise DataError("is empty; a prompt has at least one word")
    return codec.encode(text.strip())


def decode_lines(codec: Codec, indices: Sequence[int], eos_index: int) -> str:
    """The text of indices, with a newline for each end of sentence."""
    lines: list[list[int]] = [[]]
    for index in indices:
        if index == eos_index:
            lines.append([])
        else:
            lines[-1].append(index)
    return "\n".join(map(codec.decode, lines))


def is_bpe(dictionary: Dictionary) -> bool:
    """Whether a dictionary is of BPE ids: every word that is no padding is a number."""
    words = [word for word in dictionary.symbols if word != "<unk>" and not _UNWORDED.fullmatch(word)]
    return all(word.isascii() and word.isdecimal() for word in words)
