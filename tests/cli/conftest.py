"""Commands as a user types them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lmtools.cli import main

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
