"""When a run validates and saves, what its checkpoints are called, and which of them are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmtools.checkpoints.training import CheckpointWriter, read_record, remove_checkpoint, remove_leftovers
from lmtools.errors import CheckpointError
from lmtools.files import disk_errors
from lmtools.parallel.launch import run_id
from lmtools.parallel.mesh import Mesh
from lmtools.train.config import Run, TrainConfig
from lmtools.train.data import RunData
from lmtools.train.memory import memory_tensors
from lmtools.train.report import Reporter
from lmtools.train.state import TrainState
from lmtools.train.validation import Validation

LAST, BEST = "checkpoint_last", "checkpoint_best"


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
        self._saved_at = state.progress.num_updates if state.resumed_from is not None else None
        self._is_best = False
        self._valid_loss: tuple[int, float] | None = None
        if mesh.rank == 0 and not run.train.no_save:
            with disk_errors(self._folder):
                remove_leftovers(self._folder)

    def validation_is_due(self, epoch: int, *, made: bool, end_of_epoch: bool, finished: bool) -> bool:
        """After an update (made, not skipped): between epochs, every so many updates, and at the end of the run."""
        config = self._run.train
        if not self._data.valid:
            return False
        return (
            finished
            or (end_of_epoch and epoch % config.validate_interval == 0)
            or (made and _is_multiple(self._state.progress.num_updates, config.validate_interval_updates))
        )

    def note_validation(self, losses: Sequence[Validation]) -> None:
        """Take the first split's loss into account for `checkpoint_best` and `--patience`."""
        progress = self._state.progress
        loss = losses[0].loss_base2  # the perplexity grows with it: both metrics choose the same checkpoint
        is_finite = math.isfinite(loss)
        self._valid_loss = (progress.num_updates, loss) if is_finite else None
        self._is_best = is_finite and (progress.best_loss is None or loss < progress.best_loss)
        if self._is_best:
            progress.best_loss, progress.validations_since_best = loss, 0
        else:
            progress.validations_since_best += 1

    def amend_last(self) -> None:
        """Add to the checkpoint that the run goes on from what the validation has found that was owed to it."""
        progress = self._state.progress
        progress.owes_validation = False
        if self._run.train.no_save:
            return
        changes = {"progress": asdict(progress), "valid_loss": self._valid_loss_of_now()}
        try:
            self._writer.amend((self._folder / LAST).resolve(), changes, links=(BEST,) if self._is_best else ())
        except CheckpointError as error:
            self._warn(error)
        self._is_best = False

    def save_if_due(self, epoch: int, *, made: bool, end_of_epoch: bool, stopping: bool) -> None:
        """Begin a checkpoint if it is time, or if validation has just found the best model so far.

        Raises:
            CheckpointError: the run's last checkpoint could not be begun. It goes on without any other.
        """
        config = self._run.train
        due = (
            stopping
            or self._is_best
            or (end_of_epoch and epoch % config.save_interval == 0)
            or (made and _is_multiple(self._state.progress.num_updates, config.save_interval_updates))
        )
        if due:
            try:
                self._save(epoch, end_of_epoch=end_of_epoch)
            except CheckpointError as error:
                if stopping:
                    raise
                self._warn(error)

    def save_and_wait(self) -> None:
        """Save the state as it is and wait until it is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._save(self._state.progress.position.epoch, end_of_epoch=False)
        self.wait()

    def wait(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            complete = self._writer.finish()
        except CheckpointError:
            self._saved_at = None
            raise
        if complete is not None:
            self._report.saved(complete)
            if self._mesh.rank == 0:
                self._prune()

    def poll(self, num_written: int) -> None:
        """Complete a checkpoint that all ranks have written; `num_written` is how many of them have."""
        if num_written == self._mesh.world_size:
            self._wait_or_warn()

    def written(self) -> bool:
        """Whether this rank has written its share of a checkpoint that is not complete yet."""
        return self._writer.written()

    def _save(self, epoch: int, *, end_of_epoch: bool) -> None:
        if self._run.train.no_save:
            return
        self._wait_or_warn()
        num_updates = self._state.progress.num_updates
        target = self._folder / f"checkpoint_{epoch}_{num_updates}"
        links = (LAST, BEST) if self._is_best else (LAST,)
        self._is_best = False
        if self._saved_at == num_updates:
            # Skipped updates alone make no new state: what is resumed skips them again.
            self._writer.link((self._folder / LAST).resolve(), links)
            return
        record = self._state.record(self._run, self._data)
        record |= {"end_of_epoch": end_of_epoch, "valid_loss": self._valid_loss_of_now(), "time": time.time()}
        record["run_id"] = run_id()
        tensors = self._state.tensors()
        if self._state.progress.position.num_batches > 0:
            tensors |= memory_tensors(self._state.memories, self._mesh)
        self._writer.start(target, tensors, record, links=links)
        self._saved_at = num_updates

    def _valid_loss_of_now(self) -> float | None:
        """The validation loss of the model as it is, where it was validated and is finite."""
        num_updates = self._state.progress.num_updates
        return self._valid_loss[1] if self._valid_loss and self._valid_loss[0] == num_updates else None

    def _wait_or_warn(self) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        link = self._folder / LAST
        last = link.resolve().name if link.exists() else "none"
        self._report.warning(f"{error}; the last complete checkpoint is {last}, training goes on")

    def _prune(self) -> None:
        linked = {(self._folder / name).resolve().name for name in (LAST, BEST)}
        for name in superfluous(_records(self._folder), self._run.train) - linked:
            try:
                remove_checkpoint(self._folder / name)
            except OSError as error:
                self._report.warning(f"{self._folder / name}: could not be removed: {error.strerror}")


def superfluous(records: dict[str, dict[str, Any]], config: TrainConfig) -> set[str]:
    """The checkpoints that the --keep options do not keep, given the record of each.

    `--keep-interval-updates` and `--keep-last-epochs` each limit their kind; the best by validation stay with
    `--keep-best-checkpoints`.
    """
    newest_first = sorted(records, key=lambda name: records[name]["time"], reverse=True)
    within_epochs = [name for name in newest_first if not records[name]["end_of_epoch"]]
    of_epochs = [name for name in newest_first if records[name]["end_of_epoch"]]
    doomed: set[str] = set()
    if config.keep_interval_updates is not None:
        doomed |= set(within_epochs[config.keep_interval_updates :])
    if config.keep_last_epochs is not None or config.no_epoch_checkpoints:
        doomed |= set(of_epochs[config.keep_last_epochs or 0 :])
    if config.keep_best_checkpoints is not None:
        validated = [name for name in newest_first if records[name]["valid_loss"] is not None]
        doomed -= set(sorted(validated, key=lambda name: records[name]["valid_loss"])[: config.keep_best_checkpoints])
    return doomed


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    """What each complete checkpoint says of itself; what is none, or not of a run like this, is left alone."""
    records = {}
    for path in folder.glob("checkpoint_*_*"):
        if path.is_dir() and not path.is_symlink():
            with suppress(CheckpointError):
                records[path.name] = read_record(path)
    return {name: record for name, record in records.items() if {"time", "end_of_epoch", "valid_loss"} <= record.keys()}


def _is_multiple(count: int, every: int) -> bool:
    return every > 0 and count % every == 0
