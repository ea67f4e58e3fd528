"""A tensor in a file gives what torch would have given, any part of it, and reads no more than that part."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmtools.checkpoints.lazy_tensor import LazyTensor, Storage, equal_values
from lmtools.checkpoints.unpickle import read_torch_file
from lmtools.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
as_zip_or_legacy = pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])


def saved(path: Path, value: Any, *, as_zip: bool) -> Any:
    """What comes back of a value that torch has written."""
    torch.save(value, path, _use_new_zipfile_serialization=as_zip)
    return read_torch_file(path).content


@st.composite
def views_and_slices(draw: st.DrawFn) -> tuple[Tensor, tuple[slice, ...]]:
    """A tensor that is a part of a storage, dimensions in any order, and a part of it."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    values = torch.randint(0, 2 if (dtype := draw(st.sampled_from(DTYPES))) == torch.bool else 100, shape).to(dtype)
    view = values.permute(draw(st.permutations(range(len(shape)))))
    view = view[tuple(draw(slices(length)) for length in view.shape)]
    return view, tuple(draw(slices(length)) for length in view.shape)


def slices(length: int) -> st.SearchStrategy[slice]:
    bounds = st.integers(0, length)
    return st.tuples(bounds, bounds).map(lambda pair: slice(min(pair), max(pair)))


@given(views_and_slices(), st.booleans())
def test_any_part_of_any_view_is_what_torch_has(tmp_path_factory, view_and_part, as_zip):
    view, part = view_and_part
    tensor = saved(tmp_path_factory.getbasetemp() / "view.pt", view, as_zip=as_zip)
    assert isinstance(tensor, LazyTensor)
    assert (tensor.dtype, tensor.shape) == (view.dtype, tuple(view.shape))
    assert (tensor.num_elements, tensor.num_bytes) == (view.numel(), view.numel() * view.element_size())
    for ours, theirs in ((tensor.read(), view), (tensor.read_slice(part), view[part])):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


@as_zip_or_legacy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_kept(tmp_path, dtype, as_zip):
    bits = torch.randint(0, 2, (256,), dtype=torch.uint8) if dtype == torch.bool else torch.arange(256).to(torch.uint8)
    values = bits.view(dtype)  # NaNs and infinities with all their bits among them
    ours = saved(tmp_path / "bits.pt", values, as_zip=as_zip).read()
    assert torch.equal(ours.view(torch.uint8), bits)


@as_zip_or_legacy
def test_a_part_costs_only_its_own_memory(tmp_path, as_zip):
    path = tmp_path / "large.pt"
    torch.save({"weight": torch.zeros(4096, 2048)}, path, _use_new_zipfile_serialization=as_zip)  # 32 MiB
    tracemalloc.start()
    tensor = read_torch_file(path).content["weight"]
    rows, columns = tensor.read_slice((slice(8, 16), slice(None))), tensor.read_slice((slice(None), slice(0, 8)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (rows.shape, columns.shape) == ((8, 2048), (4096, 8))
    assert peak < 1_000_000


@as_zip_or_legacy
def test_what_was_read_is_memory_of_its_own(tmp_path, as_zip):
    tensor = saved(tmp_path / "model.pt", torch.arange(6.0).reshape(2, 3), as_zip=as_zip)
    tensor.read().zero_()
    tensor.read_slice((slice(0, 2), slice(0, 3))).zero_()
    assert torch.equal(tensor.read(), torch.arange(6.0).reshape(2, 3))


@as_zip_or_legacy
def test_tied_tensors_have_one_storage(tmp_path, as_zip):
    weight = torch.arange(6.0)
    tensors = {"in": weight, "out": weight, "half": weight[3:], "own": weight.clone()}
    state = saved(tmp_path / "model.pt", tensors, as_zip=as_zip)
    assert state["in"].storage is state["out"].storage is state["half"].storage
    assert state["own"].storage.key != state["in"].storage.key
    assert (state["half"].storage_offset, state["half"].read().tolist()) == (3, [3.0, 4.0, 5.0])


@as_zip_or_legacy
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3, 2), (1, 1)])
def test_scalars_and_empty_tensors(tmp_path, shape, as_zip):
    values = torch.ones(shape)
    tensor = saved(tmp_path / "model.pt", values, as_zip=as_zip)
    assert torch.equal(tensor.read(), values)
    assert torch.equal(tensor.read_slice(tuple(slice(0, 1) for _ in shape)), values[tuple(slice(0, 1) for _ in shape)])


@as_zip_or_legacy
def test_parameters_are_tensors(tmp_path, as_zip):
    parameter = torch.nn.Parameter(torch.arange(3.0))
    assert saved(tmp_path / "model.pt", parameter, as_zip=as_zip).read().tolist() == [0.0, 1.0, 2.0]


STORAGE = Storage(Path("model.pt"), "0", torch.float32, num_bytes=24, offset=0)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((7,), (1,), 0),
        ((6,), (1,), 1),
        ((3, 2), (3, 1), 0),
        ((2, 2), (1, 5), 1),
        ((1,), (1,), 6),
        ((1 << 60,), (0,), 0),  # one number, seen again and again
        ((7,), (0,), 0),
    ],
)
def test_a_view_beyond_its_storage_is_refused(shape, stride, offset):
    with pytest.raises(CheckpointError, match=r"does not fit its storage of 24 bytes"):
        LazyTensor(torch.float32, shape, stride, offset, STORAGE)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((-1,), (1,), 0),
        ((2,), (-1,), 1),
        ((2,), (1,), -1),
        ((2,), (1, 1), 0),
        ([2], [1], 0),
        ((2.0,), (1,), 0),
        ((True,), (1,), 0),
        (None, (1,), 0),
        ((2,), (1,), None),
        ((1 << 63,), (1,), 0),
        ((1,) * 33, (1,) * 33, 0),
        ((0, 1 << 62, 1 << 62), (1, 1, 1), 0),
    ],
)
def test_an_impossible_view_is_refused(shape, stride, offset):
    with pytest.raises(CheckpointError, match=r"^a tensor "):
        LazyTensor(torch.float32, shape, stride, offset, STORAGE)


@as_zip_or_legacy
def test_a_file_that_becomes_shorter_is_an_error_rather_than_a_crash(tmp_path, as_zip):
    path = tmp_path / "model.pt"
    tensor = saved(path, torch.zeros(100_000), as_zip=as_zip)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=rf"{path}: has become shorter"):
        tensor.read()


def test_checksum_of_a_storage(tmp_path):
    path = tmp_path / "model.pt"
    tensor = saved(path, torch.arange(1000.0), as_zip=True)
    tensor.storage.verify()
    content = bytearray(path.read_bytes())
    content[tensor.storage.offset + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{path}: the bytes of storage 0 have checksum .* damaged"):
        tensor.storage.verify()


def test_equal_values(tmp_path):
    large = torch.arange(1_000_000).reshape(1000, 1000)  # compared in several pieces
    other = large.clone()
    other[-1, -1] += 1
    state = {"a": large, "same": large.clone(), "other": other, "narrow": large.int(), "flat": large.reshape(-1)}
    state |= {"none": torch.ones(0, 3), "none too": torch.zeros(0, 3), "1": torch.tensor(1), "2": torch.tensor(2)}
    ours = saved(tmp_path / "model.pt", state, as_zip=True)
    assert equal_values(ours["a"], ours["a"])
    assert equal_values(ours["a"], ours["same"])
    assert equal_values(ours["none"], ours["none too"])
    assert equal_values(ours["1"], ours["1"])
    for left, right in (("a", "other"), ("a", "narrow"), ("a", "flat"), ("1", "2")):
        assert not equal_values(ours[left], ours[right])


@as_zip_or_legacy
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_protocol_that_torch_writes(tmp_path, protocol, as_zip):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(3)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
    assert read_torch_file(path).content["w"].read().tolist() == [0, 1, 2]
