"""Writes the sets that `safetensors.py` reads: a few megabytes of them are in memory, and the manifest comes last."""

from __future__ import annotations

import hashlib
import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmtools import __version__
from lmtools.checkpoints.safetensors import FORMAT, FORMAT_VERSION, MANIFEST_NAME, SET_ID
from lmtools.checkpoints.safetensors_files import NAMES, encode_header
from lmtools.checkpoints.weights import Progress, Weights, part_slices, shape_of, stream_bytes
from lmtools.files import atomic_write_text, fsync_file
from lmtools.parallel.plans import TRANSFORMER_LM, split_of


def write_safetensors(
    folder: Path,
    weights: Weights,
    *,
    num_parts: int,
    origin: Mapping[str, Any],
    progress: Progress = lambda num_bytes: None,
) -> list[Path]:
    """A `Writer`. Each part is a file; the manifest has the origin."""
    names = [
        f"model-{part}-of-{num_parts}.safetensors" if num_parts > 1 else "model.safetensors"
        for part in range(num_parts)
    ]
    set_id = uuid.uuid4().hex
    records = []
    tensors: dict[str, dict[str, Any]] = {
        name: {
            "dtype": NAMES[weights.dtypes[name]],
            "shape": list(shape),
            "split": split_of(name, TRANSFORMER_LM).value,
            "crc32": [],
        }
        for name, shape in weights.shapes.items()
    }
    for part, name in enumerate(names):
        path = folder / name
        sha256, crc32 = _write_part(path, weights, num_parts, part, {SET_ID: set_id}, progress)
        records.append({"path": name, "num_bytes": path.stat().st_size, "sha256": sha256})
        for tensor, checksum in crc32.items():
            tensors[tensor]["crc32"].append(f"{checksum:08x}")
        fsync_file(path)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tool_version": __version__,
        "set_id": set_id,
        "model": asdict(weights.config),
        "num_parameters": weights.num_parameters,
        "parts": records,
        "tensors": tensors,
        "origin": dict(origin),
    }
    atomic_write_text(folder / MANIFEST_NAME, json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    return [folder / name for name in names]


def _write_part(
    path: Path, weights: Weights, num_parts: int, part: int, metadata: Mapping[str, str], progress: Progress
) -> tuple[str, dict[str, int]]:
    """Write one file; returns its sha256 and the crc32 of each tensor."""
    slices = {name: part_slices(name, shape, TRANSFORMER_LM, num_parts, part) for name, shape in weights.shapes.items()}
    # The widest elements first, as the format's own writer does: so each tensor begins at a multiple of its itemsize.
    order = sorted(slices, key=lambda name: -weights.dtypes[name].itemsize)
    beginning = encode_header({name: shape_of(slices[name]) for name in order}, weights.dtypes, metadata)
    crc32: dict[str, int] = {}
    with open(path, "wb") as stream:
        sha256 = hashlib.sha256()
        sha256.update(beginning)
        stream.write(beginning)
        for name in order:
            crc32[name] = 0
            for chunk in stream_bytes(weights, name, slices[name]):
                stream.write(chunk)
                sha256.update(chunk)
                crc32[name] = zlib.crc32(chunk, crc32[name])
                progress(chunk.nbytes)
    return sha256.hexdigest(), crc32
