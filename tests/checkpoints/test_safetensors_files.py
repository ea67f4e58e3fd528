"""Files that the safetensors library reads, and its files as it wrote them; broken ones are refused in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lmtools.checkpoints.safetensors_files import encode_header, read_safetensors
from lmtools.checkpoints.weights import bytes_of
from lmtools.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def some_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"matrix": (3, 5), "vector": (7,), "empty": (0, 4), "cube": (2, 3, 4)}
    return {name: (torch.randn(shape) * 3).to(dtype) for name, shape in shapes.items()}


def test_the_library_reads_what_is_written(tmp_path):
    tensors = {str(dtype): tensor for dtype in DTYPES for tensor in [some_tensors(dtype)["matrix"]]}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    header = encode_header(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, {"a": "b"})
    assert len(header) % 8 == 0
    (tmp_path / "x").write_bytes(header + b"".join(bytes_of(tensor) for tensor in tensors.values()))
    found = safetensors.torch.load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_library_writes_is_read_whole_or_in_slices(tmp_path, dtype):
    tensors = some_tensors(dtype)
    safetensors.torch.save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "x")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), dtype)
        assert torch.equal(found[name].read(), tensor)
    assert torch.equal(found["matrix"].read_slice((slice(1, 3), slice(0, 2))), tensors["matrix"][1:3, :2])


def with_header(header: bytes, values: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + values


def entry(**changes: object) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}).encode()


TWICE = entry()[:-1] + b', "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}'
BROKEN = {
    "nothing": (b"", "not a safetensors file"),
    "text": (b"a text that is long enough", "not a safetensors file"),
    "no JSON": (with_header(b"{x}"), "not a safetensors file"),
    "no UTF-8": (with_header(b'{"\xff": 1}'), "not a safetensors file"),
    "deep": (with_header(b"[" * 100_000), "not a safetensors file"),
    "no object": (with_header(b"[1]"), "its header is no object"),
    "cut short": (with_header(entry(), b"1234567"), "cut short"),
    "unknown type": (with_header(entry(dtype="F4"), b"12345678"), "x is not described"),
    "other size": (with_header(entry(shape=[3]), b"12345678"), "x is not described"),
    "negative": (with_header(entry(shape=[-2], data_offsets=[8, 0]), b"12345678"), "x is not described"),
    "no number": (with_header(entry(shape=["2"]), b"12345678"), "x is not described"),
    "bytes too many": (with_header(entry(), b"123456789"), "has .* bytes, but its tensors end at"),
    "a hole": (
        with_header(entry(data_offsets=[4, 12]), b"123456789012"),
        "x begins at byte .*, where the tensor before",
    ),
    "bytes of two": (with_header(TWICE, b"12345678"), "y begins at byte .*, where the tensor before"),
    "no entry": (with_header(b'{"x": 1}'), "x is not described"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path, case):
    content, message = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_safetensors(tmp_path / "x")
