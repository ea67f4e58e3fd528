"""Scoring windows with a model larger than the memory it is given, as `lmtools eval --offload` does.

    python benchmarks/write_megatron_11b.py FOLDER
    python benchmarks/offload_11b.py FOLDER > benchmarks/results/offload_11b.md

Random tokens; one batch of windows from the first read to the last score, which is how every batch of an evaluation
goes. Before it the files are dropped from the page cache, as far as the system does as it is told. Time in matrix
products is that spent in linear layers and in attention; disk bytes are what the kernel says this process made it
fetch; memory is the process's high-water mark, mapped pages included.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.offload import load_offloaded, windows_together
from lmtools.evaluate.scoring import make_batch, score_batch
from lmtools.models.architectures import TransformerLMConfig


@dataclass
class Measured:
    windows: int
    windows_that_fit: int
    load_seconds: float
    seconds: float
    product_seconds: float
    disk_bytes: int
    model_bytes: int
    peak_bytes: int
    loss_base2: float


class ProductClock:
    """Seconds spent in linear layers and in attention."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._started = 0.0
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._start)
                module.register_forward_hook(self._stop)
        F.scaled_dot_product_attention = self._timed(F.scaled_dot_product_attention)

    def _start(self, *_: Any) -> None:
        self._started = time.monotonic()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.monotonic() - self._started

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._start()
            result = function(*args, **kwargs)
            self._stop()
            return result

        return timed


def disk_bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure(folder: Path, *, windows: int, length: int, dtype: torch.dtype, memory_gib: float) -> Measured:
    checkpoint = open_checkpoint(folder)
    for path in checkpoint.paths:
        drop_from_page_cache(path)
    assert isinstance(checkpoint.config, TransformerLMConfig)
    fit = windows_together(checkpoint.config, memory_bytes=int(memory_gib * 2**30), length=length, dtype=dtype)
    started = time.monotonic()
    model = load_offloaded(checkpoint, torch.device("cpu"), dtype)
    loaded = time.monotonic()
    clock = ProductClock(model)
    rng = np.random.default_rng(1)
    windows = min(windows or fit, fit)
    stream = rng.integers(4, checkpoint.config.vocab_size, windows * length)
    starts = np.arange(windows) * length
    before = disk_bytes_read()
    batch = make_batch(stream, np.stack([starts, starts, starts + length], axis=1), eos_index=2)
    scores = score_batch(model, batch, torch.device("cpu"))
    return Measured(
        windows=windows,
        windows_that_fit=fit,
        load_seconds=loaded - started,
        seconds=time.monotonic() - loaded,
        product_seconds=clock.seconds,
        disk_bytes=disk_bytes_read() - before,
        model_bytes=sum(path.stat().st_size for path in checkpoint.paths),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        loss_base2=-float(scores.double().mean()) / float(np.log(2)),
    )


def report(measured: Measured, *, length: int, dtype: str, memory_gib: float, command: str) -> str:
    per_window = 1 / measured.windows
    return f"""# Scoring with a model larger than memory

torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads of \
{os.cpu_count()} cores ({platform.machine()}), load average {os.getloadavg()[0]:.1f} at the end.
Checkpoint: {measured.model_bytes:,} bytes, float16, legacy files, not in the page cache at first; computed in {dtype}.

`{command}`:

| | |
|---|---|
| windows of {length:,} tokens together | {measured.windows} |
| windows that would fit in {memory_gib:g} GiB | {measured.windows_that_fit} |
| memory high-water mark | {measured.peak_bytes / 2**30:.2f} GiB |
| seconds to open, check and load what stays | {measured.load_seconds:.1f} |
| seconds a window | {measured.seconds * per_window:.1f} |
| share of the time in matrix products | {100 * measured.product_seconds / measured.seconds:.0f} % |
| disk bytes a window | {measured.disk_bytes * per_window:,.0f} |
| disk bytes a window with as many as fit | {measured.disk_bytes / measured.windows_that_fit:,.0f} |
| loss of random tokens | {measured.loss_base2:.2f} bits |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, default=0, help="together; as many as fit if not given")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--offload-memory", type=float, default=6.0)
    args = parser.parse_args()
    measured = measure(
        args.folder,
        windows=args.windows,
        length=args.length,
        dtype=getattr(torch, args.dtype),
        memory_gib=args.offload_memory,
    )
    command = f"python benchmarks/offload_11b.py FOLDER --windows {measured.windows} --dtype {args.dtype}"
    print(report(measured, length=args.length, dtype=args.dtype, memory_gib=args.offload_memory, command=command))


if __name__ == "__main__":
    main()
