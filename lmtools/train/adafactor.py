"""Adafactor as fairseq has it, on whole and on sharded parameters; see `lmtools.train.optimizer` for what all share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lmtools.train.optimizer import ShardedOptimizer, local_shard


class Adafactor(ShardedOptimizer):
    """Adafactor by fairseq's formulas (fairseq/optim/adafactor.py; arXiv:1804.04235), at the schedule's rate.

    The second moment of a matrix is kept as the means of its rows and of its columns. fairseq's `relative_step` and
    `warmup_init` are left out: its command line cannot use them, it refuses them beside an lr, which it always has.

    Args:
        parameters: what to update.
        lr: learning rate.
        eps: added to the squared gradient; least root mean square of a parameter that `scale_parameter` reckons with.
        clip_threshold: the update's root mean square is cut to it.
        decay_rate: the second moment's decay at update t is `1 - t ** decay_rate`.
        beta1: decay of the first moment; None keeps none.
        weight_decay: decoupled, as Adam's.
        scale_parameter: multiply the rate by the parameter's root mean square. fairseq multiplies the one rate of all
            parameters again for each of them; here each parameter has its own.
        master_weights: keep float32 copies of float16 and bfloat16 parameters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float = 1e-3,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = False,
        master_weights: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
        }
        super().__init__(parameters, defaults, master_weights)

    def _new_state(self, parameter: Tensor, dtype: torch.dtype, group: dict[str, Any]) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0.0)}
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
        if parameter.ndim >= 2:
            state["exp_avg_sq_row"] = _zeros_without_dim(parameter, parameter.ndim - 1, dtype)
            state["exp_avg_sq_col"] = _zeros_without_dim(parameter, parameter.ndim - 2, dtype)
        else:
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        return state

    def _update(
        self, group: dict[str, Any], parameters: list[nn.Parameter], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        for parameter, weight, grad in zip(parameters, weights, grads, strict=True):
            state = self.state[parameter]
            state["step"] += 1
            lr = group["lr"]
            if group["scale_parameter"]:
                lr *= max(group["eps"][1], _root_mean_square(weight, parameter).item())
            update = grad.mul_(_inverse_root_moment(grad, parameter, state, group))
            update.mul_(lr / (_root_mean_square(update, parameter) / group["clip_threshold"]).clamp(min=1.0))
            if group["beta1"] is not None:
                update = local_shard(state["exp_avg"]).lerp_(update, 1 - group["beta1"])
            weight.mul_(1 - group["weight_decay"] * lr).sub_(update)


def _inverse_root_moment(grad: Tensor, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """Take a gradient into the second moment; return the moment ** -0.5, factored or not, for the local shard."""
    new = float(state["step"]) ** group["decay_rate"]
    square = grad.square().add_(group["eps"][0])
    if grad.ndim < 2:
        return local_shard(state["exp_avg_sq"]).lerp_(square, new).rsqrt()
    row, col = local_shard(state["exp_avg_sq_row"]), local_shard(state["exp_avg_sq_col"])
    last, before = grad.ndim - 1, grad.ndim - 2
    row.lerp_(_sum_over(square.sum(last), parameter, last) / parameter.shape[last], new)
    col.lerp_(_sum_over(square.sum(before), parameter, before) / parameter.shape[before], new)
    mean_of_rows = _sum_over(row.sum(-1, keepdim=True), parameter, before) / parameter.shape[before]
    return (row / mean_of_rows).rsqrt_().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)


def _root_mean_square(local: Tensor, parameter: Tensor) -> Tensor:
    return (_sum_over(local.square().sum(), parameter, None) / parameter.numel()).sqrt_()


def _sum_over(partial: Tensor, parameter: Tensor, dim: int | None) -> Tensor:
    """Add up, in place, what the ranks have of a sum over one dimension of a parameter, or over all of them."""
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            shard_dim = _shard_dim(placement)
            if shard_dim is not None and dim in (None, shard_dim):
                dist.all_reduce(partial, group=parameter.device_mesh.get_group(mesh_dim))
    return partial


def _shard_dim(placement: Placement) -> int | None:
    # Not `is_shard`, which is false for the placement of a dimension that is cut by dp and tp both.
    return getattr(placement, "dim", None)


def _zeros_without_dim(parameter: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros of the parameter's shape without one dimension, cut over the ranks as the parameter is."""
    local = local_shard(parameter)
    zeros = torch.zeros([*local.shape[:dim], *local.shape[dim + 1 :]], dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    placements: list[Placement] = []
    for placement in parameter.placements:
        shard_dim = _shard_dim(placement)
        if shard_dim == dim:
            placements.append(Replicate())
        elif shard_dim is not None and shard_dim > dim:
            placements.append(Shard(shard_dim - 1))
        else:
            placements.append(placement)
    shape = torch.Size([*parameter.shape[:dim], *parameter.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)
