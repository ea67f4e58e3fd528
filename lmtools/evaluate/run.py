"""One split through one model: journal, rounds, progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.journal import ScoreJournal
from lmtools.evaluate.scoring import Scores, score_windows
from lmtools.evaluate.splits import EvalSplit
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.mesh import Mesh


def score_split(
    model: TransformerLM,
    split: EvalSplit,
    dictionary: Dictionary,
    mesh: Mesh,
    *,
    batch_size: int,
    add_bos_token: bool,
    journal_path: Path | None,
    identity: Mapping[str, Any],
    resume: bool,
    progress: Callable[[int], None],
) -> Scores:
    """Score a split, from its start or from where a journal left off. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, in eval mode.
        split: from `open_split`.
        dictionary: the split's.
        mesh: where we are.
        batch_size: windows that one replica takes at a time; no result depends on it.
        add_bos_token: put `<s>` at the head of each window.
        journal_path: where finished rounds are kept until the end; None keeps none.
        identity: what the scores depend on, see `ScoreJournal`.
        resume: continue the journal, if there is one.
        progress: called on rank 0 with the number of tokens that were just scored.

    Returns:
        float32 natural-log probabilities of the scored tokens, in stream order, on rank 0; empty on the others.
    """
    pieces: list[Scores] = []
    first_window = 0
    journal = None
    if mesh.rank == 0 and journal_path is not None:
        if resume and journal_path.exists():
            journal, done, first_window = ScoreJournal.reopen(journal_path, identity, split.windows)
            pieces.append(done)
            progress(len(done))
        else:
            journal = ScoreJournal.create(journal_path, identity)

    def on_round(scores: Scores) -> None:
        if journal is not None:
            journal.append(scores)
        pieces.append(scores)
        progress(len(scores))

    try:
        score_windows(
            model,
            split.tokens,
            split.windows,
            mesh,
            batch_size=batch_size,
            eos_index=dictionary.eos_index,
            bos_index=dictionary.bos_index if add_bos_token else None,
            first_window=_same_on_all_ranks(first_window, mesh),
            on_round=on_round,
        )
    finally:
        if journal is not None:
            journal.close()
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float32)


def _same_on_all_ranks(value: int, mesh: Mesh) -> int:
    """Rank 0's value, on every rank."""
    if mesh.world_size == 1:
        return value
    box = torch.tensor([value], dtype=torch.int64, device=mesh.device)
    dist.broadcast(box, src=0)
    return int(box.item())


def scores_of_every_token(split: EvalSplit, scores: Scores) -> Scores:
    """float32 `(tokens_in_split,)`: the score of each token at its place in the stream, NaN for skipped ones."""
    lengths = split.windows[:, 2] - split.windows[:, 1]
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(len(scores)) + np.repeat(split.windows[:, 1] - firsts, lengths)
    whole = np.full(split.tokens_in_split, np.nan, dtype=np.float32)
    whole[places] = scores
    return whole
