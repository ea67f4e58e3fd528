"""One split through one model: journal, rounds, progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.batches import Bounds, tokens_after_rounds
from lmtools.evaluate.journal import ScoreJournal
from lmtools.evaluate.scoring import Scores, score_windows
from lmtools.evaluate.splits import EvalSplit
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.mesh import Mesh


@dataclass(frozen=True)
class ScoredSplit:
    """What came out of an evaluation.

    Attributes:
        log_probs: float32 natural-log probabilities of the scored tokens, in stream order; on rank 0, empty on others.
        tokens_resumed: how many of them a run before this one had scored.
        seconds: wall-clock time of scoring the others.
    """

    log_probs: Scores
    tokens_resumed: int
    seconds: float


def score_split(
    model: TransformerLM,
    split: EvalSplit,
    dictionary: Dictionary,
    mesh: Mesh,
    *,
    bounds: Bounds,
    rows: npt.NDArray[np.int32] | None = None,
    add_bos_token: bool,
    journal_path: Path | None,
    identity: Mapping[str, Any],
    resume: bool,
    say: Callable[[str], None],
    progress: Callable[[int], None],
) -> ScoredSplit:
    """Score a split, from its start or from where a journal left off. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, in eval mode.
        split: from `open_split`.
        dictionary: the split's.
        mesh: where we are.
        bounds: of the batches, from `cut_batches`; no result depends on them.
        rows: the model's row for each index of the dictionary; None if they are the same.
        add_bos_token: put `<s>` at the head of each window.
        journal_path: where finished rounds are kept until the end; None keeps none.
        identity: what the scores depend on, see `ScoreJournal`; rank 0's counts.
        resume: continue the journal, if there is one.
        say: called on rank 0 with a line about scores of an unfinished run that are lost without `resume`.
        progress: called on rank 0 with the number of tokens that were just scored.
    """
    started = time.monotonic()
    pieces: list[Scores] = []
    first_round = 0
    journal = None
    if mesh.rank == 0 and journal_path is not None:
        if resume and journal_path.exists() and journal_path.stat().st_size > 0:
            rounds = tokens_after_rounds(split.windows, bounds, mesh.dp_size)
            journal, done, first_round = ScoreJournal.reopen(journal_path, identity, rounds)
            pieces.append(done)
            progress(len(done))
        else:
            journal = ScoreJournal.create(journal_path, identity, say)
    tokens_resumed = sum(map(len, pieces))

    def on_round(scores: Scores) -> None:
        if journal is not None:
            journal.append(scores)
        pieces.append(scores)
        progress(len(scores))

    if rows is None:
        rows = np.arange(len(dictionary), dtype=np.int32)
        tokens = split.tokens
    else:
        tokens = rows[split.tokens]
    try:
        score_windows(
            model,
            tokens,
            split.windows,
            mesh,
            bounds=bounds,
            eos_index=int(rows[dictionary.eos_index]),
            bos_index=int(rows[dictionary.bos_index]) if add_bos_token else None,
            first_round=_same_on_all_ranks(first_round, mesh),
            on_round=on_round,
        )
    finally:
        if journal is not None:
            journal.close()
    log_probs = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float32)
    return ScoredSplit(log_probs, tokens_resumed, time.monotonic() - started)


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
