"""What the scripts that train a model share: a text in three parts, and lmtools' own commands in a folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def split_text(texts: Sequence[Path], folder: Path) -> None:
    """Write the first 85 % of the texts' lines to train.txt, 5 % to valid.txt and 10 % to test.txt."""
    lines: list[str] = []
    for text in texts:
        lines += text.read_text(encoding="utf-8").split("\n")
        if lines[-1] == "":
            lines.pop()
    bounds = [0, len(lines) * 85 // 100, len(lines) * 90 // 100, len(lines)]
    for name, start, end in zip(("train", "valid", "test"), bounds, bounds[1:], strict=False):
        content = "".join(f"{line}\n" for line in lines[start:end])
        (folder / f"{name}.txt").write_text(content, encoding="utf-8")


def lmtools(command: str, folder: Path, *, capture: bool = False) -> str:
    """Run a command of lmtools; what it says goes to the terminal."""
    print(f"$ lmtools {command}", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "lmtools", *shlex.split(command)],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE if capture else sys.stderr,
        text=True,
        env=os.environ | {"COLUMNS": "100", "LINES": "30"},
    )
    return done.stdout if capture else ""
