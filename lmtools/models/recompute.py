"""What training keeps of a layer's work, where memory is short: its input, and that on the device or on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

Output = TypeVar("Output")


def recomputed(layer: Callable[[Tensor], Output], x: Tensor, *, offload: bool) -> Output:
    """Run a layer, keep its input alone, and compute the rest again in the backward pass.

    Args:
        layer: what it takes beside `x` is bound to it, and stays where it is.
        x: its input.
        offload: keep the input in the host's memory, page-locked where there is a GPU, so that copies both ways go on
            beside the computing. On a CPU that is a copy more, and the same numbers.

    Returns:
        What the layer returns.
    """
    with save_on_cpu(pin_memory=True) if offload else nullcontext():
        output: Output = checkpoint(layer, x, use_reentrant=False)
    return output


def on_host(tensor: Tensor) -> Tensor:
    """The values in the host's memory, page-locked; a tensor that is there already, as it is.

    The copy may still be on its way: it is there for what the same device does next, `Tensor.to` it included.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
