"""fairseq's dict.txt: what is read, what is refused, and in which order a built dictionary stands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmtools.data.dictionary import SPECIAL_SYMBOLS, Dictionary
from lmtools.errors import DataError

words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).filter(lambda word: word.split() == [word])


def load(tmp_path: Path, content: str | bytes) -> Dictionary:
    path = tmp_path / "dict.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Dictionary.load(path)


def test_special_symbols_come_before_the_first_row(tmp_path: Path) -> None:
    dictionary = load(tmp_path, "the 7\nof 3\n")
    assert list(dictionary.symbols) == ["<s>", "<pad>", "</s>", "<unk>", "the", "of"]
    assert list(dictionary.counts) == [1, 1, 1, 1, 7, 3]
    assert len(dictionary) == 6
    assert (dictionary.bos_index, dictionary.pad_index, dictionary.eos_index, dictionary.unk_index) == (0, 1, 2, 3)
    assert dictionary.index("of") == 5
    assert dictionary.index("</s>") == 2
    assert dictionary.index("never seen") == dictionary.unk_index
    assert "of" in dictionary
    assert "never seen" not in dictionary


def test_golden_dictionary_is_written_back_byte_for_byte(golden: Path, tmp_path: Path) -> None:
    dictionary = Dictionary.load(golden / "bin" / "dict.txt")
    dictionary.save(tmp_path / "dict.txt")
    assert len(dictionary) == 144
    assert (tmp_path / "dict.txt").read_bytes() == (golden / "bin" / "dict.txt").read_bytes()


def test_a_word_may_hold_spaces_and_rows_may_end_as_on_windows(tmp_path: Path) -> None:
    dictionary = load(tmp_path, "New York 12\r\nof 3  \r\nlast 1")
    assert list(dictionary.symbols[4:]) == ["New York", "of", "last"]
    assert list(dictionary.counts[4:]) == [12, 3, 1]


def test_only_line_ends_separate_rows(tmp_path: Path) -> None:
    dictionary = load(tmp_path, "a\u2028b 2\nc\x85d 1\n")
    assert list(dictionary.symbols[4:]) == ["a\u2028b", "c\x85d"]


def test_overwrite_flag_gives_a_word_a_later_index_and_is_kept(tmp_path: Path) -> None:
    content = "a 5\nb 4\na 3 #fairseq:overwrite\n<unk> 2 #fairseq:overwrite\n"
    dictionary = load(tmp_path, content)
    assert len(dictionary) == 8
    assert dictionary.index("a") == 6
    assert dictionary.index("<unk>") == 7
    assert dictionary.index("never seen") == 3
    assert dictionary.to_bytes() == content.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            ":1: a Git LFS pointer instead of the dictionary; run `git lfs pull` to fetch the file",
        ),
        ("a 2\nb 1\na 1\n", ":3: the word 'a' is already in line 1; remove one, or end this row with "),
        ("a 2\n</s> 1\n", ":2: '</s>' is a special symbol, which every dictionary has before its first row; remove"),
        ("<s> 2\n", ":1: '<s>' is a special symbol"),
        ("a 2\nword\n", ":2: expected 'WORD COUNT', found 'word'"),
        ("a 2\nword many\n", ":2: expected 'WORD COUNT', found 'word many'"),
        ("a 2\nword 1.5\n", ":2: expected 'WORD COUNT', found 'word 1.5'"),
        ("a 2\n\nb 1\n", ":2: expected 'WORD COUNT', found ''"),
        ("a 2\nb #fairseq:overwrite\n", ":2: expected 'WORD COUNT', found 'b #fairseq:overwrite'"),
        (b"a 2\nb\xff 1\n", ":2: not UTF-8 (byte 0xff)"),
        ("", ": the dictionary is empty, expected rows 'WORD COUNT'"),
    ],
)
def test_refused_with_its_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'dict.txt'}{message}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt: no such file"):
        Dictionary.load(tmp_path / "absent.txt")


def test_built_in_order_of_count_then_of_code_point() -> None:
    counts = {"b": 2, "é": 2, "a": 2, "\U0001f600": 2, "\uffff": 2, "top": 9, "Z": 1}
    dictionary = Dictionary.from_counts(counts, padding_factor=1)
    assert list(dictionary.symbols[4:]) == ["top", "a", "b", "é", "\uffff", "\U0001f600", "Z"]


def test_special_symbols_in_the_text_are_not_rows() -> None:
    dictionary = Dictionary.from_counts({"<unk>": 50, "</s>": 40, "a": 1}, padding_factor=1)
    assert list(dictionary.symbols[4:]) == ["a"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threshold": 2}, ["a", "b"]),
        ({"nwords": 5}, ["a"]),
        ({"nwords": 4}, []),
        ({"nwords": 2}, []),
        ({"nwords": 0}, ["a", "b", "c"]),
        ({"nwords": 6, "threshold": 3}, ["a"]),
    ],
)
def test_threshold_and_number_of_words(options: dict[str, int], expected: list[str]) -> None:
    dictionary = Dictionary.from_counts({"c": 1, "b": 2, "a": 3}, padding_factor=1, **options)
    assert list(dictionary.symbols[4:]) == expected


def test_padding_counts_up_and_skips_names_that_are_words() -> None:
    dictionary = Dictionary.from_counts({"madeupword0001": 3, "a": 3}, padding_factor=8)
    assert list(dictionary.symbols[4:]) == ["a", "madeupword0001", "madeupword0000", "madeupword0002"]
    assert list(dictionary.counts[4:]) == [3, 3, 0, 0]


def test_padded_to_the_rows_of_an_embedding() -> None:
    dictionary = Dictionary.from_counts({"a": 3, "madeupword0001": 2}, padding_factor=1)
    padded = dictionary.padded(9)
    assert padded.symbols[4:] == ("a", "madeupword0001", "madeupword0000", "madeupword0002", "madeupword0003")
    assert padded.counts[4:] == (3, 2, 0, 0, 0)
    assert dictionary.padded(6).to_bytes() == dictionary.to_bytes()


@pytest.mark.parametrize("padding_factor", [-8, 0, 1])
def test_a_padding_factor_below_2_pads_nothing(padding_factor: int) -> None:
    assert len(Dictionary.from_counts({"a": 1}, padding_factor=padding_factor)) == 5


@example({"<s>": 2, "<unk>": 2, "a": 1}, 0, 5)
@given(st.dictionaries(words, st.integers(1, 3), max_size=30), st.integers(0, 3), st.integers(-1, 40))
def test_follows_fairseqs_finalize(counts: dict[str, int], threshold: int, nwords: int) -> None:
    """The order as fairseq makes it: a Counter filled in sorted order, its most common, cut at the threshold.

    Special symbols among the words were rows before and are not counted.
    """
    counter = Counter({word: count for word, count in sorted(counts.items()) if word not in SPECIAL_SYMBOLS})
    most_common = counter.most_common(max(nwords - 4, 0) if nwords > 0 else len(counts))
    expected = [(word, count) for word, count in most_common if count >= threshold]
    dictionary = Dictionary.from_counts(counts, threshold=threshold, nwords=nwords, padding_factor=1)
    assert list(zip(dictionary.symbols[4:], dictionary.counts[4:], strict=True)) == expected


@given(st.dictionaries(words, st.integers(0, 10**12), min_size=1, max_size=30))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, counts: dict[str, int]) -> None:
    path = tmp_path_factory.mktemp("dictionary") / "dict.txt"
    dictionary = Dictionary.from_counts(counts)
    dictionary.save(path)
    loaded = Dictionary.load(path)
    assert list(loaded.symbols) == list(dictionary.symbols)
    assert loaded.sha256 == dictionary.sha256
    assert len(loaded) % 8 == 0
