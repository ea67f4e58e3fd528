"""Commands in processes of their own: to be killed, robbed of their disk or started twice.

They have torch imported already; their workers, where they have some, start from nothing, as always.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.ranks import processes_with_torch

MARKER = "LMTOOLS_TEST_MARKER"
"""A variable by which a test knows the processes that it started, and theirs."""


def processes_with(marker: str) -> list[tuple[int, dict[str, str]]]:
    """Living processes with the marker, other than this one, and their environments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        if environment.get(MARKER) == marker and int(folder.name) != os.getpid():
            found.append((int(folder.name), environment))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0, *, of: Running | None = None) -> None:
    """Wait for what a command, if one is named, shall bring about before it ends."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited too long"
        assert of is None or of.process.is_alive() or condition(), of.errors.read_text()
        time.sleep(0.005)


@dataclass(frozen=True)
class Running:
    """A command, in a process group of its own."""

    process: BaseProcess
    output: Path
    errors: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def result(self, seconds: float = 90.0) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "the command did not end in time"
        return self.process.exitcode, self.output.read_text(), self.errors.read_text()


def start_command(arguments: Sequence[object], folder: Path, *, largest_file: int = -1) -> Running:
    """`lmtools ARGUMENTS...` in the background, with its standard output and error in files in `folder`."""
    number = sum(path.name.startswith("stdout") for path in folder.iterdir())
    output, errors = folder / f"stdout{number}", folder / f"stderr{number}"
    output.touch()
    process = processes_with_torch().Process(
        target=_be_lmtools, args=([*map(str, arguments)], dict(os.environ), output, errors, largest_file)
    )
    process.start()
    return Running(process, output, errors)


def _be_lmtools(
    arguments: Sequence[str], environment: dict[str, str], output: Path, errors: Path, largest_file: int
) -> None:
    os.setsid()
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["lmtools", *arguments]

    import torch

    from lmtools.cli import main

    torch.set_num_threads(1)
    main()
