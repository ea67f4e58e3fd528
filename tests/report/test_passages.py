"""Tokens as text to read: characters whole, words apart, nothing that acts on a page."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.breakdown import Passage
from lmtools.report.passages import Piece, open_codec, show

LN2 = math.log(2)


def pieces_of(words, tokens, bits, *, start=0, num_before=0):
    dictionary = Dictionary(words, [1] * len(words))
    log_probs = -np.array(bits, dtype=np.float64) * LN2
    passage = Passage(start, len(tokens), 0.0)
    return show(passage, np.array(tokens), log_probs, open_codec(dictionary), num_before=num_before).pieces


def test_words_stand_apart_and_lines_end():
    pieces = pieces_of(["the", "cat"], [4, 5, 2, 3], [1, 2, 4, 8])
    assert [(piece.text, piece.ends_line) for piece in pieces] == [
        ("the ", False),
        ("cat ", False),
        ("↵", True),
        ("<unk> ", False),
    ]
    assert [piece.bits for piece in pieces] == pytest.approx([1, 2, 4, 8])


def test_what_stands_before_has_no_surprisal():
    pieces = pieces_of(["a", "b"], [4, 5, 4, 5], [1, 2, 3, 4], start=2, num_before=1)
    assert [piece.text for piece in pieces] == ["b ", "a ", "b "]
    assert pieces[0].bits is None
    assert pieces[0].shade is None


def test_bpe_is_read_as_text():
    pieces = pieces_of(["464", "3797"], [4, 5, 2], [1, 2, 3])
    assert [piece.text for piece in pieces] == ["The", " cat", "↵"]


def test_tokens_that_make_up_one_character_are_one_piece_with_the_sum_of_their_bits():
    """U+1F600 is 47249, 222 in GPT-2's BPE: neither is text by itself."""
    pieces = pieces_of(["464", "47249", "222"], [4, 5, 6, 4], [1, 2, 4, 1])
    assert [piece.text for piece in pieces] == ["The", "😀", "The"]
    assert pieces[1].bits == pytest.approx(6)


def test_a_character_that_is_cut_off_is_shown_as_such():
    pieces = pieces_of(["464", "47249", "222"], [5, 4, 4, 5], [1, 1, 1, 1])
    assert [piece.text for piece in pieces] == ["\ufffd", "The", "The", "\ufffd"]


def test_control_characters_become_pictures():
    pieces = pieces_of(["\x1b[31m", "a\x7f"], [4, 5], [1, 1])
    assert [piece.text for piece in pieces] == ["␛[31m ", "a␡ "]


@pytest.mark.parametrize(("bits", "shade"), [(0, 0), (-1e-9, 0), (1.99, 0), (2, 1), (17.9, 8), (18, 9), (500, 9)])
def test_shades_are_2_bits_wide(bits, shade):
    assert Piece("x", bits).shade == shade
