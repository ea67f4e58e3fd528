"""Tasks for worker processes, which find them by name; run as a program, a parent with two workers at work."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from lmtools.errors import DataError
from lmtools.preprocess.lines import scratch_folder
from lmtools.preprocess.workers import run_ordered


def square_slowly(number: int) -> int:
    time.sleep(0.02 * (number % 3 == 0))
    return number * number


def pid(_: object) -> int:
    return os.getpid()


def meet(folder: Path) -> int:
    """The process that runs this, once another one does too."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return os.getpid()


def hang(_: object) -> None:
    os.write(sys.stdout.fileno(), b"%d\n" % os.getpid())
    time.sleep(100)


def is_imported(module: str) -> bool:
    return module in sys.modules


def ignores_ctrl_c(_: object) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def fail(number: int) -> int:
    time.sleep(0.2 * number)
    if number < 2:
        raise DataError(f"item {number}")
    return number


def divide(number: int) -> float:
    return 1 / number


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(mark: Path) -> str:
    """Kills its process, but for the second time."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return "again"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def _work(output: str) -> None:
    with scratch_folder(output) as scratch:
        (scratch / "part").write_bytes(b"half of it")
        list(run_ordered(hang, range(4), workers=2))


if __name__ == "__main__":
    assert not Path(sys.argv[1]).exists()
    try:
        _work(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
