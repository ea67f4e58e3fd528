"""detok: the published step's bytes, what it loses on purpose, and the counts that it keeps."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest
import sacremoses
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lmtools.artifacts import FileRecord, OriginalText, read_manifest
from lmtools.errors import DataError
from lmtools.preprocess import detok as detok_module
from lmtools.preprocess.detok import Detokenized, TextCounts, detok, detokenize, find_detokenized


def run(text: bytes, folder: Path) -> bytes:
    (folder / "raw").write_bytes(text)
    detok(str(folder / "raw"), str(folder / "detok"))
    return (folder / "detok").read_bytes()


# --- the published step's bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_own_text_is_detokenised_as_by_fairseq(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(detok_module, "_PIECE_BYTES", 500)
    done: list[int] = []
    raw = golden / "train.txt"
    detok(str(raw), str(tmp_path / "detok"), workers=workers, progress=done.append)
    assert (tmp_path / "detok").read_bytes() == (golden / "train.detok").read_bytes()
    assert sum(done) == raw.stat().st_size
    assert len(done) > 4


@pytest.mark.slow
@pytest.mark.shared
def test_wikitext_is_detokenised_as_by_fairseq(shared_golden: Path, shared_data: Path, tmp_path: Path) -> None:
    raw = shared_data / "wikitext-103-raw" / "wiki.test.raw"
    result = detok(str(raw), str(tmp_path / "detok"), workers=2)
    assert (tmp_path / "detok").read_bytes() == (shared_golden / "detok" / "wiki.test.detok").read_bytes()
    assert result.original == OriginalText("wiki.test.raw", 4_358, 241_211, 245_569, 1_290_590)


@pytest.mark.shared
def test_awkward_text_is_detokenised_as_by_fairseq(shared_golden: Path, tmp_path: Path) -> None:
    text = (shared_golden / "hard" / "hard.txt").read_bytes()
    assert run(text, tmp_path) == (shared_golden / "hard" / "hard.detok").read_bytes()


moses = sacremoses.MosesDetokenizer()


@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "the",
                "@-@",
                "@,@",
                "@",
                "=",
                "==",
                "–",
                "-",
                ".",
                ",",
                "(",
                ")",
                "[",
                '"',
                "'",
                "''",
                "s",
                "s'",
                "'s",
                "“",
                "„",
                "$",
                "%",
                "&amp;",
                "日",
                "本",
                "é",
                "",
                "\t",
                "\xa0",
            ]
        )
    )
)
def test_a_line_is_what_sacremoses_and_five_replacements_make_of_it(words: list[str]) -> None:
    line = " ".join(words)
    expected = moses.detokenize(line.strip().split(" "))
    expected = expected.replace(" @", "").replace("@ ", "").replace(" =", "=").replace("= ", "=").replace(" – ", "–")
    assert detokenize(line) == expected


# --- what it loses, as docs/text.md says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "detokenised"),
    [
        (" Robert <unk> is an English film , television and theatre actor . ",
         "Robert <unk> is an English film, television and theatre actor."),
        (" 3 @.@ 5 m , 1 @,@ 000 – 2 @,@ 000 people ", "3.5 m, 1,000–2,000 people"),
        (" = = History = = ", "==History=="),
        ("me @ home", "me home"),
        ("x = y", "x=y"),
        ("a @-@ b and a - b", "a-b and a - b"),
        ("1 – 2", "1–2"),
        ("two  spaces\tand\u3000more", "two spaces and more"),
    ],
)  # fmt: skip
def test_examples(raw: str, detokenised: str) -> None:
    assert detokenize(raw) == detokenised


# --- lines -----------------------------------------------------------------------------------------------------------


def test_every_line_stays_a_line(tmp_path: Path) -> None:
    assert run(b" a . \n\n \n b , c \r\n d", tmp_path) == b"a.\n\n\nb, c\nd\n"


@pytest.mark.parametrize("separator", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_nothing_but_a_line_feed_ends_a_line(tmp_path: Path, separator: str) -> None:
    # In the published step a bare \r does, since it reads with universal newlines.
    assert run(f"a{separator}b\n".encode(), tmp_path) == b"a b\n"


def test_an_empty_file_gives_an_empty_file(tmp_path: Path) -> None:
    assert run(b"", tmp_path) == b""


def test_what_is_not_utf8_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"raw:2: not UTF-8"):
        run(b"a\n\xff\n", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text(golden: Path, tmp_path: Path, suffix: str) -> None:
    raw = tmp_path / f"train.txt{suffix}"
    content = (golden / "train.txt").read_bytes()
    raw.write_bytes(COMPRESS[suffix](content))
    result = detok(str(raw), str(tmp_path / "detok"))
    assert (tmp_path / "detok").read_bytes() == (golden / "train.detok").read_bytes()
    assert result.original.path == raw.name
    assert result.original.num_bytes == len(content)


def test_text_that_is_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "raw.gz").write_bytes(gzip.compress(b"a . \n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"raw\.gz: broken compressed stream"):
        detok(str(tmp_path / "raw.gz"), str(tmp_path / "detok"))
    assert [path.name for path in tmp_path.iterdir()] == ["raw.gz"]


# --- counts ----------------------------------------------------------------------------------------------------------


def test_the_original_text_is_counted(tmp_path: Path) -> None:
    raw = " a b , c \n\n d e"
    run(raw.encode(), tmp_path)
    manifest = read_manifest(tmp_path / "detok")
    assert manifest is not None
    assert manifest.tool == "lmtools detok"
    # Six words and three line ends; the published 245,566 of WikiText leaves the line ends at both ends out.
    assert manifest.original == OriginalText("raw", lines=3, words=6, tokens=9, num_bytes=len(raw))
    assert manifest.counts == {"lines": 3, "words": 5, "num_bytes": len("a b, c\n\nd e\n")}
    assert list(manifest.inputs) == [FileRecord.of(tmp_path / "raw")]
    assert list(manifest.outputs) == [FileRecord.of(tmp_path / "detok")]


def test_what_is_unchanged_is_found(tmp_path: Path) -> None:
    run(b" a , b \n", tmp_path)
    names = str(tmp_path / "raw"), str(tmp_path / "detok")
    expected = Detokenized(TextCounts(1, 2, 5), OriginalText("raw", 1, 3, 4, 8))
    assert find_detokenized(*names) == expected
    (tmp_path / "raw").write_bytes(b" a \n")
    assert find_detokenized(*names) is None
