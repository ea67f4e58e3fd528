"""A model's parameters as a writer sees them: shapes and dtypes now, bytes when they are asked for, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.parallelize import ReadSlice, without_memory
from lmtools.parallel.plans import Plan, shard_bounds, split_of

Progress = Callable[[int], None]
"""Called with the number of bytes that were just read or written."""

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Weights:
    """A model whose parameters are somewhere else.

    Attributes:
        config: the model.
        shapes: of each whole parameter, in the model's order; tied parameters once.
        dtypes: what each is to be written as.
        read: gives any slice of any whole parameter.
    """

    config: TransformerLMConfig
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: ReadSlice

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(math.prod(shape) for shape in self.shapes.values())


class Writer(Protocol):
    """Writes the files of a checkpoint, of which a few megabytes are in memory at a time."""

    def __call__(
        self, folder: Path, weights: Weights, *, num_parts: int, origin: Mapping[str, Any], progress: Progress
    ) -> list[Path]:
        """Write them.

        Args:
            folder: where to; it exists.
            weights: the model.
            num_parts: how many tensor-parallel parts to make of it.
            origin: what the model was made from, as JSON values, to be kept with it.
            progress: called with the number of bytes that were just written.

        Returns:
            The files that hold parameters, in the order of the parts.

        Raises:
            ConfigError: the format does not have this model, or not in so many parts.
        """


def weights_of(
    config: TransformerLMConfig, read: ReadSlice, dtypes: Mapping[str, torch.dtype] | torch.dtype
) -> Weights:
    """The parameters of a model of this configuration, given how to read them and their dtypes, or one for all."""
    with without_memory():
        shapes = {name: tuple(parameter.shape) for name, parameter in TransformerLM(config).named_parameters()}
    if isinstance(dtypes, torch.dtype):
        dtypes = dict.fromkeys(shapes, dtypes)
    return Weights(config, shapes, {name: dtypes[name] for name in shapes}, read)


def part_slices(name: str, shape: Sequence[int], plan: Plan, num_parts: int, part: int) -> tuple[slice, ...]:
    """Which slice of a whole parameter belongs to one of `num_parts` parts."""
    slices = [slice(0, length) for length in shape]
    dim = split_of(name, plan).dim
    if dim is not None:
        slices[dim] = slice(*shard_bounds(shape[dim], num_parts, part))
    return tuple(slices)


def shape_of(slices: Sequence[slice]) -> tuple[int, ...]:
    """The shape of what slices with plain bounds select."""
    return tuple(piece.stop - piece.start for piece in slices)


def row_blocks(slices: tuple[slice, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """The same selection in runs of rows of a few megabytes; it has one dimension or more."""
    first, *rest = slices
    row_bytes = itemsize * math.prod(shape_of(rest))
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for start in range(first.start, first.stop, step):
        yield (slice(start, min(start + step, first.stop)), *rest)


def stream_bytes(weights: Weights, name: str, slices: tuple[slice, ...]) -> Iterator[memoryview]:
    """The bytes of part of a parameter as they go into a file, row by row and little-endian.

    Raises:
        CheckpointError: a value is too large for the dtype that it is to be written as.
    """
    dtype = weights.dtypes[name]
    for block in row_blocks(slices, dtype.itemsize):
        yield bytes_of(converted(weights.read(name, block), dtype, name))


def converted(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Values in another dtype.

    Raises:
        CheckpointError: a finite value would become infinite.
    """
    result = values.to(dtype)
    if dtype != values.dtype and bool((result.isinf() & ~values.isinf()).any()):
        largest = values[~values.isinf()].abs().max().item()
        raise CheckpointError(
            f"{name}: holds {largest:.6g}, too large for {str(dtype).removeprefix('torch.')}; use --dtype bfloat16 or "
            "float32"
        )
    return result


def bytes_of(values: Tensor) -> memoryview:
    """A tensor's elements, row by row."""
    return memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
