"""Files of torch.save come back as torch gives them; a damaged one is an error that names it, never anything else."""

from __future__ import annotations

import functools
import gzip
import pickle
import re
import struct
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmtools.checkpoints.lazy_tensor import LazyTensor
from lmtools.checkpoints.pickle_names import ForeignRecord
from lmtools.checkpoints.unpickle import plain, read_torch_file
from lmtools.errors import CheckpointError
from tests.support.torch_files import MAGIC, PROTOCOL, SYSTEM, write_legacy, write_zip

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_FILES = sorted(path.relative_to(GOLDEN) for path in GOLDEN.rglob("*.pt"))


def assert_same(ours: Any, theirs: Any) -> None:
    """What was read is what torch.load made of the file, which ran what is in it."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, LazyTensor)
        assert (ours.dtype, ours.shape, ours.stride) == (theirs.dtype, tuple(theirs.shape), theirs.stride())
        assert torch.equal(ours.read(), theirs)
    elif isinstance(theirs, Namespace):
        assert isinstance(ours, ForeignRecord)
        assert (ours.type.module, ours.type.name, ours.args, ours.items) == ("argparse", "Namespace", (), [])
        assert_same(ours.state, vars(theirs))
    elif isinstance(theirs, Mapping):
        assert isinstance(ours, dict)
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert (type(ours), len(ours)) == (type(theirs), len(theirs))
        for left, right in zip(ours, theirs, strict=True):
            assert_same(left, right)
    else:
        assert (type(ours), ours) == (type(theirs), theirs)


def tensors_of(content: Any) -> Iterator[LazyTensor]:
    if isinstance(content, LazyTensor):
        yield content
    elif isinstance(content, ForeignRecord):
        yield from tensors_of([content.args, content.state, content.items])
    elif isinstance(content, dict):
        yield from tensors_of(list(content.values()))
    elif isinstance(content, (list, tuple)):
        for item in content:
            yield from tensors_of(item)


# What genuine fairseq wrote ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=str)
def test_genuine_checkpoints_come_back_as_torch_gives_them(path):
    ours = read_torch_file(GOLDEN / path)
    assert ours.format == ("legacy" if "2020" in str(path) else "zip")
    assert_same(ours.content, torch.load(GOLDEN / path, weights_only=False))
    for tensor in tensors_of(ours.content):
        tensor.storage.verify()


@pytest.mark.shared
def test_genuine_wikitext_checkpoints_come_back_as_torch_gives_them(shared_golden):
    paths = [path for path in sorted(shared_golden.rglob("*.pt")) if "own" not in path.parts]
    assert {path.relative_to(shared_golden).parts[0] for path in paths} == {"mp2_2020", "mp8", "plain", "txl"}
    for path in paths:
        ours = read_torch_file(path)
        assert ours.format == ("legacy" if "2020" in str(path) or "legacy" in str(path) else "zip")
        assert_same(ours.content, torch.load(path, weights_only=False))


def test_options_of_genuine_checkpoints(golden):
    old = plain(read_torch_file(golden / "mp2_2020" / "model-model_part-0.pt").content["args"])
    new = plain(read_torch_file(golden / "mp4" / "model-model_part-0.pt").content["cfg"])
    assert (old["arch"], old["model_parallel_size"]) == ("transformer_lm_megatron", 2)
    assert (new["model"]["arch"], new["common"]["model_parallel_size"]) == ("transformer_lm_megatron", 4)


# Files that are not what they should be ------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """The one line with which a file is refused, without its name at the beginning."""
    with pytest.raises(CheckpointError) as error:
        read_torch_file(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_no_file_and_folder(tmp_path):
    assert refusal(tmp_path / "nothing.pt") == "No such file or directory"
    assert refusal(tmp_path) == "Is a directory"


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 1000, b"version https://git-lfs.github.com/spec/v1\n", b"<html>", MAGIC]
)
def test_other_content(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert "not a file of torch.save" in refusal(path)


def test_other_pickles(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps({"model": 1}))
    assert refusal(path).startswith("begins neither like a zip archive nor like a legacy file")


def test_archives_that_a_checkpoint_comes_in(tmp_path, golden):
    compressed, packed = tmp_path / "model.pt.gz", tmp_path / "model.tar"
    compressed.write_bytes(gzip.compress((golden / "plain" / "model.pt").read_bytes()))
    with tarfile.open(packed, "w") as archive:
        archive.add(golden / "plain" / "model.pt", "model.pt")
    for path in (compressed, packed):
        assert refusal(path) == "is a gzip or tar archive; unpack it and name a file that was in it"


def test_other_zip_archives(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"")
    assert refusal(path) == "a zip archive with 0 data.pkl, expected 1; not a file of torch.save"


def test_compressed_records(tmp_path):
    path = tmp_path / "model.pt"
    for name in ("data.pkl", "byteorder", "data/0"):
        torch.save(torch.zeros(100), tmp_path / "stored.pt")
        with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(path, "w") as archive:
            for info in stored.infolist():
                compression = zipfile.ZIP_DEFLATED if info.filename.endswith(f"/{name}") else zipfile.ZIP_STORED
                archive.writestr(info.filename, stored.read(info), compress_type=compression)
        assert refusal(path).startswith(f"stored/{name} is compressed, as torch.save never does")


def test_big_endian_machines(tmp_path):
    content = pickle.dumps({}, 2)
    assert "big-endian" in refusal(write_zip(tmp_path / "zip.pt", content, byteorder=b"big"))
    legacy = tmp_path / "legacy.pt"
    legacy.write_bytes(MAGIC + PROTOCOL + pickle.dumps({"little_endian": False}, 2) + content + pickle.dumps([], 2))
    assert "little-endian" in refusal(legacy)


def test_checksums_that_torch_was_told_not_to_compute(tmp_path):
    path = tmp_path / "model.pt"
    computed = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(torch.arange(3.0), path)
    finally:
        torch.serialization.set_crc32_options(computed)
    tensor = read_torch_file(path).content
    tensor.storage.verify()
    assert tensor.read().tolist() == [0.0, 1.0, 2.0]


def test_damaged_records(tmp_path):
    path = write_zip(tmp_path / "model.pt", pickle.dumps({"text": "abc"}, 2))
    path.write_bytes(path.read_bytes().replace(b"abc", b"abd"))
    assert refusal(path).startswith("archive/data.pkl does not have the checksum that the archive says")


# A pickle of one float32 tensor of shape (2,) in a storage with key "0" of NUM_ELEMENTS.
def tensor_of(num_elements: int, *, storage: bytes = b"torch\nFloatStorage\n", tail: bytes = b"") -> bytes:
    persistent = b"(X\7\0\0\0storagec" + storage + b"X\1\0\0\0" + b"0" + b"X\3\0\0\0cpu" + b"J"
    persistent += struct.pack("<i", num_elements) + tail + b"tQ"
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + b"K\0K\2\x85K\1\x85\x89NtR."


def two_tensors(first: bytes, second: bytes) -> bytes:
    """Of one storage, that each says is of another type."""
    return b"\x80\2" + b"".join(tensor_of(2, storage=storage)[2:-1] for storage in (first, second)) + b"\x86."


EIGHT_BYTES = struct.pack("<2f", 1.5, 2.5)


def test_the_smallest_files_are_read(tmp_path):
    """The pickle that the next tests damage is one that is read."""
    for path in (
        write_zip(tmp_path / "zip.pt", tensor_of(2), {"0": EIGHT_BYTES}),
        write_legacy(tmp_path / "legacy.pt", tensor_of(2), [("0", 2, EIGHT_BYTES)]),
        write_legacy(tmp_path / "2018.pt", tensor_of(2, tail=b"N"), [("0", 2, EIGHT_BYTES)]),
    ):
        assert read_torch_file(path).content.read().tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("content", "storages", "reason"),
    [
        (tensor_of(2), {}, "not a file of torch.save|list of storages"),
        (tensor_of(2), {"1": EIGHT_BYTES}, "not a file of torch.save|list of storages"),
        (tensor_of(2), {"0": EIGHT_BYTES[:4]}, "another size or type"),
        (tensor_of(3), {"0": EIGHT_BYTES}, "another size or type"),
        (tensor_of(-2), {"0": EIGHT_BYTES}, "a storage without type, key or size"),
        (tensor_of(1), {"0": EIGHT_BYTES[:4]}, "does not fit its storage of 4 bytes"),
        (tensor_of(2, storage=b"torch\nDoubleStorage\n"), {"0": EIGHT_BYTES}, "another size or type|cut short"),
        (
            tensor_of(2, storage=b"torch\nComplexFloatStorage\n"),
            {"0": EIGHT_BYTES},
            "names 'torch.ComplexFloatStorage'",
        ),
        (tensor_of(2, storage=b"os\nsystem\n"), {"0": EIGHT_BYTES}, "names 'os.system'"),
        (tensor_of(2, storage=b"argparse\nNamespace\n"), {"0": EIGHT_BYTES}, "a storage without type, key or size"),
        (tensor_of(2, tail=b"K\1"), {"0": EIGHT_BYTES}, "a view of a storage"),
        (two_tensors(b"torch\nFloatStorage\n", b"torch\nIntStorage\n"), {"0": EIGHT_BYTES}, "another size or type"),
    ],
)
def test_storages_that_do_not_fit(tmp_path, content, storages, reason):
    as_list = [(key, len(values) // 4, values) for key, values in storages.items()]
    assert re.search(reason, refusal(write_zip(tmp_path / "zip.pt", content, storages)))
    assert re.search(reason, refusal(write_legacy(tmp_path / "legacy.pt", content, as_list)))


def test_a_directory_that_promises_more_than_the_archive_has(tmp_path):
    path = write_zip(tmp_path / "model.pt", tensor_of(2000), {"0": EIGHT_BYTES})
    sizes, promised = struct.pack("<2I", 8, 8), struct.pack("<2I", 8000, 8000)
    head, found, tail = path.read_bytes().rpartition(sizes)
    assert found
    path.write_bytes(head + promised + tail)
    assert "archive/data/0 is cut short" in refusal(path)


def test_lists_of_storages_that_do_not_fit(tmp_path):
    path = tmp_path / "legacy.pt"
    for keys in (["0", "0"], [], [0], "0", {"0": 1}, None):
        path.write_bytes(MAGIC + PROTOCOL + SYSTEM + tensor_of(2) + pickle.dumps(keys, 2) + EIGHT_BYTES * 3)
        assert refusal(path).startswith("its list of storages does not name those that its tensors use")


# Damage anywhere -----------------------------------------------------------------------------------------------------

ZIP, LEGACY = GOLDEN / "txl" / "checkpoint_init.pt", GOLDEN / "mp2_2020" / "model-model_part-0.pt"


def structure_of(path: Path) -> list[int]:
    """Places in a file that are not values of a tensor: these are few, and damage there does more."""
    storages = {tensor.storage.key: tensor.storage for tensor in tensors_of(read_torch_file(path).content)}
    values = {
        place for storage in storages.values() for place in range(storage.offset, storage.offset + storage.num_bytes)
    }
    return sorted(set(range(path.stat().st_size)) - values)


def damaged(path: Path) -> st.SearchStrategy[bytes]:
    """The file's content with one to three bytes changed."""
    content, structure = path.read_bytes(), structure_of(path)
    places = st.sampled_from(structure) | st.integers(0, len(content) - 1)
    changes = st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=3)
    return changes.map(lambda pairs: changed(content, pairs))


def changed(content: bytes, pairs: list[tuple[int, int]]) -> bytes:
    copy = bytearray(content)
    for place, difference in pairs:
        copy[place] ^= difference
    return bytes(copy)


@given(damaged(ZIP))
def test_damage_in_a_zip_file_is_noticed_or_without_effect(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content)
    try:
        ours = read_torch_file(path).content
        for tensor in tensors_of(ours):
            tensor.storage.verify()
    except CheckpointError:
        return
    assert_same(ours, undamaged())


@functools.cache
def undamaged() -> Any:
    return torch.load(ZIP, weights_only=False)


@given(damaged(LEGACY))
def test_damage_in_a_legacy_file_is_an_error_or_other_data(tmp_path_factory, content):
    """These files have no checksums; but whatever comes back is data that lies in the file."""
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content)
    try:
        ours = read_torch_file(path).content
        plain(ours)
        tensors = list(tensors_of(ours))
    except CheckpointError:
        return
    for tensor in tensors:
        assert tensor.storage.offset + tensor.storage.num_bytes <= len(content)
        assert tensor.read().shape == tensor.shape


@given(st.sampled_from([ZIP, LEGACY]), st.data())
def test_a_file_that_is_cut_short_is_refused(tmp_path_factory, path, data):
    content = path.read_bytes()
    cut = tmp_path_factory.getbasetemp() / "cut.pt"
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refusal(cut)
