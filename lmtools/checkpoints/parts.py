"""Parameters that lie in parts: a mapping of lazy tensors for each tensor-parallel rank they were written for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmtools.checkpoints.lazy_tensor import LazyTensor, equal_values
from lmtools.errors import CheckpointError
from lmtools.parallel.plans import Plan, split_of

Parts = Sequence[Mapping[str, LazyTensor]]


def read_from_parts(parts: Parts, plan: Plan, name: str, slices: tuple[slice, ...]) -> Tensor:
    """Read part of a whole parameter, from whichever parts hold it.

    Args:
        parts: parameter name to lazy tensor, for each part.
        plan: how the parameters are split over the parts.
        name: the parameter.
        slices: one for each dimension, with plain bounds.

    Returns:
        A tensor of its own, in the dtype that the file stores.
    """
    dim = split_of(name, plan).dim
    if dim is None:
        return parts[0][name].read_slice(slices)
    pieces = []
    offset = 0
    for part in parts:
        tensor = part[name]
        length = tensor.shape[dim]
        start = max(slices[dim].start - offset, 0)
        stop = min(slices[dim].stop - offset, length)
        if start < stop:
            pieces.append(tensor.read_slice((*slices[:dim], slice(start, stop), *slices[dim + 1 :])))
        offset += length
    if not pieces:  # more ranks than rows: the last ones have none
        return parts[0][name].read_slice((*slices[:dim], slice(0, 0), *slices[dim + 1 :]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def drifted_replicas(parts: Parts, plan: Plan, part: int) -> list[str]:
    """Names of the replicated parameters of one part that differ from those of part 0."""
    if part == 0:
        return []
    return [
        name
        for name, tensor in parts[part].items()
        if split_of(name, plan).dim is None and not equal_values(tensor, parts[0][name])
    ]


def require_equal_replicas(parts: Parts, plan: Plan, paths: Sequence[Path], part: int) -> None:
    """Refuse a part whose replicated parameters are not those of part 0.

    Raises:
        CheckpointError: names the first of them and the files.
    """
    for name in drifted_replicas(parts, plan, part)[:1]:
        raise CheckpointError(
            f"{paths[part]}: {name} is replicated but differs from the one in {paths[0].name}; "
            "the parts are not of one training step"
        )


def require_no_copy(parts: Parts, plan: Plan, paths: Sequence[Path], part: int) -> None:
    """Refuse a part that is an earlier one under another name: nothing else says which rank's share it holds.

    Raises:
        CheckpointError: names both files.
    """
    split = [name for name in parts[part] if split_of(name, plan).dim is not None]
    split.sort(key=lambda name: parts[part][name].num_bytes)  # small ones tell most parts apart
    for earlier in range(part):
        same = all(equal_values(parts[part][name], parts[earlier][name]) for name in split)
        if same and any(_varies(parts[part][name]) for name in split):  # a model of zeros, made for a trial, is none
            raise CheckpointError(
                f"{paths[part]}: holds the same share of the model as {paths[earlier].name}; one of them is a copy "
                "under a wrong name, fetch it again"
            )


def _varies(tensor: LazyTensor) -> bool:
    """Whether the beginning of a tensor holds more than one value."""
    first = tensor.read_slice(tuple(slice(0, min(length, 64)) for length in tensor.shape)).flatten()
    return bool((first != first[:1]).any())


def dtypes_of_parts(parts: Parts, paths: Sequence[Path]) -> dict[str, torch.dtype]:
    """The dtype of each parameter.

    Raises:
        CheckpointError: it is not the same in all parts.
    """
    dtypes = {name: tensor.dtype for name, tensor in parts[0].items()}
    for path, part in zip(paths, parts, strict=True):
        for name, tensor in part.items():
            if tensor.dtype != dtypes[name]:
                raise CheckpointError(f"{path}: {name} is {tensor.dtype}, but {dtypes[name]} in {paths[0].name}")
    return dtypes
