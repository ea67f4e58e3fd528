"""Beam search: the `beam` most probable beginnings are kept and continued, one token a round.

Of the 2 * beam best continuations of a round, an end of sentence among the first `beam` ends a hypothesis, and the
first `beam` others go on; that is fairseq's rule (fairseq/search.py), and 2 * beam are always enough for it. The search
is over when `beam` hypotheses have ended, or where nothing can be added. Hypotheses are compared by
sum(log_probs) / num_tokens ** lenpen, their end of sentence included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmtools.checkpoints.models import Model
from lmtools.generate.decode import Continuation, Limits, banned_tokens, from_rank_0, require_number
from lmtools.generate.reading import start_reading
from lmtools.parallel.mesh import Mesh


@torch.no_grad()
def beam_search(
    model: Model,
    prompt: Sequence[int],
    mesh: Mesh,
    limits: Limits,
    *,
    beam: int,
    lenpen: float = 1.0,
    number: int = 0,
) -> Continuation:
    """The best continuation of a prompt that a beam search finds. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, split or not, in eval mode.
        prompt: its tokens.
        mesh: where we are; one replica.
        limits: of the continuation.
        beam: how many hypotheses are kept.
        lenpen: above 0 favours longer ones, below 0 shorter ones; 0 compares sums of log-probabilities.
        number: the prompt's, for messages.

    Raises:
        ConfigError: the prompt is empty, or longer than the model can read.
        DataError: a probability is not a number.
    """
    limits.require_fits([prompt])
    capacity = len(prompt) + limits.room(prompt) - 1
    reader = start_reading(model, 1, capacity=capacity, device=mesh.device)
    log_probs = reader.read([prompt])
    banned = banned_tokens(log_probs, limits.allowed)
    live = [Continuation()]
    ended: list[Continuation] = []
    while True:
        sums = torch.tensor([[sum(hypothesis.log_probs)] for hypothesis in live], dtype=torch.float64)
        totals = log_probs.masked_fill(banned, -torch.inf).double() + sums.to(mesh.device)
        num_candidates = min(2 * beam, len(live) * len(set(limits.allowed)))
        best = totals.flatten().topk(num_candidates).indices
        scores = log_probs.double().flatten()[best]
        from_rank_0(mesh, best, scores)

        going_on: list[tuple[int, Continuation]] = []  # with the row of `live` that each continues
        for rank, (index, score) in enumerate(zip(best.tolist(), scores.tolist(), strict=True)):
            row, token = divmod(index, log_probs.shape[-1])
            require_number(score, number, live[row].tokens)
            candidate = Continuation([*live[row].tokens, token], [*live[row].log_probs, score])
            candidate.stopped_by = limits.stop_reason(candidate.tokens, prompt)
            if candidate.stopped_by == "end of sentence":
                if rank < beam:
                    ended.append(candidate)
            elif len(going_on) < beam:
                going_on.append((row, candidate))
        if len(ended) >= beam or not going_on or going_on[0][1].stopped_by is not None:
            # Where nothing can be added, what is live ends as it is.
            cut_off = [] if len(ended) >= beam else [candidate for _, candidate in going_on]
            return max([*ended, *cut_off], key=lambda hypothesis: value(hypothesis, lenpen))
        live = [candidate for _, candidate in going_on]
        reader.select([row for row, _ in going_on])
        log_probs = reader.read([hypothesis.tokens[-1:] for hypothesis in live])


def value(hypothesis: Continuation, lenpen: float) -> float:
    """What hypotheses are compared by."""
    return float(sum(hypothesis.log_probs) / len(hypothesis.tokens) ** lenpen)
