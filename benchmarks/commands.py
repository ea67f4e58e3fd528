"""Whole commands, measured from outside: what they take from start to end, with every process that they start."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What one command took.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: user and system time of all its processes.
        parent_cpu_s: that of the first process alone.
        peak_bytes: resident memory of the largest process.
    """

    wall_s: float
    cpu_s: float
    parent_cpu_s: float
    peak_bytes: int


def measure(command: Sequence[object], log: Path, *, stdout: Path | None = None) -> Usage:
    """Run a command and wait for everything that it started.

    Args:
        command: the program and its arguments.
        log: what it prints; shown if it fails.
        stdout: where its standard output goes instead.
    """
    # Servers and workers that outlive the command are handed to this process, so their time is known too.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # As where it is installed: its modules are compiled before.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    program = [*map(str, command)]
    with open(log, "wb") as errors, open(stdout or log, "ab") as output:
        start = time.perf_counter()
        first = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment).pid
    wall_s = cpu_s = parent_cpu_s = 0.0
    peak_kib = 0
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return Usage(wall_s, cpu_s, parent_cpu_s, peak_kib * 1024)
        assert ended is not None
        if ended.si_pid == first:
            wall_s = time.perf_counter() - start
            # A process that has ended, and was not waited for yet, still has its own times in /proc.
            fields = Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()
            parent_cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        _, status, usage = os.wait4(ended.si_pid, 0)
        if ended.si_pid == first and status != 0:
            sys.exit(f"{' '.join(map(str, command))}\n{log.read_text()}")
        cpu_s += usage.ru_utime + usage.ru_stime
        peak_kib = max(peak_kib, usage.ru_maxrss)


def median_usage(runs: Sequence[Usage]) -> Usage:
    """The median of each number by itself."""
    return Usage(
        statistics.median(run.wall_s for run in runs),
        statistics.median(run.cpu_s for run in runs),
        statistics.median(run.parent_cpu_s for run in runs),
        max(run.peak_bytes for run in runs),
    )


def in_turn(runs: int, **commands: Callable[[], Usage]) -> dict[str, Usage]:
    """Run the commands one after the other, all of them so many times, and give the median of each.

    What else the machine does then falls on all of them.
    """
    taken: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            taken[name].append(command())
    return {name: median_usage(usages) for name, usages in taken.items()}


def machine() -> str:
    """Cores, processor and system, in words."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{len(os.sched_getaffinity(0))} cores of {line.split(':')[1].strip()}, {platform.system()}"
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()}"


def versions(*packages: str) -> str:
    """Python's version and those of some packages."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])


def command_line() -> str:
    """How this benchmark was started, without the folders of this machine."""
    script, *arguments = sys.argv
    shown = [Path(argument).name if "/" in argument else argument for argument in arguments]
    return f"python benchmarks/{Path(script).name} {' '.join(shown)}"


def row(name: str, megabytes: float, usage: Usage) -> str:
    """A row of the table that `TABLE_HEAD` begins."""
    share = f"{usage.parent_cpu_s:.2f} ({usage.parent_cpu_s / usage.cpu_s:.1%})"
    return (
        f"| {name} | {usage.wall_s:.2f} | {megabytes / usage.wall_s:.2f} | {usage.cpu_s:.2f} | {share} | "
        f"{usage.peak_bytes / 2**20:.0f} |"
    )


TABLE_HEAD = (
    "| command | wall s | MB/s | CPU s, all processes | CPU s, first process | largest process, MiB |\n"
    "|---|---:|---:|---:|---:|---:|"
)
