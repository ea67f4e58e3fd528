"""lmtools' and fairseq's programs as processes of their own, with what they print kept for when they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
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
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment) as child:
        try:
            out, errors = child.communicate()
        except BaseException:  # told to end; `subprocess.run` would not wait after Ctrl-C, and the folder goes next
            child.kill()
            child.wait()
            raise
    if child.returncode:
        said = (errors or out).decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise LmtoolsError(f"{what} failed (exit {child.returncode}): {said[-1].removeprefix('lmtools: ')}")
    if stdout is not None:
        stdout.write_bytes(out)
