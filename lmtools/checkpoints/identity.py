"""What tells a checkpoint from another one written to the same place, without hashing gigabytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def identity_of_files(paths: Sequence[Path], *, below: Path | None = None) -> dict[str, Any]:
    """Name, bytes and time of change of each file, as JSON values.

    Args:
        paths: the files that hold parameters.
        below: names begin after this folder; the files' own names if not given.
    """
    files = []
    for path in paths:
        name, stat = str(path.relative_to(below)) if below else path.name, path.stat()
        files.append([name, stat.st_size, stat.st_mtime_ns])
    return {"checkpoint_files": files}
