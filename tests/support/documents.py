"""The commands that the documentation shows, found and run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(page: Path, language: str | None = None) -> list[str]:
    """The fenced blocks of a page: all of them, or those marked with a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [content for marked, content in fenced if language in (None, marked)]


def lmtools_commands(page: Path) -> list[list[str]]:
    """Every `lmtools ...` line in a page's blocks, as arguments."""
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    shown = [re.search(r"^(?:\$ |torchrun .* -m )?(lmtools .*)$", line) for line in lines]
    return [shlex.split(found[1], comments=True)[1:] for found in shown if found]


def run_block(block: str, folder: Path) -> str:
    """Run a block as it stands, in a folder, with a shell that stops at the first failure; returns standard output.

    Only `--mp 8` becomes `--mp 2`: 8 processes would take a small machine too long to start.
    """
    programs = Path(sys.executable).parent
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.replace("--mp 8", "--mp 2")],
        cwd=folder,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout
