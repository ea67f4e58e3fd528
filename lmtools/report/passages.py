"""Tokens of a passage as text to read, each with its surprisal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmtools.data.blocks import Tokens
from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.breakdown import LogProbs, Passage
from lmtools.evaluate.perplexity import nats_to_bits
from lmtools.preprocess.codec import BpeCodec, Codec, WordCodec, is_bpe
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary

NUM_SHADES = 10
BITS_PER_SHADE = 2

_MOST_TOKENS_OF_A_CHARACTER = 4
_PICTURES = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421}
"""Control characters as Unicode's pictures of them, since they may do anything to a page."""


@dataclass(frozen=True)
class Piece:
    """A token, or the tokens that make up one character.

    Attributes:
        text: to read; `↵` for the end of a line.
        bits: surprisal, summed; None before the passage.
        ends_line: whether a new line begins after it.
    """

    text: str
    bits: float | None
    ends_line: bool = False

    @property
    def shade(self) -> int | None:
        """0 for up to 2 bits, to 9 for 18 and more."""
        return None if self.bits is None else min(int(max(self.bits, 0.0) / BITS_PER_SHADE), NUM_SHADES - 1)


@dataclass(frozen=True)
class ShownPassage:
    """A passage with some of what stands before it."""

    passage: Passage
    pieces: Sequence[Piece]


def open_codec(dictionary: Dictionary) -> Codec:
    """Words as they are, or GPT-2's BPE where the dictionary's words are its ids."""
    if not is_bpe(dictionary):
        return WordCodec(dictionary)
    return BpeCodec(dictionary, read_vocabulary(find_vocabulary(None, None)))


def show(passage: Passage, tokens: Tokens, log_probs: LogProbs, codec: Codec, *, num_before: int) -> ShownPassage:
    """Make a passage readable.

    Args:
        passage: where it is.
        tokens: the whole stream.
        log_probs: of the whole stream.
        codec: of the dictionary.
        num_before: how many tokens before it are shown too, without a surprisal.
    """
    start = max(passage.start - num_before, 0)
    before = [
        Piece(piece.text, None, piece.ends_line) for piece in _pieces(tokens, log_probs, codec, start, passage.start)
    ]
    return ShownPassage(passage, [*before, *_pieces(tokens, log_probs, codec, passage.start, passage.end)])


def _pieces(tokens: Tokens, log_probs: LogProbs, codec: Codec, start: int, end: int) -> list[Piece]:
    pieces = []
    while start < end:
        # As few tokens as make up whole characters; one alone where none do.
        stops = range(start + 1, min(end, start + _MOST_TOKENS_OF_A_CHARACTER) + 1)
        stop = next((stop for stop in stops if _is_whole(codec.decode(tokens[start:stop].tolist()))), start + 1)
        indices = tokens[start:stop].tolist()
        bits = nats_to_bits(-float(log_probs[start:stop].sum(dtype="float64")))
        pieces.append(_piece(indices, bits, codec))
        start = stop
    return pieces


def _is_whole(text: str) -> bool:
    """Whether no character was cut in two."""
    return "\N{REPLACEMENT CHARACTER}" not in text


def _piece(indices: Sequence[int], bits: float, codec: Codec) -> Piece:
    if indices[0] == Dictionary.eos_index:
        return Piece("↵", bits, ends_line=True)
    text = codec.decode(indices) or codec.token(indices[0])
    if isinstance(codec, WordCodec):
        text += " "
    return Piece(text.translate(_PICTURES), bits)
