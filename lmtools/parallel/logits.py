"""What a softmax asks of logits that are split over the vocabulary, without gathering them.

Logits are DTensors `(..., V)` of which each tp rank has `(..., V/tp)`, as the layers that `parallelize` splits by
vocabulary return them. Every rank must call each function; the results, and the gradients that come back, are whole on
every rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmtools.parallel.plans import shard_bounds


class _SumOverRanks(torch.autograd.Function):
    """Each rank's share to the sum; the sum's gradient is the same on every rank, and is each share's."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _sum_over_ranks(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _SumOverRanks.apply(share, group)  # type: ignore[no-untyped-call]
    return total


def log_normalizer(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials over the whole vocabulary, `(...)`."""
    assert isinstance(logits, DTensor)
    local, group = logits.to_local(), logits.device_mesh.get_group()
    if local.shape[-1] > 0:
        highest = local.detach().amax(dim=-1)
    else:
        highest = local.new_full(local.shape[:-1], -math.inf)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = _sum_over_ranks((local - highest[..., None]).exp().sum(dim=-1), group)
    return total.log() + highest


def nll(logits: Tensor, beside: Tensor | None, labels: Tensor) -> Tensor:
    """Negative log-likelihood of each label, `(...)`.

    Args:
        logits: split, `(..., V)`.
        beside: further logits, `(..., W)`, which every rank has whole, if any.
        labels: `(...)`, rows of the whole vocabulary; those from V on are rows of `beside`.
    """
    normalizer, num_types = log_normalizer(logits), logits.shape[-1]
    chosen = pick(logits, labels.clamp(max=num_types - 1) if beside is not None else labels)
    if beside is not None:
        normalizer = torch.logaddexp(normalizer, beside.logsumexp(dim=-1))
        rows = (labels - num_types).clamp(min=0)
        chosen = torch.where(labels < num_types, chosen, beside.gather(-1, rows[..., None]).squeeze(-1))
    return normalizer - chosen


def pick(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each label, `(...)`; labels are `(...)`, rows of the whole vocabulary."""
    assert isinstance(logits, DTensor)
    mesh, local = logits.device_mesh, logits.to_local()
    start, end = shard_bounds(logits.shape[-1], mesh.size(), mesh.get_local_rank())
    if start == end:
        share = local.sum(dim=-1)  # nothing, but of the graph
    else:
        rows = (labels - start).clamp(0, end - start - 1)
        picked = local.gather(-1, rows[..., None]).squeeze(-1)
        share = picked.masked_fill((labels < start) | (labels >= end), 0.0)
    return _sum_over_ranks(share, mesh.get_group())


def whole(logits: Tensor) -> Tensor:
    """The logits as an ordinary tensor, gathered from all ranks."""
    assert isinstance(logits, DTensor)
    gathered: Tensor = logits.full_tensor()
    return gathered
