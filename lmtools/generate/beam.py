"""Beam search: the `beam` most probable beginnings are kept and continued, one token a round.

Of the 2 * beam best continuations of a round, an end of sentence among the first `beam` ends a hypothesis, and the
first `beam` others go on; that is fairseq's rule (fairseq/search.py), and 2 * beam are always enough for it. The search
is over when `beam` hypotheses have ended, or where nothing can be added. Hypotheses are compared by
sum(log_probs) / num_tokens ** lenpen, their end of sentence included.

Several prompts are searched side by side: a round reads one more token of all their hypotheses together. A prompt whose
search is over leaves, and none is aware of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmtools.checkpoints.models import Model
from lmtools.generate.decode import Continuation, Limits, banned_tokens, from_rank_0, require_number
from lmtools.generate.reading import start_reading
from lmtools.parallel.mesh import Mesh


@dataclass
class _Search:
    """Where the search for one prompt's continuation is.

    Attributes:
        prompt: its tokens.
        number: the prompt's, for messages.
        live: the hypotheses that go on, the most probable first; none when the search is over.
        ended: those with an end of sentence and, at the end, those that were cut off.
    """

    prompt: Sequence[int]
    number: int
    live: list[Continuation] = field(default_factory=lambda: [Continuation()])
    ended: list[Continuation] = field(default_factory=list)


@torch.no_grad()
def beam_search(
    model: Model,
    prompts: Sequence[Sequence[int]],
    mesh: Mesh,
    limits: Limits,
    *,
    beam: int,
    lenpen: float = 1.0,
    first_number: int = 0,
) -> list[Continuation]:
    """The best continuation of each prompt that a beam search finds. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, split or not, in eval mode.
        prompts: tokens of each, of any lengths.
        mesh: where we are; one replica.
        limits: of each continuation.
        beam: how many hypotheses of each prompt are kept.
        lenpen: above 0 favours longer ones, below 0 shorter ones; 0 compares sums of log-probabilities.
        first_number: the number of the first prompt among all that are continued, for messages.

    Raises:
        ConfigError: a prompt is empty, or longer than the model can read.
        DataError: a probability is not a number.
    """
    limits.require_fits(prompts)
    searches = [_Search(prompt, number) for number, prompt in enumerate(prompts, start=first_number)]
    if not searches:
        return []
    capacity = max(len(prompt) + limits.room(prompt) - 1 for prompt in prompts)
    reader = start_reading(model, len(prompts), capacity=capacity, device=mesh.device)
    log_probs = reader.read(prompts)
    banned = banned_tokens(log_probs, limits.allowed)
    searching = searches
    while True:
        rows: list[int] = []  # of `log_probs`, that each live hypothesis continues
        start = 0
        for search in searching:
            end = start + len(search.live)
            rows += [start + row for row in _advance(search, log_probs[start:end], banned, mesh, limits, beam)]
            start = end
        searching = [search for search in searching if search.live]
        if not searching:
            return [max(search.ended, key=lambda hypothesis: value(hypothesis, lenpen)) for search in searches]
        reader.select(rows)
        log_probs = reader.read([hypothesis.tokens[-1:] for search in searching for hypothesis in search.live])


def _advance(search: _Search, log_probs: Tensor, banned: Tensor, mesh: Mesh, limits: Limits, beam: int) -> list[int]:
    """Add one token to a prompt's hypotheses. Every rank of the mesh must call it.

    Args:
        search: changed in place.
        log_probs: `(len(search.live), V)`, of what comes after each hypothesis.
        banned: bool `(V,)`.
        mesh: where we are.
        limits: of the continuation.
        beam: how many hypotheses are kept.

    Returns:
        Which of the hypotheses each that is live now continues.
    """
    sums = torch.tensor([[sum(hypothesis.log_probs)] for hypothesis in search.live], dtype=torch.float64)
    totals = log_probs.masked_fill(banned, -torch.inf).double() + sums.to(mesh.device)
    num_candidates = min(2 * beam, len(search.live) * len(set(limits.allowed)))
    best = totals.flatten().topk(num_candidates).indices
    scores = log_probs.double().flatten()[best]
    from_rank_0(mesh, best, scores)

    going_on: list[tuple[int, Continuation]] = []  # with the hypothesis that each continues
    for rank, (index, score) in enumerate(zip(best.tolist(), scores.tolist(), strict=True)):
        row, token = divmod(index, log_probs.shape[-1])
        before = search.live[row]
        require_number(score, search.number, before.tokens)
        candidate = Continuation([*before.tokens, token], [*before.log_probs, score])
        candidate.stopped_by = limits.stop_reason(candidate.tokens, search.prompt)
        if candidate.stopped_by == "end of sentence":
            if rank < beam:
                search.ended.append(candidate)
        elif len(going_on) < beam:
            going_on.append((row, candidate))
    if len(search.ended) >= beam:
        going_on = []
    elif going_on and going_on[0][1].stopped_by is not None:  # nothing can be added: what is live ends as it is
        search.ended += [candidate for _, candidate in going_on]
        going_on = []
    search.live = [candidate for _, candidate in going_on]
    return [row for row, _ in going_on]


def value(hypothesis: Continuation, lenpen: float) -> float:
    """What hypotheses are compared by."""
    return float(sum(hypothesis.log_probs) / len(hypothesis.tokens) ** lenpen)
