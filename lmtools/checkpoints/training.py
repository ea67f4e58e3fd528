"""Training state on disk: PyTorch's distributed checkpoint, complete or absent, and never code.

    checkpoints/
      checkpoint_3_1200/        after update 1200, in epoch 3
        .metadata               which tensor lies where (torch.distributed.checkpoint)
        __0_0.distcp, ...       tensors, a file for each rank that wrote
        lmtools.json            configuration and progress; written last
      checkpoint_last -> checkpoint_3_1200
      checkpoint_best -> checkpoint_2_1000

A checkpoint is written under a temporary name, by all ranks in the background, and renamed when every byte is on the
disk. It holds whole tensors by name, so it loads on any mesh. Its index is read by `training_index.py`.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from lmtools.checkpoints.training_index import read_metadata, tensor_shapes, verify_tensors
from lmtools.errors import CheckpointError, LmtoolsError
from lmtools.files import atomic_write_text, fsync_directory
from lmtools.parallel.mesh import Mesh

RECORD_NAME = "lmtools.json"
FORMAT = "lmtools-training"
FORMAT_VERSION = 1


class _Reader(dcp.FileSystemReader):
    """torch's reader, but for the one place where it would run what a pickle says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as stream:
            metadata = read_metadata(stream)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Writer(dcp.FileSystemWriter):
    """torch's writer, but that it says why it fails: torch.save tells of a full disk as an odd position."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise OSError(cause.errno, cause.strerror) from None
                cause = cause.__context__
            raise


class CheckpointWriter:
    """Saves while training goes on; at most one save is under way."""

    def __init__(self, mesh: Mesh) -> None:
        """Every rank must make one: the saves' collectives run in a group of their own, beside the training loop's."""
        _expect_a_single_process()
        self._mesh = mesh
        # A rank may wait for another's disk longer than a collective of the training loop ever takes.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if mesh.world_size > 1 else None
        self._pending: _Pending | None = None

    def start(
        self, target: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any], *, links: Sequence[str] = ()
    ) -> None:
        """Begin to save; returns when the tensors are copied. Every rank must call it, after `finish`.

        Args:
            target: the checkpoint's folder.
            tensors: this rank's share of every tensor, by name; DTensors where they are split.
            record: JSON values: configuration and progress.
            links: names beside the target that will stand for it once it is complete.

        Raises:
            CheckpointError: its folder cannot be made.
        """
        assert self._pending is None, "a save is under way"
        temporary = _temporary(target)

        def make_folder() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        self._on_first_rank(target, make_folder)
        future = dcp.async_save(
            dict(tensors),
            storage_writer=_Writer(temporary, sync_files=True),
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(future, Future)
        header = {"format": FORMAT, "format_version": FORMAT_VERSION}
        self._pending = _Pending(target, header | dict(record), tuple(links), future)

    def written(self) -> bool:
        """Whether this rank has written its share of the save under way. `finish` will then not have to wait for it."""
        return self._pending is not None and self._pending.future.done()

    def finish(self) -> Path | None:
        """Wait for the save under way, if there is one, and give it its name. Every rank must call it.

        Returns:
            The checkpoint that is complete now, or None when none was under way.

        Raises:
            CheckpointError: it could not be written; what was written of it is gone, earlier ones are untouched.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        temporary = _temporary(pending.target)
        try:
            self._on_every_rank(pending.target, pending.future.result)
            self._on_first_rank(pending.target, lambda: _complete(temporary, pending))
        except CheckpointError:
            if self._mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return pending.target

    def amend(self, target: Path, changes: Mapping[str, Any], *, links: Sequence[str] = ()) -> None:
        """Change the record of a complete checkpoint. Every rank must call it.

        Args:
            target: the checkpoint's folder.
            changes: JSON values, which take the place of those of their names.
            links: names beside the target that will stand for it.

        Raises:
            CheckpointError: it could not be written; the record is as it was.
        """

        def write() -> None:
            _write_record(target, {**read_record(target), **changes})
            _link(target, links)

        self._on_first_rank(target, write)

    def link(self, target: Path, links: Sequence[str]) -> None:
        """Let names beside a complete checkpoint stand for it. Every rank must call it.

        Raises:
            CheckpointError: a link could not be written.
        """
        self._on_first_rank(target, lambda: _link(target, links))

    def _on_first_rank(self, target: Path, action: Callable[[], Any]) -> None:
        self._on_every_rank(target, action if self._mesh.rank == 0 else lambda: None)

    def _on_every_rank(self, target: Path, action: Callable[[], Any]) -> None:
        """Act, and raise on every rank what any rank has met: a rank that goes on alone would wait for ever."""
        problem = ""
        try:
            action()
        except (CheckpointException, LmtoolsError, OSError, RuntimeError) as error:
            problem = _cause(error)
        problems: list[Any] = [problem]
        if self._mesh.world_size > 1:
            problems = [None] * self._mesh.world_size
            dist.all_gather_object(problems, problem)
        if any(problems):
            raise CheckpointError(f"{target}: could not be written: {next(filter(None, problems))}")


@dataclass(frozen=True)
class _Pending:
    """A save under way."""

    target: Path
    record: Mapping[str, Any]
    links: tuple[str, ...]
    future: Future[Any]


def _complete(temporary: Path, pending: _Pending) -> None:
    """All tensors are on the disk: add the record, give the folder its name, let the links name it."""
    target = pending.target
    _write_record(temporary, pending.record)
    if target.exists():  # of a run that was started anew; no link names it any more
        remove_checkpoint(target)
    temporary.rename(target)
    fsync_directory(target.parent)
    _link(target, pending.links)


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    atomic_write_text(folder / RECORD_NAME, json.dumps(record, indent=2, allow_nan=False) + "\n")


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def _link(target: Path, links: Sequence[str]) -> None:
    """Make each link name `target`, atomically."""
    for link in links:
        temporary = _temporary(target.with_name(link))
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        temporary.replace(target.with_name(link))
    fsync_directory(target.parent)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that, killed in the middle, no half of it is left under its name."""
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process has left of a checkpoint that it was writing or removing."""
    for pattern in (".checkpoint_*.tmp", ".checkpoint_*.old"):
        for path in folder.glob(pattern):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)


def is_training_checkpoint(path: str | Path) -> bool:
    """Whether a folder is (or links to) a complete training checkpoint."""
    return (Path(path) / RECORD_NAME).is_file()


def read_record(path: str | Path) -> dict[str, Any]:
    """Configuration and progress of a checkpoint.

    Raises:
        CheckpointError: no complete training checkpoint is there.
    """
    location = Path(path) / RECORD_NAME
    try:
        record = json.loads(location.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not a complete training checkpoint, it has no {RECORD_NAME}") from error
    except ValueError as error:
        raise CheckpointError(f"{location}: not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{location}: expected {FORMAT} version {FORMAT_VERSION}")
    return record


def load_tensors(path: str | Path, tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Fill tensors from a checkpoint, whatever mesh wrote it. Every rank must call it.

    Args:
        path: the checkpoint's folder.
        tensors: this rank's share of each tensor, by name, filled in place.
        mesh: where we are.

    Raises:
        CheckpointError: a tensor is missing, has another shape or is damaged, or a file is broken.
    """
    _expect_a_single_process()
    saved = tensor_shapes(path)
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(f"{path}: has no tensor {name}")
        if saved[name] != tuple(tensor.shape):
            raise CheckpointError(f"{path}: {name} has shape {saved[name]}, expected {tuple(tensor.shape)}")
    try:
        verify_tensors(path, tensors, rank=mesh.rank, world_size=mesh.world_size)
        dcp.load(dict(tensors), storage_reader=_Reader(path), no_dist=mesh.world_size == 1)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: broken: {error}") from error
    except (CheckpointException, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: broken: {_cause(error)}") from error


def _expect_a_single_process() -> None:
    """A world of one is no mistake, but torch warns of it whenever it saves or loads there, also in its own thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
