"""The loop: prompts in, continuations out, several prompts at a time.

A round reads one new token of each row and chooses the next. A row that is done leaves the batch, and the others go on
without it. All tp ranks hold the same gathered log-probabilities; what rank 0 chose is what all go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lmtools.checkpoints.models import Model
from lmtools.errors import ConfigError, DataError
from lmtools.generate.reading import start_reading
from lmtools.generate.sampling import Sampling, choose
from lmtools.parallel.mesh import Mesh

StopReason = Literal["end of sentence", "max new tokens", "model maximum"]


@dataclass
class Continuation:
    """What comes after a prompt.

    Attributes:
        tokens: the new tokens, ends of sentence included.
        log_probs: the model's natural-log probability of each, whatever it was chosen by.
        stopped_by: why there are no more.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped_by: StopReason | None = None


@dataclass(frozen=True)
class Limits:
    """What a continuation is made of, and where it ends.

    Attributes:
        allowed: the tokens that may be chosen, and no others.
        eos_index: the token that ends one.
        max_new_tokens: the most tokens.
        max_positions: the most tokens that the model reads, prompt included; None for any number. The last new token is
            not read.
        ignore_eos: a continuation goes on past `eos_index`.
    """

    allowed: Sequence[int]
    eos_index: int
    max_new_tokens: int
    max_positions: int | None
    ignore_eos: bool = False

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens can come after a prompt."""
        if self.max_positions is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_positions - len(prompt) + 1)

    def require_fits(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse a prompt that is empty or that the model cannot read.

        Raises:
            ConfigError: names the first such prompt.
        """
        for number, prompt in enumerate(prompts, start=1):
            is_long = self.max_positions is not None and len(prompt) > self.max_positions
            if not prompt or is_long:
                expected = f"1 to {self.max_positions}, which the model was made for; shorten it"
                raise ConfigError(
                    f"prompt {number}: has {len(prompt)} tokens, expected "
                    f"{expected if self.max_positions is not None else 'at least 1'}"
                )

    def stop_reason(self, tokens: Sequence[int], prompt: Sequence[int]) -> StopReason | None:
        """Why a continuation ends here, or None if it goes on."""
        if tokens[-1] == self.eos_index and not self.ignore_eos:
            return "end of sentence"
        if len(tokens) < self.room(prompt):
            return None
        return "max new tokens" if len(tokens) == self.max_new_tokens else "model maximum"


@torch.no_grad()
def continue_prompts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    mesh: Mesh,
    limits: Limits,
    sampling: Sampling,
    *,
    first_number: int = 0,
    on_token: Callable[[int, int], None] = lambda number, token: None,
) -> list[Continuation]:
    """Continue a batch of prompts, of any lengths. Every rank of the mesh must call it.

    Args:
        model: on this rank's device, split or not, in eval mode.
        prompts: tokens of each; draws depend on a prompt's number, not on what it is batched with.
        mesh: where we are; one replica.
        limits: of each continuation.
        sampling: how tokens are chosen.
        first_number: the number of the first prompt among all that are continued.
        on_token: called with a prompt's number and its new token, as they come.

    Raises:
        ConfigError: a prompt is empty, or longer than the model can read.
        DataError: a probability is not a number.
    """
    limits.require_fits(prompts)
    found = [Continuation() for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch continues
    if not rows:
        return found
    capacity = max(len(prompt) + limits.room(prompt) - 1 for prompt in prompts)
    reader = start_reading(model, len(rows), capacity=capacity, device=mesh.device)
    log_probs = reader.read(prompts)
    banned = banned_tokens(log_probs, limits.allowed)
    while True:
        places = [(first_number + row, len(prompts[row]) + len(found[row].tokens)) for row in rows]
        chosen = choose(log_probs.masked_fill(banned, -torch.inf), sampling, places)
        scores = log_probs.gather(-1, chosen[:, None])[:, 0].double()
        from_rank_0(mesh, chosen, scores)
        for row, token, score in zip(rows, chosen.tolist(), scores.tolist(), strict=True):
            require_number(score, first_number + row, found[row].tokens)
            found[row].tokens.append(token)
            found[row].log_probs.append(score)
            found[row].stopped_by = limits.stop_reason(found[row].tokens, prompts[row])
            on_token(first_number + row, token)
        going_on = [place for place, row in enumerate(rows) if found[row].stopped_by is None]
        if not going_on:
            return found
        if len(going_on) < len(rows):
            rows = [rows[place] for place in going_on]
            reader.select(going_on)
        log_probs = reader.read([found[row].tokens[-1:] for row in rows])


def banned_tokens(log_probs: Tensor, allowed: Sequence[int]) -> Tensor:
    """bool `(V,)`, False for the allowed tokens."""
    banned = torch.ones(log_probs.shape[-1], dtype=torch.bool, device=log_probs.device)
    banned[torch.tensor(allowed, device=log_probs.device)] = False
    return banned


def from_rank_0(mesh: Mesh, *tensors: Tensor) -> None:
    """Give every rank rank 0's values, in place. Every rank of the mesh must call it."""
    if mesh.world_size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def require_number(score: float, number: int, tokens: Sequence[int]) -> None:
    """Refuse a probability that is none.

    Raises:
        DataError: names prompt and token. Raised on every rank.
    """
    if not -torch.inf < score <= 0:
        raise DataError(
            f"prompt {number + 1}: the log-probability of new token {len(tokens) + 1} is {score}, expected a finite "
            "number; try --dtype float32, and check the checkpoint"
        )
