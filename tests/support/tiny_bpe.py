"""Byte-level BPE vocabularies small enough to write down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lmtools.preprocess.gpt2_vocabulary import Merge, VocabularyFiles, find_vocabulary


def write_vocabulary(folder: Path, *, merges: Sequence[Merge], first_id: int = 1000) -> VocabularyFiles:
    """Write encoder.json and vocab.bpe with these merges; ids count up from the last token to the first."""
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    ids = {_spell(token): first_id + number for number, token in enumerate(reversed(tokens))}
    ids["<|endoftext|>"] = 0
    (folder / "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{_spell(left)} {_spell(right)}" for left, right in merges)]
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return find_vocabulary(str(folder / "encoder.json"), str(folder / "vocab.bpe"))


def character_of(byte: int) -> str:
    """The character that stands for a byte, by OpenAI's rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [other for other in range(256) if other not in printable].index(byte))


def _spell(token: bytes) -> str:
    return "".join(map(character_of, token))
