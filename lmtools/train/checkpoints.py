"""When a run validates and saves, what its checkpoints are called, and which of them are kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmtools.checkpoints.training import CheckpointWriter, point, read_record
from lmtools.errors import CheckpointError
from lmtools.parallel.mesh import Mesh
from lmtools.train.config import Run
from lmtools.train.data import RunData
from lmtools.train.report import Reporter
from lmtools.train.state import TrainState
from lmtools.train.validation import Validation


class Keeper:
    """Validates and saves when it is time. Every rank has one and calls it in step with the others."""

    def __init__(self, run: Run, data: RunData, state: TrainState, mesh: Mesh, report: Reporter) -> None:
        self._run = run
        self._data = data
        self._state = state
        self._mesh = mesh
        self._report = report
        self._folder = Path(run.train.save_dir)
        self._writer = CheckpointWriter(mesh)
        self._pending_is_best = False
        self._is_best = False
        self._saved_at = -1
        self._valid_loss: float | None = None

    def validation_is_due(self, epoch: int, end_of_epoch: bool, finished: bool) -> bool:
        """After an update: between epochs, every so many updates, and at the end of the run."""
        config = self._run.train
        if not self._data.valid:
            return False
        every = config.validate_interval_updates
        return (
            finished
            or (end_of_epoch and epoch % config.validate_interval == 0)
            or bool(every and self._state.progress.num_updates % every == 0)
        )

    def note_validation(self, losses: Sequence[Validation]) -> None:
        """Take the first split's loss into account for `checkpoint_best` and `--patience`."""
        progress = self._state.progress
        loss = losses[0].loss_base2  # the perplexity grows with it: both metrics choose the same checkpoint
        self._is_best = progress.best_loss is None or loss < progress.best_loss
        self._valid_loss = loss
        if self._is_best:
            progress.best_loss, progress.validations_since_best = loss, 0
        else:
            progress.validations_since_best += 1

    def save_if_due(self, epoch: int, end_of_epoch: bool, stopping: bool) -> None:
        """Begin a checkpoint if it is time, or if validation has just found the best model so far."""
        config = self._run.train
        every = config.save_interval_updates
        due = (
            stopping
            or self._is_best
            or (end_of_epoch and epoch % config.save_interval == 0)
            or bool(every and self._state.progress.num_updates % every == 0)
        )
        if due and not config.no_save and self._saved_at != self._state.progress.num_updates:
            self._save(epoch, end_of_epoch)

    def save_and_wait(self) -> None:
        """Save the state as it is and wait until it is on the disk."""
        if not self._run.train.no_save and self._saved_at != self._state.progress.num_updates:
            self._save(self._state.progress.position.epoch, False)
        self.wait()

    def wait(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        self._finish()

    def poll(self, num_written: int) -> None:
        """Complete a checkpoint that all ranks have written; `num_written` is how many of them have."""
        if num_written == self._mesh.world_size:
            self._finish_or_warn()

    def written(self) -> bool:
        """Whether this rank has written its share of a checkpoint that is not complete yet."""
        return self._writer.written()

    def _save(self, epoch: int, end_of_epoch: bool) -> None:
        self._finish_or_warn()
        progress = self._state.progress
        record = self._state.record(self._run, self._data)
        record |= {"end_of_epoch": end_of_epoch, "valid_loss": self._valid_loss, "is_best": self._is_best}
        target = self._folder / f"checkpoint_{epoch}_{progress.num_updates}"
        self._pending_is_best, self._is_best = self._is_best, False
        self._saved_at = progress.num_updates
        try:
            self._writer.start(target, self._state.tensors(), record)
        except CheckpointError as error:
            self._report.warning(str(error))

    def _finish_or_warn(self) -> None:
        """As `wait`, but a run goes on without a checkpoint that could not be written."""
        try:
            self._finish()
        except CheckpointError as error:
            self._report.warning(f"{error}; the last complete checkpoint is {self._last()}, training goes on")

    def _finish(self) -> None:
        complete = self._writer.finish()
        if complete is None:
            return
        self._report.saved(complete)
        if self._mesh.rank == 0:
            point(self._folder / "checkpoint_last", complete)
            if self._pending_is_best:
                point(self._folder / "checkpoint_best", complete)
            self._prune()

    def _last(self) -> str:
        link = self._folder / "checkpoint_last"
        return str(link.resolve().name) if link.exists() else "none"

    def _prune(self) -> None:
        """Remove what the --keep options do not keep; never what checkpoint_last and checkpoint_best name."""
        config = self._run.train
        found: list[tuple[int, Path, dict[str, Any]]] = []
        for folder in self._folder.glob("checkpoint_*_*"):
            if folder.is_dir() and not folder.is_symlink():
                record = read_record(folder)
                found.append((record["progress"]["num_updates"], folder, record))
        found.sort(key=lambda entry: entry[0], reverse=True)
        groups = [
            (config.keep_interval_updates, [path for _, path, record in found if not record["end_of_epoch"]]),
            (config.keep_last_epochs, [path for _, path, record in found if record["end_of_epoch"]]),
        ]
        doomed = {path for limit, paths in groups if limit is not None for path in paths[limit:]}
        validated = [(record["valid_loss"], path) for _, path, record in found if record["valid_loss"] is not None]
        if config.keep_best_checkpoints is not None:
            doomed -= {path for _, path in sorted(validated)[: config.keep_best_checkpoints]}
        linked = {(self._folder / name).resolve() for name in ("checkpoint_last", "checkpoint_best")}
        for path in doomed:
            if path.resolve() not in linked:
                shutil.rmtree(path)
