"""Runs the steps of a recipe in their order, each in a process of its own, and leaves out what is there already.

Most commands know by themselves whether there is anything to do. Of the others a step says what it reads; when it has
ended, `OUTPUT.meta.json` keeps the command and the hashes, and the step is left out as long as nothing of it changes.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lmtools.artifacts import FileRecord, Manifest, is_unchanged, write_manifest
from lmtools.errors import LmtoolsError
from lmtools.files import atomic_write
from lmtools.recipes.recipe import Step

_TOOL = "lmtools reproduce"


@dataclass(frozen=True)
class StepRun:
    """What became of a step.

    Attributes:
        step: the step.
        status: `ran` (a command may have found its output there), `unchanged`, or `failed`.
        exit_code: of the command; 0 if it was left out.
        seconds: how long it took.
    """

    step: Step
    status: Literal["ran", "unchanged", "failed"]
    exit_code: int
    seconds: float


def run_steps(steps: Sequence[Step], workdir: Path, *, report: Callable[[str], None]) -> list[StepRun]:
    """Run steps one after the other, until the first that fails.

    Standard output of the commands that does not go to a file goes to standard error.

    Args:
        steps: from `steps_of`.
        workdir: the folder they run in, which exists.
        report: called with each command before it runs.

    Raises:
        LmtoolsError: another process is at work in the folder.
    """
    runs: list[StepRun] = []
    with _locked(workdir):
        for number, step in enumerate(steps, start=1):
            report(f"\n[{number}/{len(steps)}] {step.name}\n$ {step.command}")
            started = time.monotonic()
            status, exit_code = _run_step(step, workdir, report)
            runs.append(StepRun(step, status, exit_code, time.monotonic() - started))
            if exit_code:
                break
    return runs


def _run_step(
    step: Step, workdir: Path, report: Callable[[str], None]
) -> tuple[Literal["ran", "unchanged", "failed"], int]:
    inputs = [path for name in step.reads for path in files_of(workdir / name)]
    options = {"command": step.command}
    if step.reads and all(_is_there(step, workdir, name, options, inputs) for name in step.makes):
        report(f"{', '.join(step.makes)}: unchanged, skipped")
        return "unchanged", 0
    exit_code = _run_command(step, workdir)
    if exit_code:
        return "failed", exit_code
    for name in step.makes:
        if not (workdir / name).exists():
            raise LmtoolsError(f"{workdir / name}: not there, though the stage {step.name} says that it makes it")
        if step.reads:
            _write_manifest(workdir / name, options, inputs)
    return "ran", 0


def _is_there(step: Step, workdir: Path, name: str, options: Mapping[str, Any], inputs: Sequence[Path]) -> bool:
    return is_unchanged(workdir / name, tool=_TOOL, options=options, inputs=inputs)


def _write_manifest(output: Path, options: Mapping[str, Any], inputs: Sequence[Path]) -> None:
    records = [FileRecord.of(path) for path in inputs]
    write_manifest(output, Manifest(_TOOL, options, inputs=records, outputs=[FileRecord.of(output)], counts={}))


def files_of(path: Path) -> list[Path]:
    """A file; all files in a folder; or those that begin with the path, as the parts of a checkpoint's stem do."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(inner for inner in path.rglob("*") if inner.is_file())
    return sorted(inner for inner in path.parent.glob(f"{glob.escape(path.stem)}*") if inner.is_file())


def _run_command(step: Step, workdir: Path) -> int:
    """Run a command; returns its exit code, or 128 and the signal that ended it, as a shell does."""
    out = sys.stderr.fileno() if step.stdout is None else subprocess.PIPE
    command = [sys.executable, "-m", "lmtools", *step.argv]
    with ending_first(command, cwd=workdir, stdin=subprocess.DEVNULL, stdout=out) as child:
        content = child.communicate()[0]
    if child.returncode == 0 and step.stdout is not None:
        with atomic_write(workdir / step.stdout) as stream:
            stream.write(content)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


@contextmanager
def ending_first(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command which, while the block lasts, ends before this process does, and can put its work in order.

    A terminal's Ctrl-C reaches both; SIGTERM, which does not, is passed on, also when it comes while the command is
    started. What this process was told to ignore (`nohup`) both ignore.

    Args:
        command: and its arguments.
        **options: of `subprocess.Popen`.
    """
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def pass_on() -> None:
        while child is not None and received:
            number = received.pop(0)
            if child.poll() is None:
                child.send_signal(number)

    def handle(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            received.append(number)
            pass_on()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        child = subprocess.Popen(command, **options)
        pass_on()
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """One at a time in a folder; the lock is the folder's own, and ends with the process."""
    descriptor = os.open(workdir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LmtoolsError(
                f"{workdir}: another reproduce is at work here; wait for its end, or choose another --workdir"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EBADF):  # no locks on this disk
                raise
        yield
    finally:
        os.close(descriptor)
