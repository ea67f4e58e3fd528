"""`lmtools bpe-decode` as a user types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Lmtools


def test_what_was_encoded_comes_back(lmtools: Lmtools, golden: Path, tmp_path: Path) -> None:
    ran = lmtools("bpe-decode", "--inputs", golden / "train.bpe", "--outputs", tmp_path / "text", "--workers", 2)
    lines = (golden / "train.txt").read_text(encoding="utf-8").split("\n")
    expected = [line.strip() for line in lines if line.strip()]
    assert ran.code == 0
    assert (tmp_path / "text").read_text(encoding="utf-8") == "\n".join([*expected, ""])
    num_tokens = len((golden / "train.bpe").read_bytes().split())
    assert ran.out == f"{tmp_path / 'text'}: {len(expected):,} lines from {num_tokens:,} tokens\n"


def test_several_files_as_json_and_skipped_when_unchanged(lmtools: Lmtools, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("15496 995\n")
    (tmp_path / "b").write_text("505\n\n")
    names = ("--inputs", tmp_path / "a", tmp_path / "b", "--outputs", tmp_path / "c", tmp_path / "d")

    first = lmtools("bpe-decode", *names, "--json", "--skip-unchanged")
    assert (tmp_path / "c").read_text() == "Hello world\n"
    assert (tmp_path / "d").read_text() == "one\n\n"
    assert json.loads(first.out)["outputs"] == [
        {"path": str(tmp_path / "c"), "lines": 1, "tokens": 2, "skipped": False},
        {"path": str(tmp_path / "d"), "lines": 2, "tokens": 1, "skipped": False},
    ]

    (tmp_path / "b").write_text("505\n")
    second = lmtools("bpe-decode", *names, "--json", "--skip-unchanged")
    assert [output["skipped"] for output in json.loads(second.out)["outputs"]] == [True, False]
    assert second.err == f"{tmp_path / 'c'}: unchanged, skipped\n"


def test_a_filter(start_lmtools: Callable[..., subprocess.Popen[bytes]]) -> None:
    with start_lmtools("bpe-decode", stdin=subprocess.PIPE) as process:
        assert process.communicate(b"15496 995\n")[0] == b"Hello world\n"


def test_what_is_no_id_is_one_line(lmtools: Lmtools, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("15496\n15496 Hello\n")
    ran = lmtools("bpe-decode", "--inputs", tmp_path / "ids", "--outputs", tmp_path / "text")
    assert ran == (1, "", f"lmtools: {tmp_path / 'ids'}:2: found 'Hello', expected ids of encoder.json\n")
    assert not (tmp_path / "text").exists()
