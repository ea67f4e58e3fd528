"""A checkpoint in any number of parts, written again in any other number and in any format that lmtools writes.

check     every part's checksums, and replicated tensors against each other
write     tensor by tensor, a few megabytes at a time, into a temporary folder
verify    if asked for: what was written is read again and compared, bit by bit
rename    the folder takes its name; until then there is nothing under it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lmtools.artifacts import FileRecord
from lmtools.checkpoints.fairseq_write import padded_vocab_size, write_fairseq
from lmtools.checkpoints.huggingface import require_xglm, write_huggingface
from lmtools.checkpoints.huggingface_read import HuggingFaceCheckpoint
from lmtools.checkpoints.load import Checkpoint, open_checkpoint, require_divisible, require_transformer_lm
from lmtools.checkpoints.safetensors_write import write_safetensors
from lmtools.checkpoints.training_read import TrainingCheckpoint
from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint
from lmtools.checkpoints.weights import (
    Progress,
    Weights,
    Writer,
    bytes_of,
    converted,
    part_slices,
    row_blocks,
    shape_of,
    weights_of,
)
from lmtools.errors import CheckpointError, ConfigError
from lmtools.files import atomic_directory, require_free_space
from lmtools.parallel.plans import TRANSFORMER_LM, Split, split_of

WRITERS: dict[str, Writer] = {"fairseq": write_fairseq, "safetensors": write_safetensors, "hf": write_huggingface}

Bar = Callable[[str, int], AbstractContextManager[Progress]]
"""Shows how far a phase is: its name and its number of bytes."""


def _no_bar(description: str, total: int) -> AbstractContextManager[Progress]:
    return nullcontext(lambda num_bytes: None)


def reshard(
    source: str | Path,
    target: str | Path,
    *,
    num_parts: int,
    format: str,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    allow_replica_drift: bool = False,
    more_files: Mapping[str, str] | None = None,
    bar: Bar = _no_bar,
) -> dict[str, Any]:
    """Write a checkpoint again. It takes one process and a few megabytes, whatever the model's size.

    The optimizer's state is not written.

    Args:
        source: what `open_checkpoint` takes.
        target: a folder that must not exist or be empty; complete or absent afterwards.
        num_parts: how many parts; the attention heads must divide by it.
        format: a key of `WRITERS`.
        dtype: what the parameters are converted to; None keeps each as it is.
        verify: read what was written again and compare it.
        allow_replica_drift: where copies of a replicated tensor differ, take part 0's instead of refusing.
        more_files: name and content of other files for the folder, such as a tokenizer's.
        bar: shows the progress of each phase.

    Returns:
        What was read and written, as JSON values.

    Raises:
        CheckpointError: the source is incomplete or damaged, its parts contradict each other, a value is too large for
            `dtype`, or what was written is not what was read.
        ConfigError: the parts do not divide the model, or the format does not have it.
        LmtoolsError: the target has content, or the disk is full or may not be written.
    """
    checkpoint = open_checkpoint(source)
    config = require_transformer_lm(checkpoint, "reshard takes plain transformers")
    require_divisible(checkpoint, num_parts)
    if isinstance(checkpoint, HuggingFaceCheckpoint) and checkpoint.settings["model_type"] != "xglm":
        raise ConfigError(f"{source}: a GPT-2 model, whose vocabulary is no fairseq dictionary's; use it as it is")
    if format == "hf":
        require_xglm(config, num_parts)
    target = Path(target)
    dtypes = checkpoint.dtypes
    weights = weights_of(config, checkpoint.read, {name: dtype or dtypes[name] for name in dtypes})
    with atomic_directory(target) as temporary:
        num_bytes = _num_bytes(weights, num_parts)
        require_free_space(temporary, num_bytes, str(target))
        drifted = _check(checkpoint, allow_replica_drift, bar)
        origin = _origin(checkpoint, drifted, bar)
        with bar("write", num_bytes) as progress:
            paths = WRITERS[format](temporary, weights, num_parts=num_parts, origin=origin, progress=progress)
        for name, content in (more_files or {}).items():
            (temporary / name).write_text(content, encoding="utf-8", newline="")
        written = open_checkpoint(temporary)
        _require_conserved(checkpoint, written, weights)
        if verify:
            _verify(weights, written, num_bytes, bar)
        sizes = {path.name: path.stat().st_size for path in paths}
    return {
        "source": {"path": str(source), "format": checkpoint.format, "num_parts": checkpoint.num_parts},
        "target": {"path": str(target), "format": format, "num_parts": num_parts, "files": sizes},
        "num_parameters": weights.num_parameters,
        "vocab_size": weights.config.vocab_size,
        "rows_added": _rows_added(weights, num_parts, format),
        "dtypes": sorted({str(kind).removeprefix("torch.") for kind in weights.dtypes.values()}),
        "replica_drift": drifted,
        "verified": verify,
    }


def _check(checkpoint: Checkpoint, allow_replica_drift: bool, bar: Bar) -> list[str]:
    """Check every part; returns the replicated tensors that differ, if that is allowed."""
    drifted: set[str] = set()
    with bar("check", sum(path.stat().st_size for path in checkpoint.paths)) as progress:
        for part, path in enumerate(checkpoint.paths):
            checkpoint.verify_part(part, allow_replica_drift=allow_replica_drift)
            if allow_replica_drift:
                drifted |= set(checkpoint.drifted(part))
            progress(path.stat().st_size)
    return sorted(drifted)


def _origin(checkpoint: Checkpoint, drifted: list[str], bar: Bar) -> dict[str, Any]:
    """What the checkpoint was made from, for whoever finds it."""
    files = []
    with bar("hash", sum(path.stat().st_size for path in checkpoint.paths)) as progress:
        for path in checkpoint.paths:
            record = FileRecord.of(path)
            files.append({"path": record.path, "num_bytes": record.num_bytes, "sha256": record.sha256})
            progress(record.num_bytes)
    return {
        "format": checkpoint.format,
        "num_parts": checkpoint.num_parts,
        "files": files,
        "replica_drift": drifted,
    }


def _rows_added(weights: Weights, num_parts: int, format: str) -> int:
    if format != "fairseq":
        return 0
    return padded_vocab_size(weights.config.vocab_size, num_parts) - weights.config.vocab_size


def _num_bytes(weights: Weights, num_parts: int) -> int:
    """Bytes of all parts' tensors together, without the rows that fairseq's layout may add."""
    return sum(
        math.prod(shape_of(part_slices(name, shape, TRANSFORMER_LM, num_parts, part))) * weights.dtypes[name].itemsize
        for name, shape in weights.shapes.items()
        for part in range(num_parts)
    )


def _require_conserved(source: Checkpoint, written: Checkpoint, weights: Weights) -> None:
    """Of each parameter as many elements are in the files that were read, and in those written, as the model has."""
    if written.config != source.config:
        raise CheckpointError(f"{written.paths[0].name}: describes another model than was read; please report this")
    # transformers' learned positions lack two rows that ours have.
    checkpoints = [written] if source.format == "hf" else [source, written]
    for checkpoint in checkpoints:
        counts = count_elements(checkpoint)
        for name, shape in weights.shapes.items():
            if counts.get(name) != math.prod(shape):
                raise CheckpointError(
                    f"{checkpoint.paths[0].name}: {counts.get(name)} elements of {name}, expected {math.prod(shape)}"
                )


def count_elements(checkpoint: Checkpoint) -> dict[str, int]:
    """How many elements of each parameter are in the files, copies of replicated ones not counted."""
    if isinstance(checkpoint, TrainingCheckpoint):
        return {name: sum(math.prod(chunk.sizes) for chunk in chunks) for name, chunks in checkpoint.chunks.items()}
    assert not isinstance(checkpoint, TransformerXLCheckpoint), "see reshard"
    counts = {}
    for name in checkpoint.parts[0]:
        holders = checkpoint.parts[:1] if split_of(name, TRANSFORMER_LM) is Split.REPLICATED else checkpoint.parts
        counts[name] = sum(part[name].num_elements for part in holders)
    return counts


def _verify(weights: Weights, written: Checkpoint, num_bytes: int, bar: Bar) -> None:
    """Compare every bit of what is in the files with what should be, and the files with their checksums."""
    num_parts = written.num_parts
    with bar("verify", num_bytes) as progress:
        for part in range(num_parts):
            written.verify_part(part)  # so the copies of a replicated tensor are equal, and one is enough below
            for name, shape in weights.shapes.items():
                if part > 0 and split_of(name, TRANSFORMER_LM) is Split.REPLICATED:
                    continue
                dtype = weights.dtypes[name]
                for block in row_blocks(part_slices(name, shape, TRANSFORMER_LM, num_parts, part), dtype.itemsize):
                    expected, found = converted(weights.read(name, block), dtype, name), written.read(name, block)
                    if found.dtype != dtype or bytes_of(found) != bytes_of(expected):
                        raise CheckpointError(
                            f"{written.paths[part].name}: {name} is not what was read; the disk or memory is faulty"
                        )
                    progress(found.nbytes)
