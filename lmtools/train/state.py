"""Everything that a run carries from update to update, and what of it a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lmtools.checkpoints.models import Model
from lmtools.data.batches import Position
from lmtools.train.config import Run
from lmtools.train.data import RunData
from lmtools.train.memory import Memories
from lmtools.train.optimizer import ShardedOptimizer
from lmtools.train.precision import LossScaler


@dataclass
class Progress:
    """How far a run is; the same on every rank.

    Attributes:
        num_updates: steps that the optimizer has made.
        num_skipped: updates for which it made none, because something was not finite.
        position: place in the data, which also moves on when an update is skipped.
        seconds: time spent by rank 0's clock, earlier legs of a resumed run included.
        best_loss: the lowest validation loss, in bits, or None before the first validation.
        validations_since_best: how many validations came after it.
        schedule_offset: added to the update's number for the learning rate; set by `--reset-lr-scheduler`.
        owes_validation: it was due when a signal ended the run, which makes up for it when it goes on.
    """

    num_updates: int = 0
    num_skipped: int = 0
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    best_loss: float | None = None
    validations_since_best: int = 0
    schedule_offset: int = 0
    owes_validation: bool = False


@dataclass
class TrainState:
    """Model, optimizer, loss scale and progress of this rank.

    Attributes:
        model: split over the mesh.
        optimizer: of its parameters.
        scaler: loss scale.
        progress: how far the run is.
        resumed_from: the run's own checkpoint that this state is equal to, until it is trained on.
        is_continued: the run's folder has the lines of the updates that were made before.
        memories: what a Transformer-XL remembers of the stream's last step, on this replica's rows.
        parameters: what is trained, by name, tied parameters once. Taken when the state is made, since FSDP puts
            others into the model's modules whenever it has them gathered.
    """

    model: Model
    optimizer: ShardedOptimizer
    scaler: LossScaler
    progress: Progress
    resumed_from: Path | None = None
    is_continued: bool = False
    memories: Memories = None
    parameters: dict[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """This rank's share of all tensors of a checkpoint, by name, also before the first update."""
        self.optimizer.create_state()
        named: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
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
