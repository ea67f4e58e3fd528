"""What all plans count with."""

from __future__ import annotations

from typing import Literal, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Device: TypeAlias = Literal["cuda", "cpu"]

FLOAT32_BYTES = 4
TOKEN_BYTES = 8


def mask_bytes(device: Device, itemsize: int) -> int:
    """Of an element of a dropout's mask: kernels of a GPU keep a byte, others an element."""
    return 1 if device == "cuda" else itemsize
