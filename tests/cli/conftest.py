"""Commands as a user types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lmtools.cli import main
from tests.support.commands import MARKER, processes_with
from tests.support.ranks import processes_with_torch

REPOSITORY = Path(__file__).parents[2]


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


Lmtools = Callable[..., Ran]


@pytest.fixture
def lmtools(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Lmtools:
    """Runs `lmtools ARGUMENTS...` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["lmtools", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def start_lmtools() -> Callable[..., subprocess.Popen[bytes]]:
    """Starts `lmtools ARGUMENTS...` in a process and a process group of its own."""

    def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lmtools", *map(str, arguments)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, start_new_session=True, cwd=REPOSITORY, **{**pipes, **options})  # type: ignore[call-overload, no-any-return]

    return start


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A value that every process of the test has in its environment; whoever is left at the end is killed."""
    processes_with_torch()  # the server of other tests shall not have it
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, value)
    yield value
    for pid, _ in processes_with(value):
        os.kill(pid, signal.SIGKILL)
