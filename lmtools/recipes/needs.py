"""What a step will take, as far as that is known before it runs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any, TypedDict

from lmtools.errors import LmtoolsError
from lmtools.preprocess.sources import ARTIFACTS
from lmtools.recipes.recipe import Step


class Needs(TypedDict):
    """What a step takes; None where nobody knows, or where it is next to nothing.

    Attributes:
        download_bytes: what is fetched.
        disk_bytes: what stays on the disk.
        memory_bytes: of each rank, by `lmtools plan`.
        hours: by `lmtools plan`.
    """

    download_bytes: int | None
    disk_bytes: int | None
    memory_bytes: int | None
    hours: float | None


def needs_of(step: Step) -> Needs:
    """A download's size by the table of artifacts, any other step's as its recipe and its plan say."""
    plan = _plan(step.plan) if step.plan else {}
    needs = Needs(
        download_bytes=None, disk_bytes=step.num_bytes, memory_bytes=plan.get("memory"), hours=plan.get("hours")
    )
    if step.argv[:1] != ("download",):
        return needs
    wanted = [artifact for artifact in ARTIFACTS if artifact.name in step.argv]
    sizes = [file.num_bytes for artifact in wanted for file in artifact.files]
    known = [size for size in sizes if size is not None]
    needs["download_bytes"] = sum(known) if len(known) == len(sizes) else None
    needs["disk_bytes"] = step.num_bytes or sum(
        artifact.unpacked_num_bytes or sum(file.num_bytes or 0 for file in artifact.files) for artifact in wanted
    )
    return needs


@functools.cache
def _plan(argv: tuple[str, ...]) -> dict[str, Any]:
    """What the command `lmtools plan ...` of a recipe says."""
    command = [sys.executable, "-m", "lmtools", *argv, "--json"]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or ["it said nothing"]
        raise LmtoolsError(f"lmtools {' '.join(argv)}: {said[-1].removeprefix('lmtools: ')}")
    document: dict[str, Any] = json.loads(ran.stdout)
    return document
