"""The fast encoder gives what the reference gives, whatever the text, in bounded memory and time."""

from __future__ import annotations

import random
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmtools.preprocess import bpe_encoder, bpe_reference
from lmtools.preprocess.bpe_encoder import Encoder
from lmtools.preprocess.gpt2_vocabulary import Vocabulary, find_vocabulary, read_vocabulary
from tests.support.tiny_bpe import write_vocabulary

Encode = Callable[[str], bytes]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(read_vocabulary(find_vocabulary(None, None)))


@pytest.fixture(scope="module")
def reference() -> Encode:
    vocabulary = read_vocabulary(find_vocabulary(None, None))
    ranks = bpe_reference.rank_merges(vocabulary)
    return lambda text: " ".join(map(str, bpe_reference.encode(text, vocabulary.ids, ranks))).encode()


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        ("", b""),
        ("Hello world", b"15496 995"),
        ("Hello  world!", b"15496 220 995 0"),
        ("it's the '90s", b"270 338 262 705 3829 82"),
        ("<|endoftext|>", b"27 91 437 1659 5239 91 29"),  # ordinary text, as in fairseq
        ("naïve 日本", b"2616 38776 10545 245 98 17312 105"),
    ],
)
def test_known_ids(encoder: Encoder, reference: Encode, line: str, ids: bytes) -> None:
    assert encoder.encode_line(line) == ids
    assert reference(line) == ids


# Whatever may decide where a piece ends: spaces of every kind, letters, digits, contractions, marks.
words = [
    "a",
    "Bc",
    "the",
    "é",
    "é",
    "日本",
    "ß",
    "1",
    "٣",
    "²",
    "Ⅷ",
    "'",
    "'s",
    "'ll",
    "'S",
    "-",
    "—",
    "!?",
    "😀",
    "\u200d",
    "\ufeff",
    "�",
    "\x00",
    "<|endoftext|>",
]
white_space = [" ", "  ", "   ", "    ", *"\t\r\x0b\x1c\x1f\x85\xa0\u2003\u2028\u3000\u200b"]
fragments = st.sampled_from([*words, *white_space])


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(fragments, st.text(max_size=4)), max_size=14).map("".join))
@example("a   b")
@example("a \xa0 \xa0 b")
@example("a\xa0\xa0 b  c")
def test_any_line_is_encoded_as_by_the_reference(encoder: Encoder, reference: Encode, line: str) -> None:
    line = line.strip()
    expected = reference(line)
    assert encoder.encode_line(line) == expected
    assert encoder.encode_line(line) == expected  # from the tables
    assert encoder.encode_text(line) == expected


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Joins what GPT-2's own merges never do: white space, letters with digits and signs. A cut too many would show."""
    no_break, wide = "\xa0".encode(), "\u3000".encode()
    merges = [(b" ", b" "), (b"  ", b" "), (b"\t", b" "), (b" ", b"\t"), (b"\xc2", b"\xa0"), (b" ", no_break)]
    merges += [(no_break, b" "), (no_break, no_break), (b"\xe3", b"\x80"), (b"\xe3\x80", b"\x80"), (wide, b" ")]
    merges += [(b"a", b"1"), (b"1", b"a"), (b" ", b"a"), (b"a", b"'"), (b"'", b"s"), (b".", b"a"), (b"a", b".")]
    return read_vocabulary(write_vocabulary(tmp_path_factory.mktemp("greedy"), merges=merges))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "1", "'", "s", ".", " ", "  ", "\t", "\xa0", "\u3000"]), max_size=12).map("".join)
)
@example("a   a")
@example("a \xa0a")
@example("a\xa0 a")
def test_no_line_is_cut_where_a_piece_goes_on(greedy: Vocabulary, line: str) -> None:
    line = line.strip()
    expected = bpe_reference.encode(line, greedy.ids, bpe_reference.rank_merges(greedy))
    assert Encoder(greedy).encode_line(line) == b" ".join(b"%d" % id_ for id_ in expected)


def test_every_character_is_cut_as_by_the_reference(encoder: Encoder, reference: Encode) -> None:
    # All of Unicode would take a minute; every category and every range that holds white space takes a second.
    characters = [chr(code) for code in range(0x3100) if unicodedata.category(chr(code)) != "Cs"]
    characters += [chr(code) for code in range(0x3100, 0x110000, 997) if unicodedata.category(chr(code)) != "Cs"]
    for character in characters:
        line = f"a{character}b {character}{character} 1{character}2 {character}x".strip()
        assert encoder.encode_line(line) == reference(line), f"U+{ord(character):04X}"


def test_ids_need_not_be_in_the_order_of_the_merges(tmp_path: Path) -> None:
    files = write_vocabulary(tmp_path, merges=[(b"a", b"b"), (b" ", b"ab"), (b"ab", b"c")], first_id=7000)
    vocabulary = read_vocabulary(files)
    line = "ab abc abcab"
    expected = bpe_reference.encode(line, vocabulary.ids, bpe_reference.rank_merges(vocabulary))

    assert Encoder(vocabulary).encode_line(line) == b" ".join(b"%d" % id_ for id_ in expected)
    assert [vocabulary.ids[b"ab"], vocabulary.ids[b" ab"]] == expected[:2]


def test_the_tables_are_bounded(reference: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_encoder, "_MAX_ENTRIES", 50)
    encoder = Encoder(read_vocabulary(find_vocabulary(None, None)))
    generator = random.Random(1)
    for _ in range(100):
        line = " ".join("".join(generator.choices("abcdef", k=generator.randrange(1, 50))) for _ in range(9))
        assert encoder.encode_line(line) == reference(line)
        for table in (encoder._first_words, encoder._later_words, encoder._pieces):
            assert len(table) <= 50
            assert all(len(word) <= 32 for word in table)


@pytest.mark.parametrize("part", ["x", "abcdefghij", "é", "^", " ", "\t"])
def test_a_long_word_takes_no_more_than_seconds(encoder: Encoder, part: str) -> None:
    begin = time.process_time()
    assert encoder.encode_line(f"a{(part * 300_000)[:300_000]}b")
    assert time.process_time() - begin < 10


def test_a_long_word_is_encoded_as_by_the_reference(encoder: Encoder, reference: Encode) -> None:
    line = "".join(random.Random(1).choices("abcdefgh", k=3000))
    assert encoder.encode_line(line) == reference(line)
