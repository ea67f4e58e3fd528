"""A model that this machine's memory cannot hold is refused before a worker starts.

Linux gives out more memory than there is, and then ends a process, maybe another one than ours.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lmtools.cli.options import Device, DType
from lmtools.errors import ConfigError
from lmtools.models.architectures import ModelConfig
from lmtools.parallel.launch import is_worker


def require_memory_for_model(
    config: ModelConfig, dtype: DType, device: Device | None, *, replicas: int = 1, instead: str = "--offload"
) -> None:
    """As `require_memory`, for a model that is only read: its matrices, once for each replica.

    Args:
        config: the model.
        dtype: of its parameters.
        device: as in `require_memory`.
        replicas: how many copies this machine holds.
        instead: what to do if a smaller dtype is not enough.
    """
    import torch

    from lmtools.models.size import num_matrix_elements

    require_memory(
        replicas * num_matrix_elements(config) * getattr(torch, dtype.value).itemsize,
        device=device.value if device else None,
        what=f"the model in {dtype.value}",
        advice=f"use --dtype bfloat16, or {instead}",
    )


def require_memory(num_bytes: int, *, device: str | None, what: str, advice: str) -> None:
    """On a CPU, compare what a run takes at least with what the machine has. A GPU says itself when it is full.

    Args:
        num_bytes: of all processes of the run. Workers do not ask: torchrun may have others elsewhere.
        device: as in `open_mesh`.
        what: takes them.
        advice: what to do.

    Raises:
        ConfigError: there is less.
    """
    import torch

    if is_worker() or (device or ("cuda" if torch.cuda.is_available() else "cpu")) != "cpu":
        return
    found = machine_bytes()
    if num_bytes > found:
        raise ConfigError(
            f"{what} takes {num_bytes / 2**30:,.1f} GiB at least, this machine has {found / 2**30:,.1f} GiB of memory "
            f"and swap; {advice}"
        )


def machine_bytes() -> int:
    """Memory and swap of this machine."""
    try:
        # Linux's account, in KiB.
        table = dict(re.findall(r"^(MemTotal|SwapTotal): +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
        return 1024 * (int(table["MemTotal"]) + int(table["SwapTotal"]))
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
