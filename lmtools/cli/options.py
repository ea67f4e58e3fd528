"""Options that several commands share, and how they report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtools.compressed import COMPRESSED_SUFFIXES
from lmtools.errors import ConfigError
from lmtools.files import STDIO

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]

WorkersOption = Annotated[
    int, typer.Option("--workers", min=1, help="Worker processes, at most; the output does not depend on it.")
]

SkipUnchangedOption = Annotated[
    bool,
    typer.Option("--skip-unchanged", help="Do nothing if the same inputs and options made what is already there."),
]


class DType(str, Enum):
    """What the model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    """Where the model computes."""

    cpu = "cpu"
    cuda = "cuda"


def for_tab(known: Collection[str]) -> Callable[[str], list[str]]:
    """What a shell offers for an option whose values are texts; typer knows those of an Enum by itself."""

    def beginning_with(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return beginning_with


Advance = Callable[[int], None]
"""Called with the number of units (bytes, tokens) that were just finished."""


def say(message: str) -> None:
    """A line for the person at the terminal: on stderr, so that stdout holds results alone."""
    print(message, file=sys.stderr)


def print_json(result: Mapping[str, Any]) -> None:
    """One JSON object on stdout; never a bare NaN or Infinity, which are not JSON."""
    print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def report_to(outputs: Sequence[str], *, as_json: bool) -> Callable[[str], None]:
    """Where a command's result goes: to standard output, unless its data goes there."""
    if STDIO not in outputs:
        return print
    if as_json:
        raise typer.BadParameter("standard output has the data already; name a file", param_hint="--json")
    return say


def useful_workers(workers: int) -> int:
    """As many processes as there are cores for them, and a line to say so when that is fewer than were asked for."""
    from lmtools.preprocess.workers import available_cores

    cores = available_cores()
    if workers > cores:
        say(f"--workers {workers}: {cores} are used, one for each core")
    return min(workers, cores)


def input_bytes(paths: Sequence[str]) -> int | None:
    """The size of all inputs together, or None if it is not known before they are read."""
    if any(not os.path.isfile(path) or Path(path).suffix in COMPRESSED_SUFFIXES for path in paths):
        return None
    return sum(Path(path).stat().st_size for path in paths)


@contextmanager
def progress_bar(description: str, *, total: int | None, unit: str = "bytes") -> Iterator[Advance]:
    """A progress bar with rate and time left on stderr, silent when stderr is not a terminal.

    Args:
        description: what is being done, in a word or two.
        total: how many units there are, or None when that is not known.
        unit: `bytes`, or a plural noun such as `tokens`.

    Yields:
        A function to call with the number of units that were just finished.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} {unit}/s", style="progress.data.speed")

    amounts: tuple[ProgressColumn, ...]
    if unit == "bytes":
        amounts = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    else:
        amounts = (MofNCompleteColumn(), RateColumn())
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amounts,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
        if total is None:  # it is known now; the bar would be left without an end
            progress.tasks[0].total = progress.tasks[0].completed  # `update(total=...)` would forget the speed
            progress.update(task)


def require_none_given(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that have no meaning beside others.

    Args:
        options: name on the command line to value; none, zero and false are not given.
        reason: why they have none.

    Raises:
        ConfigError: names the first that was given.
    """
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name}: {reason}")
