"""What runs on this machine, as tests ask about it, on Linux.

A process may end between any two looks at it: whoever has just gone is not there, which is never an error here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

MARKER = "LMTOOLS_TEST_MARKER"
"""A variable by which a test knows the processes that it started, and theirs."""

Value = TypeVar("Value")


class Process(NamedTuple):
    """A process that has not ended, as it was a moment ago."""

    pid: int
    parent: int
    group: int
    environment: dict[str, str]


def look_at(pid: int) -> Process | None:
    """None once the process has ended, its parent having heard of that or not."""
    folder = Path(f"/proc/{pid}")
    try:
        state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # FileNotFoundError, or ProcessLookupError when it ends between opening and reading
        return None
    if state in "ZX":
        return None
    return Process(pid, int(parent), int(group), dict(each.split("=", 1) for each in variables if "=" in each))


def all_processes() -> list[Process]:
    """Every living process that this user may look into, except this one."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [process for pid in pids if pid != os.getpid() and (process := look_at(pid)) is not None]


def alive(pid: int) -> bool:
    return look_at(pid) is not None


def processes_with(marker: str) -> list[Process]:
    """Those that were started with the marker in their environment."""
    return [process for process in all_processes() if process.environment.get(MARKER) == marker]


def kill_processes_with(marker: str) -> None:
    for process in processes_with(marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def group_members(group: int) -> list[int]:
    return [process.pid for process in all_processes() if process.group == group]


def descendants(pid: int) -> list[int]:
    """Every living process that has come from this one."""
    processes = all_processes()
    found = [pid]
    for parent in found:  # which grows meanwhile
        found += [process.pid for process in processes if process.parent == parent]
    return found[1:]


def wait_until(condition: Callable[[], Value], seconds: float = 60.0) -> Value:
    """What the condition gave when it first held; fails when that takes too long."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s"
        time.sleep(0.01)
    return value
