"""lmtools' and fairseq's programs as processes of their own, with what they print kept for when they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmtools.errors import ConfigError, LmtoolsError

ENVIRONMENT_NAME = "LMTOOLS_FAIRSEQ_PYTHON"

_VERSIONS = """
import importlib.metadata, importlib.util, json, sys
if importlib.util.find_spec("fairseq") is None:
    sys.exit(3)
installed = {}
for name in ("fairseq", "ve-fairseq", "sacremoses", "torch", "numpy"):
    try:
        installed[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(installed))
"""


@dataclass(frozen=True)
class Fairseq:
    """An interpreter that has fairseq.

    Attributes:
        python: the interpreter.
        versions: of what matters, by package.
    """

    python: str
    versions: dict[str, str]

    def run(self, what: str, arguments: Sequence[str], *, stdout: Path | None = None) -> None:
        """Run `python ARGUMENTS...`; standard output goes to a file, if one is given.

        Raises:
            LmtoolsError: it failed; gives the last line that it said.
        """
        _run(f"fairseq's {what}", [self.python, *arguments], stdout)


def find_fairseq(python: str | None) -> Fairseq:
    """The interpreter that is given, else the one that LMTOOLS_FAIRSEQ_PYTHON names, else this one.

    Raises:
        ConfigError: it does not run, or has no fairseq; says how to install it.
    """
    python = python or os.environ.get(ENVIRONMENT_NAME) or sys.executable
    try:
        ran = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--fairseq-python {python}: does not run ({error.strerror})") from error
    if ran.returncode:
        raise ConfigError(
            f"crosscheck: {python} has no fairseq; run `pip install 'lmtools[fairseq]'` with Python 3.11, or name an "
            f"interpreter that has it with --fairseq-python or {ENVIRONMENT_NAME}"
        )
    return Fairseq(python, json.loads(ran.stdout.splitlines()[-1]))


def run_lmtools(arguments: Sequence[str]) -> None:
    """Run `lmtools ARGUMENTS...`.

    Raises:
        LmtoolsError: it failed; gives the last line that it said.
    """
    _run(f"lmtools {arguments[0]}", [sys.executable, "-m", "lmtools", *arguments], None)


def _run(what: str, command: Sequence[str], stdout: Path | None) -> None:
    # The text is UTF-8, whatever the locale; fairseq opens it as the locale says.
    environment = os.environ | {"PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    child: subprocess.Popen[bytes] | None = None
    try:
        with _signals_held():
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment)
        out, errors = child.communicate()
    except BaseException:  # told to end; `subprocess.run` would not wait after Ctrl-C, and the folder goes next
        if child is not None:
            with child:  # closes its pipes, and waits
                child.kill()
        raise
    if child.returncode:
        said = (errors or out).decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise LmtoolsError(f"{what} failed (exit {child.returncode}): {said[-1].removeprefix('lmtools: ')}")
    if stdout is not None:
        stdout.write_bytes(out)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end this process have their effect when the block ends.

    Around the start of a program: an exception in the middle of that would leave it running, and nobody to know of it.
    """
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    # What is ignored stays so: the program is to ignore it too.
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received in held:
            signal.raise_signal(received)
