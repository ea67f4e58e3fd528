"""A Dask scheduler and workers, each a real process on a port that the system picks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass
class DaskProcesses:
    """What runs: `folder` is for the scheduler's address and what all of them print."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(json.loads((self.folder / "scheduler.json").read_text())["address"])

    def answers(self) -> bool:
        """Whether the scheduler has written where it is, to the end."""
        try:
            return bool(self.address)
        except (FileNotFoundError, json.JSONDecodeError):
            return False

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *arguments, "--scheduler-file", str(self.folder / "scheduler.json")]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        with open(self.folder / f"log.{len(self.processes)}", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,  # not where the commands run: names must mean the same in every process
                env={**os.environ, "PYTHONPATH": path, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_worker(self, **environment: str) -> subprocess.Popen[bytes]:
        """A worker of one thread without the nanny that would start another when it is killed."""
        local = str(self.folder / f"worker.{len(self.processes)}")
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", local]
        return self.start("worker", *options, **environment)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As the kernel does when memory is short: without a last word."""
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.processes.remove(process)


@contextmanager
def dask_processes(folder: Path) -> Iterator[DaskProcesses]:
    """A scheduler that answers, without workers; whatever was started ends with the block."""
    dask = DaskProcesses(folder)
    try:
        dask.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        end = time.monotonic() + 60
        while not dask.answers():
            assert time.monotonic() < end, (folder / "log.0").read_text()
            time.sleep(0.05)
        yield dask
    finally:
        for process in dask.processes:
            process.kill()
            process.wait()
