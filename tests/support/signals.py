"""A signal at the worst moment: while a program is started, when nobody knows of it yet."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest


def signalled_in_popen(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> list[subprocess.Popen[bytes]]:
    """From now on this process gets the signal in `subprocess.Popen`; returns a list of what was started by then."""
    started: list[subprocess.Popen[bytes]] = []

    class Signalled(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    return started
