"""Model and windows in, log-probabilities of every token out, in stream order.

The rounds of an evaluation are the same on every rank: in round r the dp replicas take consecutive batches of
windows, score them, and rank 0 receives all of the round's scores in stream order. What rank 0 has received is
therefore always a prefix of the stream, which is what makes a run that was killed resumable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.data.blocks import Offsets, Tokens, window_input
from lmtools.errors import DataError
from lmtools.models.transformer_lm import PAD_INDEX, TransformerLM
from lmtools.parallel.mesh import Mesh

LOGITS_BYTES = 128 << 20
"""Logits are made for so many positions at a time that they stay under this, whatever the batch."""

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
    hidden = model.features(batch.tokens.to(device), batch.score_from)
    hidden = hidden.flatten(0, 1)
    if len(batch.scored) < len(hidden):
        hidden = hidden[batch.scored.to(device)]
    targets = batch.targets.to(device)
    rows = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    pieces = [
        token_log_probs(model.output_projection, hidden[start : start + rows], targets[start : start + rows])
        for start in range(0, len(hidden), rows)
    ]
    return torch.cat(pieces).cpu()


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


def rounds(num_windows: int, *, batch_size: int, dp_size: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Half-open ranges of windows that one round scores, from window `first` on."""
    per_round = batch_size * dp_size
    for start in range(first, num_windows, per_round):
        yield start, min(start + per_round, num_windows)


def score_windows(
    model: TransformerLM,
    stream: Tokens,
    windows: Offsets,
    mesh: Mesh,
    *,
    batch_size: int,
    eos_index: int,
    bos_index: int | None = None,
    first_window: int = 0,
    on_round: Callable[[Scores], None],
) -> None:
    """Score the windows from `first_window` on, in order. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, split or not, in eval mode.
        stream: the split's tokens.
        windows: int64 `(num_windows, 3)`, the same on every rank.
        mesh: where we are.
        batch_size: windows that one replica takes at a time.
        eos_index: stands before the stream's first token.
        bos_index: a token at the head of each window, or None.
        first_window: how many windows were scored before.
        on_round: called on rank 0 alone, after each round, with the round's log-probabilities in stream order,
            float32 `(tokens of the round,)`.

    Raises:
        DataError: a score is not finite; names block and token. Raised on every rank.
    """
    for start, stop in rounds(len(windows), batch_size=batch_size, dp_size=mesh.dp_size, first=first_window):
        low = start + mesh.dp_rank * batch_size
        mine = windows[low : min(low + batch_size, stop)]
        if len(mine):
            batch = make_batch(stream, mine, eos_index=eos_index, bos_index=bos_index)
            scores = score_batch(model, batch, mesh.device)
        else:
            scores = torch.empty(0)
        collected = _gather_over_dp(scores, windows, start, stop, batch_size, mesh)
        _require_finite(collected, windows[start:stop], start, stream)
        if mesh.rank == 0:
            on_round(collected)


def _gather_over_dp(scores: Tensor, windows: Offsets, start: int, stop: int, batch_size: int, mesh: Mesh) -> Scores:
    """The scores of a whole round, in stream order, on every rank."""
    if mesh.dp_mesh is None:
        return scores.numpy()
    counts = [
        int((piece[:, 2] - piece[:, 1]).sum())
        for rank in range(mesh.dp_size)
        for piece in [windows[start + rank * batch_size : min(start + (rank + 1) * batch_size, stop)]]
    ]
    width = max(counts)
    padded = F.pad(scores, (0, width - len(scores))).to(mesh.device)
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
