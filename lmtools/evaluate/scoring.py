"""Model and windows in, log-probabilities of every token out, in stream order.

The rounds of an evaluation are the same on every rank (`batches.py`): the dp replicas take consecutive batches of
windows, score them, and rank 0 receives all of the round's scores in stream order. What rank 0 has received is
therefore always a prefix of the stream, which is what makes a run that was killed resumable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.checkpoints.offload import is_offloaded
from lmtools.data.blocks import Offsets, Tokens, window_input
from lmtools.errors import DataError
from lmtools.evaluate.batches import Bounds, batches_of_round, num_rounds
from lmtools.models.transformer_lm import PAD_INDEX, TransformerLM
from lmtools.parallel.mesh import Mesh

LOGITS_BYTES = 128 << 20
"""Logits are made for so many positions at a time that they stay under this, whatever the batch."""

CPU_ACTIVATION_BYTES = 8 << 20
"""A larger one leaves the cache, and where `parallel/allocator.py` was not asked to keep it, its memory is faulted in
again every time: at 6 layers, d 512 and windows of 1,024 tokens a batch of 8 is a tenth faster window by window."""

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Some windows as one rectangle.

    Attributes:
        tokens: int64 `(B, T)`, each row a window's input, padded on the right.
        score_from: the first position that any row scores; earlier ones are context in every row.
        scored: int64 `(S,)`, flat indices of the scored positions in `(B, T - score_from)`, in stream order.
        targets: int64 `(S,)`, the tokens that they predict.
    """

    tokens: Tensor
    score_from: int
    scored: Tensor
    targets: Tensor


def make_batch(stream: Tokens, windows: Offsets, *, eos_index: int, bos_index: int | None = None) -> Batch:
    """Cut windows out of the stream.

    Args:
        stream: the split's tokens.
        windows: int64 `(B, 3)`: context_start, start, end.
        eos_index: stands before the stream's first token.
        bos_index: a token to put at the head of each window (fairseq's `--add-bos-token`), or None.
    """
    head = [] if bos_index is None else [bos_index]
    contexts = windows[:, 1] - windows[:, 0] + len(head)
    lengths = windows[:, 2] - windows[:, 0] + len(head)
    width, score_from = int(lengths.max()), int(contexts.min())
    tokens = np.full((len(windows), width), PAD_INDEX, dtype=np.int64)
    scored = []
    targets = []
    for row, (context_start, start, end) in enumerate(windows.tolist()):
        tokens[row, : lengths[row]] = np.concatenate(
            [head, window_input(stream, context_start, end, eos_index=eos_index)]
        )
        offset = row * (width - score_from) - score_from
        scored.append(np.arange(contexts[row], lengths[row]) + offset)
        targets.append(stream[start:end].astype(np.int64))
    return Batch(
        torch.from_numpy(tokens),
        score_from,
        torch.from_numpy(np.concatenate(scored)),
        torch.from_numpy(np.concatenate(targets)),
    )


@torch.no_grad()  # not inference_mode: under it a split cross-entropy is not taken apart for `loss_parallel`
def score_batch(model: TransformerLM, batch: Batch, device: torch.device) -> Tensor:
    """Natural-log probability of each scored token. Every rank of the model's tp mesh must call it.

    Logits are made only for positions that are scored, a few at a time, and never gathered over the ranks.

    Returns:
        float32 `(S,)` on the CPU, in stream order, the same on every tp rank.
    """
    tokens = batch.tokens.to(device)
    hidden = torch.cat(
        [
            model.features(tokens[start : start + num_rows], batch.score_from)
            for num_rows in [_rows_at_a_time(model, tokens)]
            for start in range(0, len(tokens), num_rows)
        ]
    ).flatten(0, 1)
    if len(batch.scored) < len(hidden):
        hidden = hidden[batch.scored.to(device)]
    targets = batch.targets.to(device)
    rows = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    pieces = [
        token_log_probs(model.output_projection, hidden[start : start + rows], targets[start : start + rows])
        for start in range(0, len(hidden), rows)
    ]
    return torch.cat(pieces).cpu()


def _rows_at_a_time(model: TransformerLM, tokens: Tensor) -> int:
    """On a CPU as many as keep the widest activation within CPU_ACTIVATION_BYTES; all on a GPU, or off the disk."""
    if tokens.device.type != "cpu" or is_offloaded(model):
        return len(tokens)
    bytes_per_row = tokens.shape[1] * model.config.decoder_ffn_embed_dim * model.embed_tokens.weight.itemsize
    return max(1, CPU_ACTIVATION_BYTES // bytes_per_row)


def token_log_probs(output_projection: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target], in float32 whatever the model's dtype.

    Args:
        output_projection: gives logits `(S, V)`, or a DTensor split over V.
        hidden: `(S, E)`.
        targets: int64 `(S,)`.

    Returns:
        float32 `(S,)`.
    """
    logits = output_projection(hidden).float()
    if isinstance(logits, DTensor):
        with loss_parallel():
            nll = F.cross_entropy(logits, targets, reduction="none")
        return -nll.full_tensor() if isinstance(nll, DTensor) else -nll
    return -F.cross_entropy(logits, targets, reduction="none")


def score_windows(
    model: TransformerLM,
    stream: Tokens,
    windows: Offsets,
    mesh: Mesh,
    *,
    bounds: Bounds,
    eos_index: int,
    bos_index: int | None = None,
    first_round: int = 0,
    on_round: Callable[[Scores], None],
) -> None:
    """Score the windows in order, from round `first_round` on. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, split or not, in eval mode.
        stream: the split's tokens.
        windows: int64 `(num_windows, 3)`, the same on every rank.
        mesh: where we are.
        bounds: of the batches, from `cut_batches`.
        eos_index: stands before the stream's first token.
        bos_index: a token at the head of each window, or None.
        first_round: how many rounds were scored before.
        on_round: called on rank 0 alone, after each round, with the round's log-probabilities in stream order,
            float32 `(tokens of the round,)`.

    Raises:
        DataError: a score is not finite; names block and token. Raised on every rank.
    """
    for round_index in range(first_round, num_rounds(bounds, mesh.dp_size)):
        batches = [windows[start:stop] for start, stop in batches_of_round(bounds, round_index, mesh.dp_size)]
        mine = batches[mesh.dp_rank]
        if len(mine):
            batch = make_batch(stream, mine, eos_index=eos_index, bos_index=bos_index)
            scores = score_batch(model, batch, mesh.device)
        else:
            scores = torch.empty(0)
        collected = _gather_over_dp(scores, batches, mesh)
        _require_finite(collected, np.concatenate(batches), int(bounds[round_index * mesh.dp_size]), stream)
        if mesh.rank == 0:
            on_round(collected)


def _gather_over_dp(scores: Tensor, batches: list[Offsets], mesh: Mesh) -> Scores:
    """The scores of a whole round, in stream order, on every rank."""
    if mesh.dp_mesh is None:
        return scores.numpy()
    counts = [int((batch[:, 2] - batch[:, 1]).sum()) for batch in batches]
    padded = F.pad(scores, (0, max(counts) - len(scores))).to(mesh.device)
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=mesh.dp_mesh.get_group())
    return torch.cat([piece[:count] for piece, count in zip(gathered, counts, strict=True)]).cpu().numpy()


def _require_finite(scores: Scores, windows: Offsets, first_window: int, stream: Tokens) -> None:
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad) == 0:
        return
    ends = np.cumsum(windows[:, 2] - windows[:, 1])
    row = int(np.searchsorted(ends, bad[0], side="right"))
    start, end = windows[row, 1], windows[row, 2]
    token = int(end - (ends[row] - bad[0]))
    raise DataError(
        f"block {first_window + row} (tokens {start} to {end - 1}): the log-probability of token {token} "
        f"(type {int(stream[token])}) is {scores[bad[0]]}, expected a finite number; {len(bad)} of {len(scores)} in "
        "this round are not finite. Try --dtype float32, and check the checkpoint"
    )
