"""Everything that a run carries from update to update, and how it starts: new, resumed, or from another's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmtools.checkpoints.fairseq import FairseqCheckpoint, open_fairseq
from lmtools.checkpoints.fairseq_training import FairseqTraining, read_fairseq_training
from lmtools.checkpoints.training import is_training_checkpoint, load_tensors, read_record, tensor_shapes
from lmtools.data.batches import Position
from lmtools.errors import CheckpointError
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.parallelize import local_slices
from lmtools.train.build import build_model, build_optimizer
from lmtools.train.config import Run, TrainConfig
from lmtools.train.data import RunData
from lmtools.train.optimizer import ShardedOptimizer, local_shard
from lmtools.train.precision import LossScaler, parameter_dtype


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        num_updates: steps that the optimizer has made.
        position: place in the data, which also moves on when an update is skipped.
        seconds: time spent, earlier legs of a resumed run included.
        best_loss: the lowest validation loss, in bits, or None before the first validation.
        validations_since_best: how many validations came after it.
        schedule_offset: added to the update's number for the learning rate; set by `--reset-lr-scheduler`.
    """

    num_updates: int = 0
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    best_loss: float | None = None
    validations_since_best: int = 0
    schedule_offset: int = 0


@dataclass
class TrainState:
    """Model, optimizer, loss scale and progress of this rank."""

    model: TransformerLM
    optimizer: ShardedOptimizer
    scaler: LossScaler
    progress: Progress

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, tied parameters once."""
        return list(self.model.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """This rank's share of all tensors of a checkpoint, by name."""
        named: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            named[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                named[f"optimizer.{name}.{key}"] = value
        return named

    def record(self, run: Run, data: RunData) -> dict[str, Any]:
        """What a checkpoint holds beside the tensors, as JSON values."""
        return {
            "progress": asdict(self.progress),
            "loss_scaler": self.scaler.state_dict(),
            "train": asdict(run.train),
            "model": {"vocab_size": self.model.config.vocab_size, **run.model},
            "dictionary_sha256": data.dictionary.sha256,
        }


def start_state(run: Run, data: RunData, mesh: Mesh) -> tuple[TrainState, str]:
    """Build the state that the run begins with. Every rank must call it.

    Returns:
        The state, and one line that says where it comes from.

    Raises:
        CheckpointError: a checkpoint that is asked for is not there, is broken or does not fit the run.
    """
    config = run.train
    last = Path(config.save_dir) / "checkpoint_last"
    if config.resume == "auto" and is_training_checkpoint(last):
        return _resumed(run, data, mesh, last, everything=True), f"resumed from {last.resolve()}"
    if config.restore_file is not None:
        if is_training_checkpoint(config.restore_file):
            state = _resumed(run, data, mesh, Path(config.restore_file), everything=False)
            return state, f"restored from {config.restore_file}"
        return _from_fairseq(run, data, mesh, config.restore_file), f"restored from {config.restore_file}"
    if config.finetune_from is not None:
        return _finetuned(run, data, mesh, config.finetune_from), f"weights from {config.finetune_from}"
    return _new(run, len(data.dictionary), mesh), f"new, from seed {config.seed}"


def _new(run: Run, vocab_size: int, mesh: Mesh, checkpoint: FairseqCheckpoint | None = None) -> TrainState:
    config = run.train
    dtype = parameter_dtype(config)
    read = checkpoint.read if checkpoint is not None else None
    model = build_model(config, run.model, vocab_size, mesh, dtype=dtype, read=read)
    return TrainState(model, build_optimizer(model, config), LossScaler.of(config), Progress())


def _resumed(run: Run, data: RunData, mesh: Mesh, path: Path, *, everything: bool) -> TrainState:
    config = run.train
    record = read_record(path)
    if record["dictionary_sha256"] != data.dictionary.sha256:
        raise CheckpointError(f"{path}: was trained with another dictionary than {config.data}/dict.txt")
    saved_model = {key: value for key, value in record["model"].items() if key != "vocab_size"}
    for key, value in run.model.items():
        if saved_model.get(key) != value and "dropout" not in key:
            raise CheckpointError(f"{path}: has {key} {saved_model.get(key)!r}, this run has {value!r}")
    state = _new(run, record["model"]["vocab_size"], mesh)
    state.optimizer.create_state()
    wanted = state.tensors()
    if config.reset_optimizer and not everything:
        wanted = {name: tensor for name, tensor in wanted.items() if name.startswith("model.")}
    else:
        _require_same_optimizer(path, wanted)
    with torch.no_grad():
        load_tensors(path, wanted, mesh)
    if config.reset_optimizer and not everything:
        state.optimizer.state.clear()
    else:
        state.scaler.load_state_dict(record["loss_scaler"])
    state.progress = _progress(record["progress"], config, everything=everything)
    return state


def _require_same_optimizer(path: Path, wanted: Mapping[str, Tensor]) -> None:
    saved = tensor_shapes(path)
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            f"{path}: has no {missing[0]}: it was trained with another optimizer or precision; "
            "start from its weights with --restore-file and --reset-optimizer"
        )


def _progress(saved: Mapping[str, Any], config: TrainConfig, *, everything: bool) -> Progress:
    progress = Progress(**{**saved, "position": Position(**saved["position"])})
    if everything:
        return progress
    if config.reset_lr_scheduler:
        progress.schedule_offset = -progress.num_updates
    if config.reset_dataloader:
        progress.position = Position()
    if config.reset_meters:
        progress.seconds, progress.best_loss, progress.validations_since_best = 0.0, None, 0
    return progress


def _finetuned(run: Run, data: RunData, mesh: Mesh, path: str) -> TrainState:
    if not is_training_checkpoint(path):
        checkpoint = _open_fitting(run, data, path)
        return _new(run, checkpoint.config.vocab_size, mesh, checkpoint)
    state = _new(run, read_record(path)["model"]["vocab_size"], mesh)
    weights = {name: tensor for name, tensor in state.tensors().items() if name.startswith("model.")}
    with torch.no_grad():
        load_tensors(path, weights, mesh)
    return state


def _from_fairseq(run: Run, data: RunData, mesh: Mesh, path: str) -> TrainState:
    """Weights, Adam's moments and progress of a fairseq run, whatever its number of parts."""
    config = run.train
    checkpoint = _open_fitting(run, data, path)
    state = _new(run, checkpoint.config.vocab_size, mesh, checkpoint)
    if config.reset_optimizer:
        num_updates, position = 0, Position()
    else:
        training = read_fairseq_training(checkpoint)
        num_updates, position = training.num_updates, Position(training.epoch, training.num_batches)
        if training.moments:
            _load_moments(state, training, path)
    state.progress = Progress(num_updates=num_updates, position=Position() if config.reset_dataloader else position)
    if config.reset_lr_scheduler:
        state.progress.schedule_offset = -num_updates
    return state


def _load_moments(state: TrainState, training: FairseqTraining, path: str) -> None:
    state.optimizer.create_state()
    for name, parameter in state.model.named_parameters():
        values = state.optimizer.state[parameter]
        if not values.keys() >= {"step", *training.moments}:
            raise CheckpointError(f"{path}: holds Adam's state; use --optimizer adam, or --reset-optimizer")
        values["step"].fill_(training.adam_step)
        slices = local_slices(parameter, parameter.shape)
        for key, checkpoint in training.moments.items():
            local_shard(values[key]).copy_(checkpoint.read(name, slices))


def _open_fitting(run: Run, data: RunData, path: str) -> FairseqCheckpoint:
    """A fairseq checkpoint of the run's shape and dictionary."""
    checkpoint = open_fairseq(path)
    saved = asdict(checkpoint.config)
    for key, value in run.model.items():
        if saved[key] != value and "dropout" not in key:
            raise CheckpointError(f"{path}: has {key} {saved[key]!r}, this run has {value!r}")
    if checkpoint.config.vocab_size < len(data.dictionary):
        raise CheckpointError(
            f"{path}: its embedding has {checkpoint.config.vocab_size} rows, {run.train.data}/dict.txt has "
            f"{len(data.dictionary)} types; this is not the dictionary of the checkpoint"
        )
    return checkpoint
