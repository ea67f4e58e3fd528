"""Which token comes next: arithmetic on log-probabilities, with no state and no generator.

A draw is a function of (seed, number of the prompt, position in it): no batch, rank or earlier draw moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtools.parallel.random import stream_seed


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. As it stands, greedily: the most probable one.

    Attributes:
        temperature: log-probabilities are divided by it before a draw; 0 is greedy.
        top_k: draw from this many of the most probable tokens; 0 is from all.
        top_p: draw from the fewest of the most probable tokens that have this probability together
            (Holtzman et al. 2020); 1 is from all.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1


def choose(log_probs: Tensor, sampling: Sampling, places: Sequence[tuple[int, int]]) -> Tensor:
    """Choose the next token of each row.

    Args:
        log_probs: `(B, V)`; -inf for what must not be chosen.
        sampling: how.
        places: number of the prompt and position of the new token, for each row.

    Returns:
        int64 `(B,)`.
    """
    if sampling.temperature == 0.0:
        return log_probs.argmax(dim=-1)
    # From the most probable one, which stays where it is: else a small temperature leaves none of them finite.
    below = log_probs.double() - log_probs.double().amax(dim=-1, keepdim=True)
    weights = cut_tail(below / sampling.temperature, sampling.top_k, sampling.top_p).softmax(dim=-1)
    numbers = [uniform(sampling.seed, prompt, position) for prompt, position in places]
    return draw(weights, torch.tensor(numbers, dtype=torch.float64, device=weights.device))


def cut_tail(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`(B, V)` with -inf for all but the most probable tokens; of equal ones the first go before the others."""
    ordered, indices = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
    # As in the paper the cut is made in what is left: a token stays while those before it have less than `top_p`.
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    keep &= probabilities.cumsum(dim=-1) - probabilities < top_p
    return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, indices, keep), -torch.inf)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token at which the weights before and with it, in order of the vocabulary, first exceed a share of the sum.

    In that order, and not by falling weight, a difference in the last digit cannot make two tokens change places.

    Args:
        weights: float64 `(B, V)`, not negative.
        numbers: float64 `(B,)`, from 0 and under 1: the share.

    Returns:
        int64 `(B,)`.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    # A share of the least numbers there are rounds to all of it, which no sum exceeds.
    share = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # What is no number exceeds nothing; a token is named all the same, whose probability then tells.
    return torch.searchsorted(sums, share, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number from 0 and under 1 with 53 random bits."""
    return float((stream_seed("token", seed, prompt, position) >> 10) / 2.0**53)
