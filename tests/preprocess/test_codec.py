"""A prompt has the indices that its line has in a binarized file, and they decode to its text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.dictionary import Dictionary
from lmtools.errors import DataError
from lmtools.preprocess.codec import BpeCodec, WordCodec, encode_prompt, is_bpe
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary

GOLDEN = Path(__file__).parents[1] / "golden"
GPT2 = read_vocabulary(find_vocabulary(None, None))
WHOLE = Dictionary([str(id_) for id_ in reversed(range(50257))] + ["madeupword0000"], [1] * 50258)
BPE = BpeCodec(WHOLE, GPT2)
WORDS = WordCodec(Dictionary.load(GOLDEN / "bin" / "dict.txt"))


def test_golden_lines_become_fairseqs_ids():
    texts = (GOLDEN / "train.txt").read_text("utf-8").split("\n")
    texts = [text for text in texts if text.strip()]
    lines = (GOLDEN / "train.bpe").read_text().splitlines()
    assert len(texts) == len(lines)
    for text, line in zip(texts, lines, strict=True):
        indices = encode_prompt(BPE, text)
        assert [WHOLE.symbols[index] for index in indices] == line.split()
        assert BPE.decode(indices) == text.strip()


@given(st.text())
def test_any_text_survives(text):
    assert BPE.decode(BPE.encode(text)) == text
    if text.strip():
        assert BPE.decode(encode_prompt(BPE, text)) == text.strip()


def test_special_symbols_have_no_text_but_unk():
    assert BPE.decode([2, *BPE.encode("a b"), 3, 2, 50261]) == "a b<unk>"
    assert WORDS.decode([2, 4, 3, 5, 2]) == "and <unk> ="
    for codec in (BPE, WORDS):
        assert {0, 1, 2} & set(codec.known) == set()
        assert 3 in codec.known
    assert set(BPE.known) == {3, *range(4, 50261)}, "fairseq's padding stands for nothing"
    assert (BPE.token(2), WORDS.token(2), WORDS.token(4)) == ("</s>", "</s>", "and")


def test_half_a_character():
    indices = BPE.encode("ॐ")
    assert len(indices) > 1
    assert BPE.decode(indices[:-1]).endswith("\ufffd")


def test_words():
    assert WORDS.encode("  and =\tand ") == [4, 5, 4]
    assert WORDS.encode("and <unk>") == [4, 3]


@pytest.mark.parametrize("codec", [BPE, WORDS], ids=["BPE", "words"])
def test_nothing_is_no_prompt(codec):
    assert codec.encode("") == []
    with pytest.raises(DataError, match="is empty"):
        encode_prompt(codec, " \t ")


def test_what_is_not_in_the_dictionary_is_refused():
    with pytest.raises(DataError, match=r"^the word 'zebra' is not in the dictionary"):
        WORDS.encode("and zebra")
    with pytest.raises(DataError, match=r"^the BPE token 257 is not in the dictionary"):
        BpeCodec(Dictionary(["65", "220"], [1]), GPT2).encode("b a")


def test_unknown_words_may_be_read_as_unk():
    unknown: list[str] = []
    codec = WordCodec(Dictionary.load(GOLDEN / "bin" / "dict.txt"), on_unknown=unknown.append)
    assert codec.encode("and zebra <unk> = gnu") == [4, 3, 3, 5, 3]
    assert unknown == ["zebra", "gnu"]


def test_a_dictionary_of_numbers_is_of_bpe_ids():
    assert is_bpe(WHOLE)
    assert not is_bpe(Dictionary(["65", "the"], [1, 1]))
    assert not is_bpe(Dictionary(["²"], [1]))
