"""A model as fairseq would have saved it: out of a training checkpoint, a tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.training_read import open_training


def export_fairseq(
    checkpoint: str | Path, folder: str | Path, *, num_parts: int, dtype: torch.dtype | None = None
) -> list[Path]:
    """Write a training checkpoint's model as fairseq's parts; one part is a plain `transformer_lm`.

    It takes one process, whatever the mesh that trained, and as much memory as one part and one tensor. The optimizer's
    state is not written.

    Args:
        checkpoint: a training checkpoint's folder.
        folder: where the parts go; it must not exist or be empty.
        num_parts: how many model-parallel ranks the files are for.
        dtype: what the parameters are converted to; None keeps what was trained in.

    Returns:
        The files, in rank order.

    Raises:
        CheckpointError: the checkpoint is not complete, or is damaged.
        ConfigError: the parts would not be of equal size, as fairseq needs them.
        LmtoolsError: the folder has content, or the disk is full or may not be written.
    """
    source = open_training(checkpoint)
    for part in range(source.num_parts):
        source.verify_part(part)
    dtype = dtype or source.dtypes["embed_tokens.weight"]
    return write_fairseq_parts(folder, source.config, source.read, num_parts=num_parts, dtype=dtype)
