"""What becomes of freed memory, and of kernels, where a model runs on CPUs.

glibc gives a large block back to the kernel as soon as it is freed, and the next one of that size is faulted in and
zeroed page by page. Every update of training frees and asks again for all its activations: 6 layers, d 512 and 4 blocks
of 1,024 tokens are 170,000 page faults an update, 0.3 s of system time in 4 s on 2 cores. GPUs are not concerned:
there torch keeps freed memory itself.

In bfloat16 torch keeps a kernel for each shape of a product, 1,024 of them: windows of many lengths, as of
`--sample-break-mode eos`, took 2 GB for these.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

_KERNEL_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""oneDNN reads these variables when it first computes."""


def tune_cpu_memory(device: torch.device) -> None:
    """Have this process keep what it frees and use it again, and keep few kernels, if it computes on a CPU.

    How many kernels is for the environment to say, if it does. The process holds its high-water mark until it ends, so
    call it when the model is loaded and what loading needed is free. Without glibc nothing is kept but the kernels.

    Args:
        device: where this rank computes.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return
    for name, capacity in _KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
