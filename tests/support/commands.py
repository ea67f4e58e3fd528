"""Commands in processes of their own: to be killed, robbed of their disk or started twice.

They have torch imported already; their workers, where they have some, start from nothing, as always.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.processes import wait_until
from tests.support.ranks import processes_with_torch


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

    def wait_until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait for what the command shall bring about before it ends."""

        def holds_or_ended() -> bool:
            ended = not self.process.is_alive()  # looked at first: it may bring it about and end
            return bool(condition()) or ended

        wait_until(holds_or_ended, seconds)
        assert condition(), self.errors.read_text()

    def result(self, seconds: float = 90.0) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "the command did not end in time"
        return self.process.exitcode, self.output.read_text(), self.errors.read_text()


def start_command(
    arguments: Sequence[object],
    folder: Path,
    *,
    largest_file: int = -1,
    prepare: Callable[[], object] | None = None,
) -> Running:
    """`lmtools ARGUMENTS...` in the background, with its standard output and error in files in `folder`.

    Args:
        arguments: the command's.
        folder: for two files.
        largest_file: bytes that it may write into one file.
        prepare: called in the process first; a function at the top level of a module, or a `partial` of one.
    """
    number = sum(path.name.startswith("stdout") for path in folder.iterdir())
    output, errors = folder / f"stdout{number}", folder / f"stderr{number}"
    output.touch()
    process = processes_with_torch().Process(
        target=_be_lmtools, args=([*map(str, arguments)], dict(os.environ), output, errors, largest_file, prepare)
    )
    process.start()
    return Running(process, output, errors)


def _be_lmtools(
    arguments: Sequence[str],
    environment: dict[str, str],
    output: Path,
    errors: Path,
    largest_file: int,
    prepare: Callable[[], object] | None,
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
    if prepare is not None:
        prepare()
    main()
