"""A split read as parallel streams by a model with memory, into log-probabilities in stream order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lmtools.data.dictionary import Dictionary
from lmtools.data.streams import Streams, read_chunks
from lmtools.errors import DataError
from lmtools.evaluate.run import ScoredSplit
from lmtools.evaluate.scoring import Scores
from lmtools.evaluate.splits import EvalSplit
from lmtools.models.transformer_xl import LayerMemory, TransformerXL, zero_memories
from lmtools.parallel.mesh import Mesh


def scored_part(split: EvalSplit, streams: Streams) -> EvalSplit:
    """The split, with the windows and counts of what these streams score: by fairseq's rule not every token."""
    windows = split.windows[: int(streams.bounds[-1])].copy()
    if streams.fairseq_compat:
        windows[:, 1] += 1  # the first of each chunk is seen, not scored
        windows = windows[windows[:, 1] < windows[:, 2]]
    return dataclasses.replace(split, windows=windows, tokens_skipped=split.tokens_in_split - streams.num_targets)


@torch.no_grad()
def score_streams(
    model: TransformerXL,
    split: EvalSplit,
    streams: Streams,
    mesh: Mesh,
    *,
    rows_of_types: npt.NDArray[np.int32] | None = None,
    progress: Callable[[int], None],
) -> ScoredSplit:
    """Read all streams side by side. Every rank of the mesh must call it; replicas share the rows.

    Memory starts empty, or by fairseq's rule as zeros, which are attended to.

    Args:
        model: on this rank's device, split or not, in eval mode.
        split: from `open_split`.
        streams: how it is cut; as many rows for each replica.
        mesh: where we are.
        rows_of_types: the model's row for each index of the split's dictionary; None if they are the same.
        progress: called after each step with the number of tokens that all replicas have just scored.

    Returns:
        The scores in stream order, on rank 0; on others none.

    Raises:
        DataError: a score is not finite; names the token.
    """
    started = time.monotonic()
    num_rows = streams.num_rows // mesh.dp_size
    rows = slice(mesh.dp_rank * num_rows, (mesh.dp_rank + 1) * num_rows)
    memories: list[LayerMemory] | None = None
    if streams.fairseq_compat:
        dtype = next(model.parameters()).dtype
        memories = zero_memories(model.config, num_rows, torch.empty(0, dtype=dtype, device=mesh.device))
    scores = np.zeros(split.tokens_in_split, dtype=np.float32)
    is_scored = np.zeros(split.tokens_in_split, dtype=np.bool_)
    for step in range(streams.num_steps):
        ids = streams.chunk_ids(step, rows)
        chunks = read_chunks(split.tokens, streams, ids, eos_index=Dictionary.eos_index, ext_len=model.config.ext_len)
        read = (chunks.tokens, chunks.targets)
        if rows_of_types is not None:
            read = (rows_of(chunks.tokens, rows_of_types), rows_of(chunks.targets, rows_of_types))
        tokens, targets = (torch.from_numpy(ids).to(mesh.device) for ids in read)
        nll, memories = model(tokens, targets, memories, keep_projections=True)
        mine = chunks.offsets >= 0
        offsets = chunks.offsets[mine]
        scores[offsets] = -nll.float().cpu().numpy()[mine]
        is_scored[offsets] = True
        _require_finite(scores, offsets, split)
        progress(_num_targets(split, streams, step))
    if mesh.dp_mesh is not None:
        for part in (scores, is_scored):
            dist.all_reduce(torch.from_numpy(part), group=mesh.dp_mesh.get_group())
    assert int(is_scored.sum()) == streams.num_targets, "every target is scored once"
    found = scores[is_scored] if mesh.rank == 0 else scores[:0]
    return ScoredSplit(found, tokens_resumed=0, seconds=time.monotonic() - started)


def rows_of(types: npt.NDArray[np.int64], rows_of_types: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The model's rows of a dictionary's indices; what is no index (IGNORED) stays."""
    return np.where(types < 0, types, rows_of_types[np.maximum(types, 0)])


def _num_targets(split: EvalSplit, streams: Streams, step: int) -> int:
    chunk_ids = streams.chunk_ids(step)
    windows = split.windows[chunk_ids[chunk_ids >= 0]]
    return int((windows[:, 2] - windows[:, 1]).sum()) - len(windows) * streams.fairseq_compat


def _require_finite(scores: Scores, offsets: np.ndarray, split: EvalSplit) -> None:
    bad = offsets[~np.isfinite(scores[offsets])]
    if len(bad):
        token = int(bad.min())
        raise DataError(
            f"{split.prefix}: the log-probability of token {token} (type {int(split.tokens[token])}) is "
            f"{scores[token]}, expected a finite number; {len(bad)} of {len(offsets)} in this step are not finite. "
            "Try --dtype float32, and check the checkpoint"
        )
