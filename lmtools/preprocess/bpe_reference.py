"""Byte-level BPE as GPT-2 defines it, written to be read: the measure of what `bpe.py` does fast.

Source: OpenAI's encoder.py (https://github.com/openai/gpt-2); the algorithm is that of Sennrich et al. 2016,
"Neural Machine Translation of Rare Words with Subword Units", on bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import regex

from lmtools.errors import DataError
from lmtools.preprocess.gpt2_vocabulary import Merge, Vocabulary, VocabularyFiles

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""What a text is cut into before BPE: words, numbers and the rest, each with the space before it."""


def encode(text: str, ids: Mapping[bytes, int], ranks: Mapping[Merge, int]) -> list[int]:
    """The ids of a text. What looks like a special token is ordinary text."""
    return [ids[token] for piece in SPLIT.findall(text) for token in merge(piece.encode("utf-8"), ranks)]


def rank_merges(vocabulary: Vocabulary) -> dict[Merge, int]:
    """The place of each merge in their order."""
    return {merge: rank for rank, merge in enumerate(vocabulary.merges)}


def merge(piece: bytes, ranks: Mapping[Merge, int]) -> list[bytes]:
    """Cut a piece into tokens: of all neighbours that can be merged, always those that come first in the order."""
    tokens = [bytes([byte]) for byte in piece]
    while candidates := [pair for pair in itertools.pairwise(tokens) if pair in ranks]:
        first = min(candidates, key=ranks.__getitem__)
        tokens = list(_merge_everywhere(tokens, first))
    return tokens


def _merge_everywhere(tokens: list[bytes], pair: Merge) -> Iterator[bytes]:
    """Merge each occurrence of a pair, from left to right."""
    index = 0
    while index < len(tokens):
        if tuple(tokens[index : index + 2]) == pair:
            yield pair[0] + pair[1]
            index += 2
        else:
            yield tokens[index]
            index += 1


def check_rebuilds(vocabulary: Vocabulary, files: VocabularyFiles) -> None:
    """Refuse a vocabulary with a token whose own bytes do not merge back to it, as training BPE never gives.

    Raises:
        DataError: names the first such token.
    """
    ranks = rank_merges(vocabulary)
    for line, (left, right) in enumerate(vocabulary.merges, start=2):
        if (tokens := merge(left + right, ranks)) != [left + right]:
            raise DataError(
                f"{files.vocab_bpe}:{line}: makes the token {left + right!r}, but its bytes merge to {tokens!r}; "
                "the lines are not in the order in which training found them"
            )
