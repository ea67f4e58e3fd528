"""Arrays that numpy keeps together in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt


def read_npz(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """All arrays of an `.npz`, which numpy would leave open."""
    with np.load(path) as arrays:
        return dict(arrays)
