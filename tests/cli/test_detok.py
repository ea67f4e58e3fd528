"""`lmtools detok` as a user types it."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lmtools.artifacts import read_manifest
from tests.cli.conftest import Lmtools


def test_one_file(lmtools: Lmtools, golden: Path, tmp_path: Path) -> None:
    ran = lmtools("detok", golden / "train.txt", tmp_path / "train.detok", "--workers", 2)
    raw = (golden / "train.txt").read_text(encoding="utf-8")
    lines, words = raw.count("\n"), len(raw.split())
    assert ran.code == 0
    assert (tmp_path / "train.detok").read_bytes() == (golden / "train.detok").read_bytes()
    assert f"original train.txt: {lines:,} lines, {words:,} words, {lines + words:,} tokens" in ran.out


def test_several_files_into_a_folder(lmtools: Lmtools, tmp_path: Path) -> None:
    (tmp_path / "wiki.valid.raw").write_text(" a , b \n")
    (tmp_path / "wiki.test.raw.gz").write_bytes(gzip.compress(b" c . \n"))
    ran = lmtools(
        *("detok", tmp_path / "wiki.valid.raw", tmp_path / "wiki.test.raw.gz"),
        "--output-dir",
        tmp_path / "out",
        "--json",
    )
    assert (tmp_path / "out" / "wiki.valid.detok").read_text() == "a, b\n"
    assert (tmp_path / "out" / "wiki.test.detok").read_text() == "c.\n"
    [valid, test] = json.loads(ran.out)["outputs"]
    assert valid == {
        "path": str(tmp_path / "out" / "wiki.valid.detok"),
        "lines": 1,
        "words": 2,
        "num_bytes": 5,
        "original": {"path": "wiki.valid.raw", "lines": 1, "words": 3, "tokens": 4, "num_bytes": 8},
        "skipped": False,
    }
    assert test["original"]["path"] == "wiki.test.raw.gz"


def test_what_is_unchanged_is_skipped(lmtools: Lmtools, tmp_path: Path) -> None:
    (tmp_path / "raw").write_text(" a , b \n")
    command = ("detok", tmp_path / "raw", tmp_path / "detok", "--skip-unchanged")
    first = lmtools(*command)
    second = lmtools(*command)
    assert (first.err, second.err) == ("", f"{tmp_path / 'detok'}: unchanged, skipped\n")
    assert second.out == first.out


def test_a_filter(start_lmtools: Callable[..., subprocess.Popen[bytes]]) -> None:
    with start_lmtools("detok", "-", "-", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(b" a , b \n")
    assert out == b"a, b\n"
    assert err == b"-: 1 lines, 2 words; original -: 1 lines, 3 words, 4 tokens (words + line ends)\n"


def test_the_counts_travel_to_the_ids_and_back(lmtools: Lmtools, golden: Path, tmp_path: Path) -> None:
    text, ids, back = tmp_path / "train.detok", tmp_path / "train.bpe", tmp_path / "train.back"
    assert lmtools("detok", golden / "train.txt", text).code == 0
    assert lmtools("bpe-encode", "--inputs", text, "--outputs", ids).code == 0
    assert lmtools("bpe-decode", "--inputs", ids, "--outputs", back).code == 0
    originals = [manifest.original for path in (text, ids, back) if (manifest := read_manifest(path)) is not None]
    assert [original.path for original in originals if original is not None] == ["train.txt"] * 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["raw"], 2, "expected INPUT OUTPUT, found 1 name(s); --output-dir takes several inputs"),
        (["raw", "b", "c"], 2, "expected INPUT OUTPUT, found 3 name(s)"),
        (["-", "--output-dir", "out"], 2, "standard input (-) has no name to make an output of"),
        (["raw", "raw", "--output-dir", "."], 2, "raw.detok: named as the output of more than one input"),
        (["bad", "--output-dir", "raw"], 2, "raw is a file, expected a folder"),
        (["", "out"], 2, "expected names of files, found an empty one"),
        (["raw", ""], 2, "expected names of files, found an empty one"),
        (["nowhere", "out"], 1, "lmtools: nowhere: no such file\n"),
        ([".", "out"], 1, "lmtools: .: is a folder, expected a file\n"),
        (["x" * 300, "out"], 1, "x: cannot be opened (File name too long)\n"),
        (["bad", "out"], 1, "lmtools: bad:3: not UTF-8 (byte 0xed at byte 2 of the line); convert the text first\n"),
        (["bad", "--output-dir", "new/out"], 1, "lmtools: bad:3: not UTF-8"),
        (["raw", "folder"], 1, "lmtools: folder: is a folder, expected a file name\n"),
        (["raw", "-", "--json"], 2, "standard output has the data already"),
    ],
)
def test_wrong_usage_is_one_line(
    lmtools: Lmtools,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").write_text(" a \n")
    (tmp_path / "bad").write_bytes(b"a\nb\nc\xed\xa0\x80\n")
    (tmp_path / "folder").mkdir()
    ran = lmtools("detok", *arguments)
    assert ran.code == code
    assert message in ran.err
    assert ran.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "folder", "raw"]
