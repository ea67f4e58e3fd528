"""Tiny training runs on the golden data, built by hand where a test needs what no option gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmtools.checkpoints.models import initializer, model_config, new_model
from lmtools.data.batches import Position
from lmtools.parallel.mesh import Mesh, make_mesh
from lmtools.parallel.parallelize import ReadSlice, seeded_values
from lmtools.train.build import build_model, build_optimizer
from lmtools.train.config import MODEL_FIELDS, Run, resolve
from lmtools.train.data import RunData, open_data
from lmtools.train.loop import UpdateResult, make_update, train, updates
from lmtools.train.metrics import METRICS_NAME, read_metrics
from lmtools.train.precision import LossScaler, parameter_dtype
from lmtools.train.report import Reporter
from lmtools.train.signals import StopSignal
from lmtools.train.start import start_state
from lmtools.train.state import Progress, TrainState

GOLDEN = Path(__file__).parent.parent / "golden"

TINY: dict[str, Any] = {
    "arch": "transformer_lm_megatron",
    "data": str(GOLDEN / "bin"),
    "tokens_per_sample": 16,
    "batch_size": 4,
    "valid_subset": "",
    "batch_size_valid": 108,
    "decoder_layers": 2,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "decoder_attention_heads": 4,
    "share_decoder_input_output_embed": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "adam_betas": (0.9, 0.98),
    "weight_decay": 0.01,
    "lr": 0.01,
    "max_update": 100,
    "log_format": "none",
    "num_workers": 0,
}
"""83 batches of 4 blocks an epoch; 144 types. Not validated; with the subset `valid`, 3 batches."""


SHAPE_OF_XL: dict[str, Any] = {
    "arch": "transformer_xl",
    "task": "truncated_bptt_lm",
    "n_layer": 2,
    "d_model": 16,
    "n_head": 2,
    "d_head": 6,
    "d_inner": 24,
    "cutoffs": (40, 80),
    "mem_len": 16,
}
TINY_XL = {name: value for name, value in TINY.items() if name not in MODEL_FIELDS} | SHAPE_OF_XL
"""As `TINY`: 83 steps of 4 streams an epoch."""


def tiny_run(**flags: Any) -> Run:
    """`TINY`, or with `arch` transformer_xl `TINY_XL`, with some fields changed."""
    return resolve(None, (TINY_XL if flags.get("arch") == "transformer_xl" else TINY) | flags)


def cpu_mesh(run: Run) -> Mesh:
    return make_mesh(torch.device("cpu"), dp=run.train.dp, tp=run.train.mp)


def state_of_noise(run: Run, mesh: Mesh, *, vocab_size: int, dtype: torch.dtype) -> TrainState:
    """A state as of a new run, but of any dtype, and with biases and norms that are not 0 and 1."""
    config = run.train
    read = noise(run, vocab_size)
    model = build_model(config, run.model, vocab_size, mesh, dtype=dtype, read=read)
    return TrainState(model, build_optimizer(model, config), LossScaler.of(config), Progress())


def noise(run: Run, vocab_size: int) -> ReadSlice:
    """Initial values that are the same on any mesh, with noise on every one of them."""

    config = model_config(run.model, vocab_size)

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        initializer(config)(name, tensor, generator)
        tensor.add_(torch.empty_like(tensor).normal_(0, 0.1, generator=generator))

    with torch.device("meta"):
        model = new_model(config)
    return seeded_values(model, fill, seed=3)


def advance(run: Run, data: RunData, state: TrainState, mesh: Mesh, num_updates: int) -> list[UpdateResult]:
    """Make updates from the state's position on, as the loop does, without its reports and checkpoints."""
    results = []
    progress = state.progress
    for update, batches in islice(updates(data, run, progress.position, mesh), num_updates):
        result = make_update(update, batches, run.train, state, mesh, StopSignal())
        state.scaler.update(overflow=result.skipped is not None)
        progress.position = update.after
        progress.num_updates += result.skipped is None
        progress.num_skipped += result.skipped is not None
        results.append(result)
    return results


@dataclass(frozen=True)
class Leg:
    """What a run has come to when it ended.

    Attributes:
        received: the signal that ended it, or 0.
        tensors: all of a checkpoint's, whole.
        progress: without the time.
        loss_scaler: its counters.
        origin: where the run started from.
    """

    received: int
    tensors: dict[str, Tensor]
    progress: dict[str, Any]
    loss_scaler: dict[str, float]
    origin: str


def train_a_leg(flags: dict[str, Any], stop: StopSignal | None = None) -> Leg:
    """A whole run on the ranks that there are, as the command makes it. Every rank must call it."""
    run = tiny_run(**flags)
    mesh = cpu_mesh(run)
    data = open_data(run.train)
    report = Reporter(run, mesh, len(data.dictionary))
    try:
        state, origin = start_state(run, data, mesh)
        report.begin(state.progress, origin, 0, parameter_dtype(run.train), is_continued=state.is_continued)
        received = train(run, data, state, mesh, report, stop or StopSignal())
    finally:
        report.close()
    progress = asdict(state.progress)
    del progress["seconds"]
    return Leg(received, whole_state(state), progress, state.scaler.state_dict(), origin)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without what depends on the clock."""
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "update_seconds")}
        for line in read_metrics(folder / METRICS_NAME)
    ]


def whole(tensor: Tensor) -> Tensor:
    """A tensor of its own with all shards. Every rank must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_state(state: TrainState) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole. Every rank must call it."""
    return {name: whole(tensor) for name, tensor in state.tensors().items()}


def start_near_the_end_of_the_epoch(state: TrainState, data: RunData, num_batches_left: int) -> None:
    state.progress.position = Position(1, len(data.batches(1)) - num_batches_left)
