"""fairseq's .idx and .bin: what is written, what is read, and every way in which a pair can be broken."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.data.indexed import IndexedDataset
from lmtools.data.indexed_writer import little_endian, replace_dataset, write_dataset, write_index
from lmtools.errors import DataError, LmtoolsError

SENTENCES = [[4, 5, 6, 2], [2], [7, 2]]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    prefix = tmp_path / "test"
    write_dataset(prefix, SENTENCES, vocab_size=8)
    return prefix


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def idx(split: Path) -> Path:
    return split.with_name("test.idx")


def bin_(split: Path) -> Path:
    return split.with_name("test.bin")


def test_the_bytes_of_the_pair(split: Path) -> None:
    assert bin_(split).read_bytes() == struct.pack("<7H", 4, 5, 6, 2, 2, 7, 2)
    assert idx(split).read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, 3) + struct.pack("<3i", 4, 1, 2) + struct.pack("<3q", 0, 8, 10)
    )
    assert sorted(path.name for path in split.parent.iterdir()) == ["test.bin", "test.idx"]


def test_reading_gives_sentences_and_the_whole_stream(split: Path) -> None:
    dataset = IndexedDataset(split)
    assert len(dataset) == 3
    assert dataset.num_tokens == 7
    assert dataset.sizes.tolist() == [4, 1, 2]
    assert dataset.tokens.tolist() == [4, 5, 6, 2, 2, 7, 2]
    assert [dataset[index].tolist() for index in range(3)] == SENTENCES


def test_another_process_maps_the_files_again(split: Path) -> None:
    message = pickle.dumps(IndexedDataset(split))
    assert len(message) < 500
    assert pickle.loads(message).tokens.tolist() == [4, 5, 6, 2, 2, 7, 2]


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_golden_splits_are_read_and_written_back_byte_for_byte(golden: Path, tmp_path: Path, name: str) -> None:
    dataset = IndexedDataset(golden / "bin" / name)
    write_dataset(tmp_path / name, (dataset[index] for index in range(len(dataset))), vocab_size=144)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / name).with_suffix(suffix).read_bytes() == (golden / "bin" / f"{name}{suffix}").read_bytes()


def test_tokens_take_two_bytes_below_65500_types(tmp_path: Path) -> None:
    write_dataset(tmp_path / "small", [[65_498, 2]], vocab_size=65_499)
    write_dataset(tmp_path / "large", [[70_000, 2]], vocab_size=65_500)
    assert IndexedDataset(tmp_path / "small").dtype == np.uint16
    assert IndexedDataset(tmp_path / "small").tokens.tolist() == [65_498, 2]
    assert IndexedDataset(tmp_path / "large").dtype == np.uint32
    assert IndexedDataset(tmp_path / "large").tokens.tolist() == [70_000, 2]


def test_a_split_without_sentences_can_be_opened(tmp_path: Path) -> None:
    write_dataset(tmp_path / "empty", [], vocab_size=8)
    dataset = IndexedDataset(tmp_path / "empty")
    assert len(dataset) == dataset.num_tokens == 0
    assert dataset.tokens.dtype == np.uint16


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (9, "<u4"), (10, "<u8")]
)
def test_every_integer_type_that_fairseq_writes_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([4, 100, 2, 2], dtype=dtype)
    (tmp_path / "test.bin").write_bytes(tokens.tobytes())
    (tmp_path / "test.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQ2i2q", 1, code, 2, 3, 1, 0, 3 * tokens.itemsize)
    )
    dataset = IndexedDataset(tmp_path / "test")
    assert dataset.dtype == dtype
    assert dataset.tokens.tolist() == [4, 100, 2, 2]
    assert dataset[1].tolist() == [2]


def test_offsets_stay_right_beyond_2_gib(tmp_path: Path) -> None:
    """fairseq wraps them around with numpy 2, where an int32 size makes an int32 sum."""
    (tmp_path / "sizes").write_bytes(little_endian("i", [400_000_000] * 5))
    stream = io.BytesIO()
    write_index(stream, tmp_path / "sizes", "I")
    assert struct.unpack("<5q", stream.getvalue()[-40:]) == tuple(1_600_000_000 * index for index in range(5))


def test_an_index_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    write_dataset(tmp_path / "long", ([2] for _ in range(300_000)), vocab_size=8)
    dataset = IndexedDataset(tmp_path / "long")
    assert len(dataset) == dataset.num_tokens == 300_000


@given(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=20))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, sentences: list[list[int]]) -> None:
    prefix = tmp_path_factory.mktemp("split") / "test"
    write_dataset(prefix, sentences, vocab_size=1000)
    dataset = IndexedDataset(prefix)
    assert [dataset[index].tolist() for index in range(len(dataset))] == sentences


def set_bytes(start: int, values: bytes) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[start : start + len(values)] = values

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_bytes(0, b"TNTIDX"), r"test.idx: begins with b'TNTIDXX\x00\x00', expected b'MMIDIDX\x00\x00'"),
        (set_bytes(9, struct.pack("<Q", 2)), "test.idx: is of version 2, expected 1"),
        (set_bytes(17, b"\6"), "test.idx: holds floating-point numbers (code 6), expected integer tokens"),
        (set_bytes(17, b"\x0b"), "test.idx: unknown type code 11, expected one of 1, 2, 3, 4, 5, 8, 9, 10"),
        (set_bytes(18, struct.pack("<Q", 4)), "test.idx: has 62 bytes, expected 74 for 4 sentences"),
        (lambda content: content.__delitem__(slice(40, None)), "test.idx: has 40 bytes, expected 62 for 3 sentences"),
        (lambda content: content.__delitem__(slice(20, None)), "test.idx: has 20 bytes, expected 26 or more"),
        (lambda content: content.clear(), "test.idx: begins with b'', expected"),
        (set_bytes(30, struct.pack("<i", -1)), "test.idx: sentence 1 has -1 tokens"),
        (set_bytes(46, struct.pack("<q", 6)), "test.idx: sentence 1 begins at byte 6 of the .bin, expected 8"),
        (set_bytes(34, struct.pack("<i", 3)), "test.bin: has 14 bytes, expected 16 for the 8 tokens of test.idx"),
    ],
)
def test_a_broken_index_is_refused(split: Path, change: Callable[[bytearray], None], message: str) -> None:
    edit(idx(split), change)
    with pytest.raises(DataError) as caught:
        IndexedDataset(split)
    assert str(caught.value).startswith(f"{split.parent}/{message}")


@pytest.mark.parametrize("num_bytes", [0, 12, 13])
def test_a_bin_that_is_cut_short_is_refused(split: Path, num_bytes: int) -> None:
    edit(bin_(split), lambda content: content.__delitem__(slice(num_bytes, None)))
    with pytest.raises(DataError, match=rf"test\.bin: has {num_bytes} bytes, expected 14 for the 7 tokens"):
        IndexedDataset(split)


@pytest.mark.parametrize("name", ["test.bin", "test.idx"])
def test_half_a_pair_is_refused(split: Path, name: str) -> None:
    (split.parent / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: no such file; a split is a \.bin and an \.idx together"):
        IndexedDataset(split)


def test_a_writer_that_fails_leaves_the_old_pair(split: Path) -> None:
    def sentences() -> Iterator[list[int]]:
        yield [5, 2]
        raise RuntimeError("the text ended in the middle")

    with pytest.raises(RuntimeError):
        write_dataset(split, sentences(), vocab_size=8)
    assert IndexedDataset(split).tokens.tolist() == [4, 5, 6, 2, 2, 7, 2]
    assert sorted(path.name for path in split.parent.iterdir()) == ["test.bin", "test.idx"]


def test_a_folder_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LmtoolsError, match=r"the folder .*absent does not exist"):
        write_dataset(tmp_path / "absent" / "test", SENTENCES, vocab_size=8)


def test_an_interrupted_replacement_never_leaves_an_old_index_with_new_tokens(
    split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = split.with_name("other")
    write_dataset(other, [[6, 6, 6, 2], [6], [6, 2]], vocab_size=8)
    rename = os.replace
    calls = iter([rename])

    def replace(source: Path, target: Path) -> None:
        next(calls, fail)(source, target)

    def fail(source: Path, target: Path) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="killed here"):
        replace_dataset(other, split)
    assert bin_(split).exists()
    assert not idx(split).exists()
