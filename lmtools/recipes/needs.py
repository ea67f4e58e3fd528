"""What a step will take, as far as that is known before it runs."""

from __future__ import annotations

from typing import TypedDict

from lmtools.preprocess.sources import ARTIFACTS
from lmtools.recipes.recipe import Step


class Needs(TypedDict):
    """Bytes to fetch, and bytes that stay on the disk; None where nobody knows."""

    download_bytes: int | None
    disk_bytes: int | None


def needs_of(step: Step) -> Needs:
    """A download's size by the table of artifacts, any other step's as its recipe says."""
    if step.argv[:1] != ("download",):
        return {"download_bytes": None, "disk_bytes": step.num_bytes}
    wanted = [artifact for artifact in ARTIFACTS if artifact.name in step.argv]
    sizes = [file.num_bytes for artifact in wanted for file in artifact.files]
    known = [size for size in sizes if size is not None]
    download_bytes = sum(known) if len(known) == len(sizes) else None
    unpacked = sum(
        artifact.unpacked_num_bytes or sum(file.num_bytes or 0 for file in artifact.files) for artifact in wanted
    )
    return {"download_bytes": download_bytes, "disk_bytes": step.num_bytes or unpacked}
