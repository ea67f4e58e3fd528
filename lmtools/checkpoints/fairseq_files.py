"""The files of a fairseq checkpoint: which belong together, and whether all are there. Names only; none is opened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtools.errors import CheckpointError

PART_NAME = re.compile(r"(?P<stem>.+)-model_part-(?P<part>0|[1-9]\d*)\.pt")


def find_parts(path: str | Path) -> list[Path]:
    """The files of a checkpoint, in rank order.

    Args:
        path: a folder with one checkpoint, a file, one part, or the stem that parts share.

    Raises:
        CheckpointError: nothing there, more than one checkpoint in the folder, or a part is missing.
    """
    path = Path(path)
    if path.is_dir():
        path = _only_checkpoint(path)
    match = PART_NAME.fullmatch(path.name)
    if match is None and path.is_file():
        return [path]
    stem = match["stem"] if match else path.name.removesuffix(".pt")
    numbered = _numbered(path.parent, stem)
    if not numbered:
        raise CheckpointError(f"{path}: no such checkpoint, and no {stem}-model_part-0.pt beside it")
    _require_numbers(numbered, max(numbered) + 1, path.parent / stem)
    return [numbered[part] for part in range(len(numbered))]


def parts_found(path: Path) -> list[Path]:
    """The files of a checkpoint that are there, in rank order, whether or not some are missing.

    Raises:
        CheckpointError: a folder holds no checkpoint, or more than one.
    """
    if path.is_dir():
        path = _only_checkpoint(path)
    match = PART_NAME.fullmatch(path.name)
    if match is None and path.is_file():
        return [path]
    numbered = _numbered(path.parent, match["stem"] if match else path.name.removesuffix(".pt"))
    return [numbered[part] for part in sorted(numbered)]


def require_all_parts(paths: Sequence[Path], settings: Mapping[str, Any]) -> None:
    """Compare the number of files with what the checkpoint says of itself.

    Args:
        paths: from `find_parts`.
        settings: fairseq's options, of which `model_parallel_size` counts.

    Raises:
        CheckpointError: names the missing parts, or both numbers.
    """
    expected = settings.get("model_parallel_size") or 1
    if type(expected) is not int:
        raise CheckpointError(f"{paths[0]}: model_parallel_size is {type(expected).__name__}, expected a whole number")
    match = PART_NAME.fullmatch(paths[0].name)
    if match is None:
        if expected > 1:
            raise CheckpointError(
                f"{paths[0]}: is one of {expected} model-parallel parts; keep the names STEM-model_part-R.pt"
            )
    elif expected != len(paths):
        if len(paths) < expected < 10_000:
            _require_numbers(range(len(paths)), expected, paths[0].parent / match["stem"])
        raise CheckpointError(f"{paths[0].parent}: {len(paths)} parts, but the checkpoint was written by {expected}")


def _numbered(folder: Path, stem: str) -> dict[int, Path]:
    """The parts of one stem, by rank."""
    return {
        int(found["part"]): candidate
        for candidate in folder.glob("*.pt")
        if (found := PART_NAME.fullmatch(candidate.name)) and found["stem"] == stem
    }


def _only_checkpoint(folder: Path) -> Path:
    """The one checkpoint in a folder: a part of it, or its file."""
    checkpoints: dict[str, Path] = {}
    for path in sorted(folder.glob("*.pt")):
        match = PART_NAME.fullmatch(path.name)
        checkpoints.setdefault(match["stem"] if match else path.name, path)
    if not checkpoints:
        raise CheckpointError(f"{folder}: no .pt file in this folder; expected model-model_part-0.pt, ... or one file")
    if len(checkpoints) > 1:
        names = ", ".join(sorted(path.name for path in checkpoints.values()))
        raise CheckpointError(f"{folder}: holds {len(checkpoints)} checkpoints; name one of {names}")
    (path,) = checkpoints.values()
    return path


def _require_numbers(numbered: Iterable[int], expected: int, stem: Path) -> None:
    missing = [f"{stem.name}-model_part-{part}.pt" for part in sorted(set(range(expected)) - set(numbered))]
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CheckpointError(f"{stem.parent}: {len(missing)} of {expected} parts missing: {names}")
