"""One micro-step and what follows it: loss, gradients over the mesh, their norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.data.streams import IGNORED
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import Mesh
from lmtools.train.batch import Batch
from lmtools.train.memory import Memories
from lmtools.train.optimizer import local_grad


def loss_sum(
    model: nn.Module, batch: Batch, device: torch.device, memories: Memories = None
) -> tuple[Tensor, Memories]:
    """Negative log-likelihood of a batch, in nats, summed over its targets; float32 or wider.

    Logits that are split over the vocabulary stay split: call it, and backward on its result, under `loss_parallel`.

    Args:
        model: tokens `(B, T)` to logits `(B, T, V)`, or a Transformer-XL.
        batch: from `make_batch`.
        device: where the model is.
        memories: of a Transformer-XL, from the step before.

    Returns:
        The loss, and the memory for the next step.
    """
    tokens, targets = (ids.to(device, non_blocking=True) for ids in (batch.tokens, batch.targets))
    if isinstance(model, TransformerXL):
        nll, memories = model(tokens, targets, memories)
        return nll.sum(), memories
    logits = model(tokens).flatten(0, 1)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED), None


def forward_backward(
    model: nn.Module, batch: Batch, device: torch.device, *, loss_scale: float, memories: Memories = None
) -> tuple[Tensor, Memories]:
    """Add a batch's gradients, times `loss_scale`, to those that the parameters have. Every rank must call it.

    Returns:
        The unscaled loss sum in nats, float64 scalar on the model's device, the same on all tp ranks; and the memory
        for the next step, without gradient.
    """
    with loss_parallel():
        loss, memories = loss_sum(model, batch, device, memories)
        (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
    value = loss.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).double(), memories


def sum_gradients_over_dp(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Add up the replicas' gradients, in place, where replicas are whole (`--zero 0`). Every rank must call it."""
    if mesh.dp_mesh is None:
        return
    gradients = [local_grad(parameter) for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients, 64 << 20):
        flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
        dist.all_reduce(flat, group=mesh.dp_mesh.get_group())
        summed = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(bucket, summed)


def _buckets(tensors: Sequence[Tensor], max_bytes: int) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> float:
    """The true global 2-norm of the gradients, each element counted once however many ranks hold it.

    fairseq counts a replicated parameter once for every tensor-parallel rank. Every rank must call it.

    Returns:
        The same number on every rank; inf or nan if any gradient has one.
    """
    groups: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_num_copies(parameter, mesh), []).append(local_grad(parameter))
    squared = torch.zeros((), dtype=torch.float64)
    for num_copies, gradients in groups.items():
        norms = torch._foreach_norm(gradients, 2, dtype=_accumulation_dtype(gradients[0]))
        squared += torch.stack(list(norms)).double().square().sum().cpu() / num_copies
    if mesh.world_size > 1:
        dist.all_reduce(squared)
    return math.sqrt(squared.item()) if math.isfinite(squared.item()) else squared.item()


def _accumulation_dtype(gradient: Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype


def _num_copies(parameter: nn.Parameter, mesh: Mesh) -> int:
    """On how many ranks each element of a parameter lives."""
    if not isinstance(parameter, DTensor):
        return mesh.world_size
    num_pieces = 1
    for mesh_dim, placement in enumerate(parameter.placements):
        # Not `is_shard`, which is false for the placement of a dimension that dp and tp both cut.
        if getattr(placement, "dim", None) is not None:
            num_pieces *= parameter.device_mesh.size(mesh_dim)
    return mesh.world_size // num_pieces


def sum_over_ranks(values: Sequence[float], mesh: Mesh) -> list[float]:
    """Add up some numbers over all ranks, in float64. Every rank must call it."""
    total = torch.tensor(values, dtype=torch.float64)
    if mesh.world_size > 1:
        dist.all_reduce(total)
    return list(total.tolist())
