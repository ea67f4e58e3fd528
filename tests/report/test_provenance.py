"""The chain from raw text to data follows hashes, not names."""

from __future__ import annotations

from lmtools.artifacts import FileRecord, Manifest, write_manifest
from lmtools.report.provenance import chain_of, read_manifests


def record(name: str, digest: str | None = None) -> FileRecord:
    return FileRecord(name, 10, digest or f"sha of {name}")


def step(tool: str, inputs: list[FileRecord], outputs: list[FileRecord]) -> Manifest:
    return Manifest(tool, {}, inputs, outputs, {})


DETOK = step("detok", [record("raw")], [record("detok")])
BPE = step("bpe", [record("detok")], [record("bpe")])
DICT = step("dict", [record("bpe"), record("other.bpe")], [record("dict.txt")])
BINARIZE = step("binarize", [record("bpe"), record("dict.txt")], [record("test.bin"), record("test.idx")])
OTHER = step("detok", [record("raw2")], [record("detok2")])


def test_steps_come_after_what_they_read_and_each_once():
    chain = chain_of(["sha of test.bin", "sha of test.idx"], [BINARIZE, OTHER, DICT, BPE, DETOK])
    assert chain.steps == [DETOK, BPE, DICT, BINARIZE]
    assert chain.sources == [record("raw"), record("other.bpe")]


def test_a_chain_begins_where_manifests_end():
    chain = chain_of(["sha of test.bin"], [BINARIZE, BPE])
    assert chain.steps == [BPE, BINARIZE]
    assert chain.sources == [record("detok"), record("dict.txt")]
    assert chain_of(["sha of test.bin"], [OTHER]).steps == []


def test_a_step_that_changed_nothing_does_not_lead_in_a_circle():
    same = step("detok", [record("raw", "x")], [record("detok", "x")])
    chain = chain_of(["sha of bin"], [same, step("binarize", [record("detok", "x")], [record("bin")])])
    assert [manifest.tool for manifest in chain.steps] == ["detok", "binarize"]
    assert chain.sources == [record("raw", "x")]


def test_a_step_that_copies_a_file_has_not_made_it():
    """`binarize --srcdict` writes the dictionary that it was given beside its splits."""
    copies = step("binarize", [record("bpe"), record("dict.txt")], [record("test.bin"), record("dict.txt")])
    for manifests in ([copies, DICT, BPE], [DICT, BPE, copies]):
        assert chain_of(["sha of test.bin", "sha of dict.txt"], manifests).steps == [BPE, DICT, copies]


def test_steps_that_undo_each_other_do_not_lead_in_a_circle():
    there, back = step("a", [record("x")], [record("y")]), step("b", [record("y")], [record("x")])
    assert set(map(id, chain_of(["sha of x"], [there, back]).steps)) == {id(there), id(back)}


def test_manifests_are_read_from_folders_and_what_is_broken_is_named(tmp_path):
    write_manifest(tmp_path / "test.detok", DETOK)
    (tmp_path / "photo.meta.json").write_text("{}")
    manifests, unreadable = read_manifests([tmp_path, tmp_path / ".", tmp_path / "nowhere"])
    assert manifests == [DETOK]
    assert len(unreadable) == 1
    assert "photo.meta.json: not a readable manifest" in unreadable[0]
