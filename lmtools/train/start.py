"""How a run starts: new, resumed, restored, or from another's weights.

`find_origin` decides which, and refuses all that can be refused without building a model: the command asks it before
any worker starts. `start_state` builds the state on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lmtools.checkpoints.fairseq import FairseqCheckpoint
from lmtools.checkpoints.fairseq_training import FairseqTraining, read_fairseq_training
from lmtools.checkpoints.load import open_torch_files, require_rows_on_every_rank
from lmtools.checkpoints.models import model_config
from lmtools.checkpoints.training import is_training_checkpoint, load_tensors, read_record
from lmtools.checkpoints.training_index import tensor_shapes
from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint, is_transformers_folder, open_transformer_xl
from lmtools.data.batches import Position, require_batches_left
from lmtools.errors import CheckpointError
from lmtools.parallel.launch import is_restarted, run_id
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.parallelize import ReadSlice, local_slices
from lmtools.train.build import build_model, build_optimizer
from lmtools.train.checkpoints import BEST, LAST
from lmtools.train.config import Run, TrainConfig
from lmtools.train.data import RunData
from lmtools.train.memory import load_memories
from lmtools.train.optimizer import local_shard
from lmtools.train.precision import LossScaler, parameter_dtype
from lmtools.train.start_checks import (
    of_other_batches,
    require_all_tensors,
    require_same_model,
    require_same_optimizer,
    require_same_streams,
)
from lmtools.train.state import Progress, TrainState


@dataclass(frozen=True)
class SavedRun:
    """What lmtools' checkpoint holds beside the tensors."""

    progress: Progress
    loss_scaler: Mapping[str, Any]
    model: Mapping[str, Any]
    dictionary_sha256: str


@dataclass(frozen=True)
class Origin:
    """Where a run starts from.

    Attributes:
        kind: `new`; `resumed` from the run's own last checkpoint; `restored` from any checkpoint, as far as --reset-*
            says; `weights` of a checkpoint, with all else new.
        path: the checkpoint.
        vocab_size: rows of the model's embedding.
        saved: what lmtools' checkpoint says of itself.
        note: what else is to be said of it, in words that follow its name.
        fairseq: fairseq's checkpoint, or another program's Transformer-XL.
        fairseq_training: what it holds beside the weights.
    """

    kind: Literal["new", "resumed", "restored", "weights"]
    path: Path | None
    vocab_size: int
    saved: SavedRun | None = None
    note: str = ""
    fairseq: FairseqCheckpoint | TransformerXLCheckpoint | None = None
    fairseq_training: FairseqTraining | None = None


def find_origin(run: Run, data: RunData) -> Origin:
    """Decide where the run starts from and check that it fits, without reading a tensor.

    Raises:
        CheckpointError: a checkpoint that is asked for is not there, is broken or does not fit the run.
        ConfigError: --mp leaves a rank without rows of the vocabulary.
    """
    origin = _find_origin(run, data)
    require_rows_on_every_rank(model_config(run.model, origin.vocab_size), run.train.mp)
    return origin


def _find_origin(run: Run, data: RunData) -> Origin:
    config = run.train
    last = Path(config.save_dir) / LAST
    # A run that elastic starts again goes on from what it has saved, whatever it was told to start from.
    if os.path.lexists(last) and (config.resume == "auto" or (is_restarted() and _is_of_this_run(last))):
        if not is_training_checkpoint(last):
            raise CheckpointError(
                f"{last}: names {last.resolve().name}, which is no complete checkpoint; let it name another one "
                "(ln -sfn), remove it, or start anew with --resume never"
            )
        return _from_lmtools("resumed", last.resolve(), run, data)
    path = config.restore_file or config.finetune_from
    if path is None:
        return Origin("new", None, len(data.dictionary))
    kind: Literal["restored", "weights"] = "restored" if config.restore_file else "weights"
    if is_training_checkpoint(path):
        return _from_lmtools(kind, Path(path).resolve(), run, data)
    return _from_fairseq(kind, Path(path), run, data)


def _is_of_this_run(last: Path) -> bool:
    """A run may fail before it has taken another one's checkpoint out of its way, or write none itself."""
    return is_training_checkpoint(last) and read_record(last).get("run_id") == run_id()


def start_state(run: Run, data: RunData, mesh: Mesh) -> tuple[TrainState, str]:
    """Build the state that the run begins with. Every rank must call it.

    Returns:
        The state, and a few words that say where it comes from.

    Raises:
        CheckpointError: see `find_origin`; or a tensor could not be read.
    """
    origin = find_origin(run, data)
    _require_agreement(origin, mesh)
    if mesh.rank == 0 and origin.kind != "resumed" and not run.train.no_save:
        # What another run has left here is not this run's to go on from, should it be killed before it saves.
        for link in (LAST, BEST):
            (Path(run.train.save_dir) / link).unlink(missing_ok=True)
    if origin.path is None:
        return _new_state(run, mesh, origin.vocab_size), f"new, from seed {run.train.seed}"
    if origin.saved is not None:
        state = _state_from_lmtools(run, mesh, origin, origin.path, origin.saved)
    else:
        state = _state_from_fairseq(run, data, mesh, origin)
    words = f"{origin.kind} from {origin.path}" if origin.kind != "weights" else f"weights of {origin.path}"
    return state, words + origin.note


def _require_agreement(origin: Origin, mesh: Mesh) -> None:
    """A network file system may show a new checkpoint to one machine earlier than to another."""
    if mesh.world_size == 1:
        return
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, (origin.kind, str(origin.path)))
    if any(other != found[0] for other in found):
        each = "; ".join(f"rank {rank}: {kind} {path}" for rank, (kind, path) in enumerate(found))
        raise CheckpointError(f"the ranks do not see the same checkpoint ({each}); is --save-dir on a shared disk?")


def _new_state(run: Run, mesh: Mesh, vocab_size: int, read: ReadSlice | None = None) -> TrainState:
    config = run.train
    model = build_model(config, run.model, vocab_size, mesh, dtype=parameter_dtype(config), read=read)
    return TrainState(model, build_optimizer(model, config), LossScaler.of(config), Progress())


# --- from lmtools' checkpoints ---


def _from_lmtools(kind: Literal["resumed", "restored", "weights"], path: Path, run: Run, data: RunData) -> Origin:
    record = read_record(path)
    try:
        progress = record["progress"]
        saved = SavedRun(
            Progress(**{**progress, "position": Position(**progress["position"])}),
            record["loss_scaler"],
            record["model"],
            record["dictionary_sha256"],
        )
        vocab_size, optimizer = saved.model["vocab_size"], record["train"]["optimizer"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its record is not that of a training run ({error})") from error
    if saved.dictionary_sha256 != data.dictionary.sha256:
        raise CheckpointError(f"{path}: was trained with another dictionary than {run.train.data}/dict.txt")
    require_same_model(path, saved.model, run.model)
    if kind == "resumed" or (kind == "restored" and not run.train.reset_optimizer):
        require_same_optimizer(path, optimizer, run.train.optimizer)
    note = ""
    keeps_place = kind == "resumed" or (kind == "restored" and not run.train.reset_dataloader)
    if keeps_place and saved.progress.position.num_batches > 0:
        require_same_streams(path, record["train"], run.train)
        if data.streams is None:
            require_batches_left(data.batches(saved.progress.position.epoch), saved.progress.position)
        note = of_other_batches(record["train"], run.train)
    return Origin(kind, path, vocab_size, saved=saved, note=note)


def _state_from_lmtools(run: Run, mesh: Mesh, origin: Origin, path: Path, saved: SavedRun) -> TrainState:
    config = run.train
    state = _new_state(run, mesh, origin.vocab_size)
    if origin.kind == "weights" or (origin.kind == "restored" and config.reset_optimizer):
        _load_weights(state, path, mesh)
    else:
        tensors = state.tensors()
        require_all_tensors(path, tensors)
        load_tensors(path, _from_masters(tensors, tensor_shapes(path).keys()), mesh)
        state.scaler.load_state_dict(saved.loss_scaler)
    if origin.kind == "resumed":
        state.progress = saved.progress
        state.resumed_from = path
        state.is_continued = True
    elif origin.kind == "restored":
        state.progress = _restored(saved.progress, config)
        state.is_continued = path.parent == Path(config.save_dir).resolve()
    if state.progress.position.num_batches > 0:
        state.memories = load_memories(path, mesh, dtype=parameter_dtype(config))
    return state


def _from_masters(tensors: Mapping[str, Tensor], saved: Collection[str]) -> dict[str, Tensor]:
    """Where the checkpoint has master weights and this run has none, these are what its parameters are read from."""
    sources = {}
    for name, tensor in tensors.items():
        master = f"optimizer.{name.removeprefix('model.')}.master"
        sources[master if name.startswith("model.") and master in saved and master not in tensors else name] = tensor
    return sources


def _load_weights(state: TrainState, path: Path, mesh: Mesh) -> None:
    """The weights alone, in the highest precision that the checkpoint has and this run can hold."""
    saved = tensor_shapes(path)
    state.optimizer.create_state()
    masters = {
        name: state.optimizer.state[parameter].get("master", parameter.detach())
        for name, parameter in state.parameters.items()
    }
    sources = {name: f"optimizer.{name}.master" for name in masters}
    wanted = {
        source if (source := sources[name]) in saved else f"model.{name}": tensor for name, tensor in masters.items()
    }
    load_tensors(path, wanted, mesh)
    for name, parameter in state.parameters.items():
        local_shard(parameter.detach()).copy_(local_shard(masters[name]))


def _restored(progress: Progress, config: TrainConfig) -> Progress:
    """What --reset-* leaves of a checkpoint's progress. An optimizer that starts anew counts its updates from 0."""
    progress.owes_validation = False  # to another run
    if config.reset_optimizer:
        progress.num_updates = progress.num_skipped = progress.schedule_offset = 0
    if config.reset_lr_scheduler:
        progress.schedule_offset = -progress.num_updates
    if config.reset_dataloader:
        progress.position = Position()
    if config.reset_meters:
        progress.seconds, progress.best_loss, progress.validations_since_best = 0.0, None, 0
    return progress


# --- from fairseq's checkpoints ---


def _from_fairseq(kind: Literal["restored", "weights"], path: Path, run: Run, data: RunData) -> Origin:
    checkpoint = (open_transformer_xl(path) if is_transformers_folder(path) else None) or open_torch_files(path)
    if isinstance(checkpoint, TransformerXLCheckpoint) and checkpoint.vocabulary_path is not None:
        raise CheckpointError(
            f"{path}: its rows are the words of {checkpoint.vocabulary_path.name}, in another order than that of "
            f"{run.train.data}/dict.txt, which training does not bring together; `eval` and `generate` do"
        )
    require_same_model(path, asdict(checkpoint.config), run.model)
    vocab_size, num_types = checkpoint.config.vocab_size, len(data.dictionary)
    if vocab_size < num_types:
        raise CheckpointError(
            f"{path}: its embedding has {vocab_size} rows, {run.train.data}/dict.txt has {num_types} types; this is "
            "not the dictionary of the checkpoint"
        )
    if kind == "weights":
        return Origin(kind, path, vocab_size, fairseq=checkpoint)
    if isinstance(checkpoint, TransformerXLCheckpoint):
        raise CheckpointError(f"{path}: only the weights of a Transformer-XL are read; use --finetune-from")
    training = read_fairseq_training(checkpoint, with_moments=not run.train.reset_optimizer)
    if training.moments and run.train.optimizer != "adam":
        raise CheckpointError(f"{path}: holds Adam's state; use --optimizer adam, or --reset-optimizer")
    batches = data.batches(training.epoch)
    if not run.train.reset_dataloader and training.num_batches not in (0, len(batches)):
        require_batches_left(batches, Position(training.epoch, training.num_batches))
    return Origin(kind, path, vocab_size, fairseq=checkpoint, fairseq_training=training)


def _state_from_fairseq(run: Run, data: RunData, mesh: Mesh, origin: Origin) -> TrainState:
    """Weights, and where they are restored Adam's moments and progress, whatever the number of parts."""
    checkpoint, training = origin.fairseq, origin.fairseq_training
    assert checkpoint is not None
    for part in range(mesh.rank, checkpoint.num_parts, mesh.world_size):
        checkpoint.verify_part(part)
        if training is not None:
            training.verify_part(part)
    state = _new_state(run, mesh, origin.vocab_size, checkpoint.read)
    state.optimizer.create_state()
    for name, parameter in state.parameters.items():
        values = state.optimizer.state[parameter]
        if "master" in values:  # the file may know more digits than the parameter can hold
            _fill(values["master"], checkpoint.read, name)
        if training is not None and training.moments:
            values["step"].fill_(training.adam_step)
            for key, moments in training.moments.items():
                _fill(values[key], moments.read, name)
    if training is not None:
        position = Position(training.epoch, training.num_batches)
        if training.num_batches == len(data.batches(training.epoch)):  # lmtools says that the next one begins
            position = Position(training.epoch + 1)
        state.progress = _restored(Progress(training.num_updates, position=position), run.train)
    return state


def _fill(tensor: Tensor, read: ReadSlice, name: str) -> None:
    with torch.no_grad():
        local_shard(tensor).copy_(read(name, local_slices(tensor, tensor.shape)))
