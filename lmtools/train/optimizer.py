"""Adam and SGD as fairseq has them, on whole and on sharded parameters, in any precision; Adafactor stands beside.

They are ordinary `torch.optim.Optimizer`s whose state tensors are laid out as their parameter, so that
`torch.distributed.checkpoint` saves them and loads them on another mesh. Three things are their own:

- A DTensor is updated through its local shard: the arithmetic is elementwise.
- Parameters in float16 or bfloat16 are updated in float32, on a copy that is part of the state (`master`) or, with
  `master_weights=False`, on the parameter itself, which is then rounded (fairseq's memory-efficient optimizers).
- `step(grad_scale=...)` divides the gradients by all that they were multiplied by: the loss scale, the number of
  tokens, the clipping. It is done in float32, where fairseq's memory-efficient optimizers do it in float16 and lose
  again what the loss scale had saved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LOW_PRECISION = (torch.float16, torch.bfloat16)


class ShardedOptimizer(torch.optim.Optimizer):
    """What all share: local shards, float32 for low precision, and state that keeps its dtype when loaded."""

    def __init__(self, parameters: Iterable[nn.Parameter], defaults: dict[str, Any], master_weights: bool) -> None:
        super().__init__(parameters, defaults)
        self.master_weights = master_weights

    def _new_state(self, parameter: Tensor, dtype: torch.dtype, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first update, in `dtype` and laid out as the parameter."""
        raise NotImplementedError

    def _update(
        self, group: dict[str, Any], parameters: list[nn.Parameter], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update `weights`, local and of full precision, in place; `parameters` are the keys of their state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Every rank that holds a part of the parameters must call it.

        Args:
            closure: computes the loss again, as for any torch optimizer; not needed.
            grad_scale: the gradients are divided by it first, those in full precision in place.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if parameter not in self.state:
                    self._init_state(parameter, group)
            full = [parameter for parameter in parameters if parameter.dtype not in LOW_PRECISION]
            if full:
                grads = [local_grad(parameter) for parameter in full]
                if grad_scale != 1.0:
                    torch._foreach_div_(grads, grad_scale)
                self._update(group, full, [local_shard(parameter) for parameter in full], grads)
            # One at a time, so that no more than one gradient exists in float32.
            for parameter in parameters:
                if parameter.dtype in LOW_PRECISION:
                    weight = local_shard(self.state[parameter].get("master", parameter)).float()
                    grad = local_grad(parameter).float().div_(grad_scale)
                    self._update(group, [parameter], [weight], [grad])
                    local_shard(parameter).copy_(weight)
        return loss

    @torch.no_grad()
    def create_state(self) -> None:
        """Make the state that is not there yet, for a checkpoint to be saved from or loaded into before any update.

        Without it `torch.distributed.checkpoint` makes an update with gradients of 0, which counts as one. Master
        weights are copies of the parameters as they are now: give these their values first.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self.state:
                    self._init_state(parameter, group)

    def _init_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        dtype = torch.float32 if parameter.dtype in LOW_PRECISION else parameter.dtype
        state = self._new_state(parameter, dtype, group)
        if self.master_weights and parameter.dtype in LOW_PRECISION:
            state["master"] = parameter.detach().float()
        self.state[parameter] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of each parameter as it was saved, float32 beside float16 parameters included.

        The options (lr, betas, ...) stay those that this optimizer was made with: a run means what its configuration
        says.
        """
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, parameter in zip(saved, own, strict=True):
            if name in state_dict["state"]:
                self.state[parameter] = {
                    key: value.cpu() if key == "step" else value.to(parameter.device)
                    for key, value in state_dict["state"][name].items()
                }


class Adam(ShardedOptimizer):
    """Adam with decoupled weight decay, by fairseq's formulas (fairseq/optim/adam.py; arXiv:1412.6980, 1711.05101).

    The decay `p -= weight_decay * lr * p` comes before the step, on every parameter; `eps` is added to the root of the
    uncorrected second moment: `p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master_weights: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults, master_weights)

    def _new_state(self, parameter: Tensor, dtype: torch.dtype, group: dict[str, Any]) -> dict[str, Tensor]:
        return {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
        }

    def _update(
        self, group: dict[str, Any], parameters: list[nn.Parameter], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        beta1, beta2 = group["betas"]
        by_step: defaultdict[int, list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            self.state[parameter]["step"] += 1
            by_step[int(self.state[parameter]["step"])].append(index)
        for step, indices in by_step.items():
            states = [self.state[parameters[index]] for index in indices]
            # torch's fused kernel divides sqrt(v) by the correction before it adds eps: give it an eps for after.
            eps = group["eps"] / math.sqrt(1 - beta2**step)
            torch._fused_adamw_(
                [weights[index] for index in indices],
                [grads[index] for index in indices],
                [local_shard(state["exp_avg"]) for state in states],
                [local_shard(state["exp_avg_sq"]) for state in states],
                [],
                [torch.tensor(float(step), device=weights[0].device)] * len(indices),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=eps,
                amsgrad=False,
                maximize=False,
            )


class SGD(ShardedOptimizer):
    """Stochastic gradient descent as torch.optim.SGD, which fairseq uses: the weight decay is part of the gradient."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        master_weights: bool = True,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, master_weights)

    def _new_state(self, parameter: Tensor, dtype: torch.dtype, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=dtype)} if group["momentum"] else {}

    def _update(
        self, group: dict[str, Any], parameters: list[nn.Parameter], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        momentum = group["momentum"]
        buffers = (
            [local_shard(self.state[parameter]["momentum_buffer"]) for parameter in parameters] if momentum else []
        )
        torch._fused_sgd_(
            weights,
            grads,
            buffers,
            lr=group["lr"],
            momentum=momentum,
            weight_decay=group["weight_decay"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a DTensor, not a copy, or the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_grad(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter's gradient, which is laid out as the parameter from then on.

    A change of it is one of the gradient. Where each rank has an addend of the gradient, as of a norm's weight under
    sequence parallelism, the ranks add them up: all must call it.
    """
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return local_shard(grad)
