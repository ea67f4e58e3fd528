"""Manifests: written whole, read strictly, and believed only while they describe what is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmtools import __version__, artifacts
from lmtools.artifacts import (
    FileRecord,
    Manifest,
    OriginalText,
    is_unchanged,
    manifest_path,
    read_fresh_manifest,
    read_manifest,
    write_manifest,
)
from lmtools.errors import DataError

ORIGINAL = OriginalText("wiki.raw", lines=4_358, words=241_211, tokens=245_569, num_bytes=1_290_590)
TOOL = "lmtools bpe-encode"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output with the manifest of the step that made it from `text`."""
    (tmp_path / "text").write_text("one two\n")
    output = tmp_path / "ids"
    output.write_text("11 22\n")
    write_manifest(
        output,
        Manifest(
            tool=TOOL,
            options={"keep_empty": False, "levels": (1, 2)},
            inputs=[FileRecord.of(tmp_path / "text")],
            outputs=[FileRecord.of(output)],
            counts={"lines": 1, "tokens": 2},
            original=ORIGINAL,
        ),
    )
    return output


def changed(output: Path, **fields: Any) -> None:
    """Write the manifest again with other fields."""
    record = json.loads(manifest_path(output).read_text())
    manifest_path(output).write_text(json.dumps({**record, **fields}))


# --- written and read ------------------------------------------------------------------------------------------------


def test_a_record_is_the_name_and_the_bytes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert FileRecord.of(tmp_path / "text") == FileRecord("text", 3, sha256)


def test_a_manifest_is_read_as_it_was_written(output: Path) -> None:
    manifest = read_manifest(output)
    assert manifest == Manifest(
        tool=TOOL,
        options={"keep_empty": False, "levels": [1, 2]},
        inputs=[FileRecord.of(output.parent / "text")],
        outputs=[FileRecord.of(output)],
        counts={"lines": 1, "tokens": 2},
        original=ORIGINAL,
    )


def test_the_file_format(output: Path) -> None:
    assert manifest_path(output) == output.parent / "ids.meta.json"
    record = json.loads(manifest_path(output).read_text(encoding="utf-8"))
    assert record["format"] == "lmtools-manifest"
    assert record["format_version"] == 1
    assert record["tool_version"] == __version__
    assert record["original"]["tokens"] == 245_569
    assert str(output.parent) not in manifest_path(output).read_text()  # names alone: it moves with its files


def test_what_has_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    assert read_manifest(tmp_path / "text") is None
    assert read_fresh_manifest(tmp_path / "text") is None
    assert not is_unchanged(tmp_path / "text", tool=TOOL, options={}, inputs=[])


@pytest.mark.parametrize("name", [".", "/", "x" * 250, "file/x"])
def test_a_name_that_can_have_no_manifest(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert read_manifest(name) is None
    assert not is_unchanged(name, tool=TOOL, options={}, inputs=[])


def test_a_folder_in_the_place_of_a_manifest_is_named(output: Path) -> None:
    manifest_path(output).unlink(missing_ok=True)
    manifest_path(output).mkdir()
    with pytest.raises(DataError, match=r"meta\.json: not a readable manifest \(.*Is a directory.*\); remove it"):
        read_manifest(output)


@pytest.mark.parametrize("name", ["-", "/dev/null"])
def test_a_stream_has_no_manifest(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_manifest(name, Manifest(TOOL, {}, [], [], {}))
    assert not manifest_path(name).exists()
    assert read_manifest(name) is None


# --- read strictly ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff", b'{"format": "lmtools-manifest"}'])
def test_what_is_no_manifest_is_named(output: Path, content: bytes) -> None:
    manifest_path(output).write_bytes(content)
    with pytest.raises(DataError, match=r"ids\.meta\.json: not a readable manifest \(.+\); remove it to go on without"):
        read_manifest(output)


@pytest.mark.parametrize(
    "fields",
    [
        {"options": 5},
        {"counts": [1]},
        {"inputs": None},
        {"outputs": [{"path": "ids"}]},
        {"original": {"path": "x"}},
        {"original": {"path": "x", "lines": 1, "words": 2, "tokens": "3", "num_bytes": 4}},
        {"original": {"path": "x", "lines": 1, "words": 2, "tokens": 3.5, "num_bytes": 4}},
    ],
    ids=str,
)
def test_a_field_of_the_wrong_kind_is_an_error(output: Path, fields: Mapping[str, Any]) -> None:
    changed(output, **fields)
    with pytest.raises(DataError, match="not a readable manifest"):
        read_manifest(output)


@pytest.mark.parametrize("fields", [{"format": "other"}, {"format_version": 2}], ids=str)
def test_another_format_or_version_is_named(output: Path, fields: Mapping[str, Any]) -> None:
    changed(output, **fields)
    with pytest.raises(
        DataError, match=r"expected lmtools-manifest version 1, found '(lmtools-manifest|other)' version"
    ):
        read_manifest(output)


# --- believed while it is true ---------------------------------------------------------------------------------------


def test_a_manifest_is_fresh_until_its_file_changes(output: Path) -> None:
    assert read_fresh_manifest(output) == read_manifest(output)
    output.write_text("11 23\n")
    assert read_fresh_manifest(output) is None
    assert read_manifest(output) is not None


def test_a_manifest_moves_with_its_file(output: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for path in (output, manifest_path(output)):
        path.rename(tmp_path / "elsewhere" / path.name)
    assert read_fresh_manifest(tmp_path / "elsewhere" / "ids") is not None


def test_the_manifest_of_a_common_prefix_or_a_folder_is_about_every_output(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("test.bin", "test.idx", "bin/file"):
        (tmp_path / name).write_text(name)
    of_prefix = [FileRecord.of(tmp_path / "test.bin"), FileRecord.of(tmp_path / "test.idx")]
    write_manifest(tmp_path / "test", Manifest(TOOL, {}, [], of_prefix, {}))
    write_manifest(tmp_path / "bin", Manifest(TOOL, {}, [], [FileRecord.of(tmp_path / "bin" / "file")], {}))
    assert read_fresh_manifest(tmp_path / "test") is not None
    assert read_fresh_manifest(tmp_path / "bin") is not None

    (tmp_path / "test.idx").write_text("changed")
    (tmp_path / "bin" / "file").unlink()
    assert read_fresh_manifest(tmp_path / "test") is None
    assert read_fresh_manifest(tmp_path / "bin") is None


# --- unchanged -------------------------------------------------------------------------------------------------------


def unchanged(output: Path, **fields: Any) -> bool:
    step = {"tool": TOOL, "options": {"keep_empty": False, "levels": (1, 2)}, "inputs": [output.parent / "text"]}
    return is_unchanged(output, **{**step, **fields})


def test_the_same_step_would_make_the_same(output: Path) -> None:
    assert unchanged(output)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool": "lmtools detok"},
        {"options": {"keep_empty": True, "levels": (1, 2)}},
        {"options": {"keep_empty": False}},
        {"inputs": []},
        {"inputs": ["-"]},
        {"inputs": ["/dev/null"]},
        {"inputs": ["nowhere"]},
    ],
    ids=str,
)
def test_another_step_would_not(output: Path, fields: Mapping[str, Any]) -> None:
    assert not unchanged(output, **fields)


def test_a_changed_input_or_output_or_version_would_not(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "__version__", "99")
    assert not unchanged(output)
    monkeypatch.undo()
    output.write_text("11 23\n")
    assert not unchanged(output)
    output.write_text("11 22\n")
    assert unchanged(output)
    (output.parent / "text").write_text("one three\n")
    assert not unchanged(output)


def test_a_missing_output_would_not(output: Path) -> None:
    output.unlink()
    assert not unchanged(output)


def test_a_renamed_input_would_not(output: Path) -> None:
    (output.parent / "text").rename(output.parent / "other")
    assert not unchanged(output, inputs=[output.parent / "other"])
