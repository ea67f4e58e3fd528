"""Where the time of an update of `lmtools train` goes: shares of one update on rank 0, by torch's profiler.

    lmtools train DATA ... --print-config > run.toml
    python benchmarks/train_profile.py run.toml
    torchrun --standalone --nproc-per-node 2 benchmarks/train_profile.py run.toml      # for --mp 2

Prints JSON: kind of work to its share of the time. An operation counts without what it calls; `python` is what passes
between operations, dispatch of distributed tensors included. `benchmarks/train_speed.py` runs this for its report.
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from lmtools.parallel.allocator import tune_cpu_memory
from lmtools.parallel.mesh import open_mesh
from lmtools.train.config import resolve
from lmtools.train.data import open_data
from lmtools.train.loop import make_update, updates
from lmtools.train.signals import StopSignal
from lmtools.train.start import start_state

UPDATE = "update"
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn*"),
    "attention": ("*scaled_dot_product*",),
    "norms and GELU": ("*layer_norm*", "aten::gelu*"),
    "loss": ("*softmax*", "*nll_loss*", "aten::exp", "aten::amax", "aten::gather"),
    "optimizer": ("*adamw*", "*foreach*", "*vector_norm*", "aten::div_"),
    "sums and copies": ("aten::add*", "aten::sum", "aten::mul*", "aten::copy_", "aten::fill_", "*embedding*"),
    "communication": ("c10d::*", "_c10d_functional::*", "gloo:*", "record_param_comms"),
}
"""Names of operations, as in fnmatch; the first kind that has one counts it."""


def kind_of(name: str) -> str:
    """The kind of work that an operation is; what has no name here is dispatch and bookkeeping."""
    for kind, patterns in KINDS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return "python"


def shares_of_an_update(config_file: Path, num_warm_up: int = 2) -> dict[str, float] | None:
    """Profile the update after `num_warm_up` others; None on ranks other than 0. Every rank must call it."""
    run = resolve(config_file, {})
    config = run.train
    with open_mesh(dp=config.dp, tp=config.mp, device=config.device) as mesh:
        data = open_data(config)
        state, _ = start_state(run, data, mesh)
        tune_cpu_memory(mesh.device)
        measured = profile(activities=[ProfilerActivity.CPU])
        for number, (update, batches) in enumerate(
            islice(updates(data, run, state.progress.position, mesh), num_warm_up + 1)
        ):
            if number == num_warm_up:
                measured.start()
            with record_function(UPDATE):
                make_update(update, batches, config, state, mesh, StopSignal())
            state.progress.position = update.after
            state.progress.num_updates += 1
        measured.stop()
        if mesh.rank != 0:
            return None
        seconds: dict[str, float] = dict.fromkeys([*KINDS, "python"], 0.0)
        for event in measured.key_averages():
            seconds[kind_of(event.key)] += event.self_cpu_time_total
        total = sum(seconds.values())
        return {kind: share / total for kind, share in seconds.items()}


if __name__ == "__main__":
    shares = shares_of_an_update(Path(sys.argv[1]))
    if shares is not None:
        print(json.dumps(shares), flush=True)
