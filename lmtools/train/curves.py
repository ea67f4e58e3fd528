"""From a run's metrics.jsonl to the curves that are drawn of it: pure functions of what was written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lmtools.errors import DataError
from lmtools.train.metrics import METRICS_NAME, read_metrics

Floats: TypeAlias = npt.NDArray[np.float64]
XAxis = Literal["updates", "tokens", "seconds"]
YAxis = Literal["loss", "ppl"]


@dataclass(frozen=True)
class Series:
    """What one loss was in the course of a run.

    Attributes:
        updates: updates made, `(n,)`.
        tokens: tokens trained on, `(n,)`.
        seconds: the run's age, validation and all, `(n,)`.
        training_seconds: what its updates took, `(n,)`.
        loss: bits per token, finite, `(n,)`.
        weights: tokens that each loss is the mean of, `(n,)`.
    """

    updates: Floats
    tokens: Floats
    seconds: Floats
    training_seconds: Floats
    loss: Floats
    weights: Floats

    def smoothed(self, window: int) -> Series:
        """The mean loss of the `window` updates around each, per token; fewer at the two ends."""
        if window == 1:
            return self
        return replace(self, loss=_window_sums(self.loss * self.weights, window) / _window_sums(self.weights, window))

    def x(self, axis: XAxis) -> Floats:
        """Where the losses stand on an axis."""
        values: Floats = getattr(self, axis)
        return values

    def y(self, axis: YAxis) -> Floats:
        """The losses, or the perplexities that they are; infinite beyond what a float can hold."""
        if axis == "loss":
            return self.loss
        with np.errstate(over="ignore"):
            return np.exp2(self.loss)


@dataclass(frozen=True)
class RunCurves:
    """What a run has to show.

    Attributes:
        name: tells it from the other runs.
        train: loss of every update.
        valid: losses of each validation split, in the order in which they were first validated.
    """

    name: str
    train: Series
    valid: dict[str, Series]

    @property
    def best(self) -> int | None:
        """Index of the lowest loss on the first validation split, which is what `checkpoint_best` goes by."""
        first = next(iter(self.valid.values()), None)
        return None if first is None or not len(first.loss) else int(first.loss.argmin())


def read_runs(paths: Sequence[Path]) -> list[RunCurves]:
    """Read runs, each named by as much of its path as tells it from the others.

    Args:
        paths: `--save-dir` folders, or metrics.jsonl files.

    Raises:
        DataError: there are no metrics, a line is broken, or no update was made yet.
    """
    files = [path / METRICS_NAME if path.is_dir() else path for path in paths]
    names = distinct_names([file.parent if file.name == METRICS_NAME else file.with_suffix("") for file in files])
    return [_read_run(file, name) for file, name in zip(files, names, strict=True)]


def default_window(num_updates: int) -> int:
    """Updates that the training loss is averaged over unless told otherwise: a hundredth of the run."""
    return max(1, num_updates // 100)


def _window_sums(values: Floats, window: int) -> Floats:
    """The sum of the `window` values around each, fewer at the two ends.

    A window is the end of one block of so many values and the start of the next. Nothing is subtracted: by differences
    of running sums a run that diverged for one update would have the losses after it rounded away.
    """
    window = min(window, 2 * len(values))
    before = (window - 1) // 2
    num_padded = -(-(len(values) + window - 1) // window) * window
    blocks = np.pad(values, (before, num_padded - before - len(values))).reshape(-1, window)
    from_start = blocks.cumsum(axis=1).ravel()
    to_end = blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    first = np.arange(len(values))
    return from_start[first + window - 1] + np.where(first % window, to_end[first], 0.0)


def _read_run(file: Path, name: str) -> RunCurves:
    if not file.is_file():
        raise DataError(f"{file}: no such file; expected the --save-dir of a run, or its {METRICS_NAME}")
    train: list[tuple[float, ...]] = []
    valid: dict[str, list[tuple[float, ...]]] = {}
    num_tokens, age, training_seconds = 0, 0.0, 0.0
    for number, line in enumerate(read_metrics(file), start=1):
        try:
            if line["kind"] == "update":
                is_made = line["skipped"] is None
                # Runs of before have the run's clock alone, with all validation in it.
                training_seconds += line.get("update_seconds", line["seconds"] - age)
                age = line["seconds"]
                if is_made:
                    num_tokens += line["num_tokens"]
                    train.append(_point(line, num_tokens, training_seconds))
            elif line["kind"] == "valid":
                valid.setdefault(line["subset"], []).append(_point(line, num_tokens, training_seconds))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}:{number}: not a line of {METRICS_NAME} ({error!r})") from error
    curves = RunCurves(name, _series(train), {subset: _series(points) for subset, points in valid.items()})
    if not len(curves.train.loss):
        reason = "of no update is the loss a finite number" if train else "no update was made yet"
        raise DataError(f"{file}: {reason}")
    return curves


def _point(line: dict[str, Any], num_tokens: int, training_seconds: float) -> tuple[float, ...]:
    loss = float("nan") if line["loss_base2"] is None else line["loss_base2"]
    values = line["num_updates"], num_tokens, line["seconds"], training_seconds, loss, line["num_tokens"]
    return tuple(float(value) for value in values)


def _series(points: Sequence[tuple[float, ...]]) -> Series:
    columns = np.array(points, dtype=np.float64).reshape(-1, 6)
    return Series(*columns[np.isfinite(columns[:, 4])].T)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """As much of each path as tells it from the others, from its end."""
    whole = [path.absolute() for path in paths]
    names: list[str] = []
    for num_parts in range(1, max((len(path.parts) for path in whole), default=0) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in whole]
        if len(set(names)) == len(set(whole)):
            break
    return names
