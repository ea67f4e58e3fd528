"""How much of what the machine can multiply a run makes use of."""

from __future__ import annotations

import math
import time

import torch


class PeakFlops:
    """What all ranks reach in bare matrix products, in operations a second, as one of them measures it.

    Args:
        device: where the ranks compute.
        dtype: what they compute in.
        num_ranks: how many there are, each as fast as this one.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, num_ranks: int) -> None:
        self._device, self._dtype, self._num_ranks = device, dtype, num_ranks
        self._highest = self._measure()

    def share(self, flops_per_second: float) -> float | None:
        """Share of the peak, at most 1; None where the peak cannot be told."""
        if flops_per_second > self._highest:
            # It was measured while others had the machine. The highest of several measurements is the least wrong.
            self._highest = max(self._highest, self._measure())
        share = flops_per_second / self._highest
        return share if share <= 1 else None

    def _measure(self) -> float:
        return matmul_flops_per_second(self._device, self._dtype) * self._num_ranks


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """What one rank reaches in a bare matrix product, the peak that utilisation is a share of; takes about 0.3 s."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    (a @ b).sum().item()
    best = math.inf
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the GPU
        best = min(best, time.perf_counter() - start)
    return float(2 * size**3 / best)
