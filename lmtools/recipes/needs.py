"""What a step will take, as far as that is known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

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


def needs_of(step: Step, ask: Callable[[tuple[str, ...]], Mapping[str, Any]]) -> Needs:
    """A download's size by the table of artifacts, any other step's as its recipe and its plan say.

    Args:
        step: from `steps_of`.
        ask: gives what `lmtools plan ... --json` prints, for the arguments after `lmtools`.
    """
    needs = Needs(download_bytes=None, disk_bytes=step.num_bytes, memory_bytes=None, hours=None)
    if step.plan:
        plan = ask(step.plan)
        is_training = plan["task"] == "train"
        needs["memory_bytes"] = plan["memory"]["total"] if is_training else plan["memory"]
        needs["hours"] = _training_hours(plan["time"], step.num_updates) if is_training else plan["hours"]
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


def _training_hours(time: Mapping[str, float] | None, num_updates: int | None) -> float | None:
    """Of all updates, from the plan's seconds of one; None where one of the two is not known."""
    return None if time is None or num_updates is None else sum(time.values()) * num_updates / 3600
