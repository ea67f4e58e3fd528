"""Attention by content and by distance (Dai et al. 2019, section 3.3).

A query i and a key j at distance i - j have, of each head, the score

    (q_i + u) . k_j + (q_i + v) . r_(i - j)

with u and v one vector each, and r the projection of a fixed vector of the distance: keys are the same wherever a
segment begins, so that those of earlier segments can be kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtools.models.architectures import TransformerXLConfig


class KeyValueMemory(NamedTuple):
    """What one layer remembers, projected.

    Attributes:
        keys: `(B, M, num_heads * head_dim)`.
        values: likewise.
        position_keys: `(distances + 1, num_heads * head_dim)`, the projection of `relative_positions`.
    """

    keys: Tensor
    values: Tensor
    position_keys: Tensor


def relative_positions(num_distances: int, d_model: int, clamp_len: int, like: Tensor) -> Tensor:
    """The fixed vectors of the distances from a query back to a key: sine half, then cosine half.

    Frequencies are 10000 ** (-2i / d_model).

    Args:
        num_distances: largest distance + 1.
        d_model: their width.
        clamp_len: distances above it count as it; none do if it is not positive.
        like: gives dtype and device.

    Returns:
        `(num_distances + 1, d_model)` for the distances num_distances - 1, ..., 1, 0, and one row more, which
        `shift_to_keys` needs and no visible key uses.
    """
    # Half precision has neither all of these integers nor enough digits for their sines.
    dtype = torch.promote_types(like.dtype, torch.float32)
    distances = torch.arange(num_distances - 1, -2, -1, dtype=dtype, device=like.device).clamp(min=0)
    if clamp_len > 0:
        distances = distances.clamp(max=clamp_len)
    exponents = torch.arange(0, d_model, 2, dtype=dtype, device=like.device) / d_model
    angles = distances[:, None] * (1 / 10000**exponents)[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


def shift_to_keys(by_distance: Tensor) -> Tensor:
    """Turn scores by distance into scores by key: the paper's shift, as a view.

    Row i of T queries needs, for key j of K, distance (K - T) + i - j, which is column T - 1 - i + j. With one column
    more than distances, going on from one row to the next is a step of exactly K in memory, whence the view.

    Args:
        by_distance: contiguous `(N, T, K + 1)`; column c is distance K - 1 - c.

    Returns:
        `(N, T, K)`, a view. Keys after their query have values of no meaning.
    """
    num_queries, num_keys = by_distance.shape[1], by_distance.shape[2] - 1
    flat = by_distance.flatten(1)[:, num_queries - 1 : num_queries - 1 + num_queries * num_keys]
    return flat.view(-1, num_queries, num_keys)


def attention_mask(
    num_queries: int, num_keys: int, window: int | None, like: Tensor, num_remembered: Tensor | None = None
) -> Tensor:
    """Which keys a query sees: those up to its own, or only the last `window` of these.

    Args:
        num_queries: T; the queries are the last T of the keys' positions.
        num_keys: K.
        window: at how many keys each query looks, None for all.
        like: gives dtype and device.
        num_remembered: int64 `(B,)`, how many keys before the first query a row has; None if all are its own.

    Returns:
        `(T, K)`, or `(B, T, K)` with `num_remembered`, to be added to the scores: 0, or -inf for what is not seen.
    """
    positions = torch.arange(num_keys, device=like.device)
    distance = positions[num_keys - num_queries :, None] - positions[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    if num_remembered is not None:
        hidden = hidden | (positions < num_keys - num_queries - num_remembered[:, None])[:, None]
    return like.new_zeros(()).masked_fill(hidden, -math.inf)


class HeadBias(nn.Module):
    """Adds a vector to each head: what is left of a linear layer without its matrix."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """`(..., num_heads * head_dim)` to the same."""
        return x + self.bias.flatten()


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores depend on content and on the distance between query and key."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        width = config.n_head * config.d_head
        self.head_dim = config.d_head
        self.dropatt = config.dropatt
        self.q_proj = nn.Linear(config.d_model, width, bias=False)
        self.k_proj = nn.Linear(config.d_model, width, bias=False)
        self.v_proj = nn.Linear(config.d_model, width, bias=False)
        self.r_proj = nn.Linear(config.d_model, width, bias=False)
        self.out_proj = nn.Linear(width, config.d_model, bias=False)
        self.r_w_bias = HeadBias(config.n_head, config.d_head)
        self.r_r_bias = HeadBias(config.n_head, config.d_head)

    def forward(
        self, x: Tensor, query_start: int, positions: Tensor | None, mask: Tensor, past: KeyValueMemory | None
    ) -> tuple[Tensor, KeyValueMemory]:
        """Attend from positions `query_start` on.

        Args:
            x: `(B, L, d_model)`, remembered inputs and then the segment's.
            query_start: how many of them are remembered.
            positions: from `relative_positions`, or None if `past` has enough position keys.
            mask: from `attention_mask`, `(T, K)` or `(B, T, K)`.
            past: keys and values that come before those of `x`.

        Returns:
            `(B, T, d_model)`; and all keys and values, `past` included.
        """
        queries, keys, values = self.q_proj(x[:, query_start:]), self.k_proj(x), self.v_proj(x)
        if past is not None:
            keys, values = torch.cat([past.keys, keys], dim=1), torch.cat([past.values, values], dim=1)
        position_keys = past.position_keys if positions is None and past is not None else self.r_proj(positions)
        attended = self._attend(queries, keys, values, position_keys[-keys.shape[1] - 1 :], mask)
        return self.out_proj(attended), KeyValueMemory(keys, values, position_keys)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, position_keys: Tensor, mask: Tensor) -> Tensor:
        batch_size, num_queries = queries.shape[:2]
        num_keys = keys.shape[1]
        # Heads lead, so that all rows of a batch are one matrix against a head's position keys.
        by_head = [
            x.view(*x.shape[:-1], -1, self.head_dim).movedim(-2, 0)
            for x in (self.r_w_bias(queries), self.r_r_bias(queries), keys, values, position_keys)
        ]
        by_content, by_position, keys, values, position_keys = by_head
        scale = self.head_dim**-0.5

        distance_scores = (by_position.flatten(1, 2) * scale) @ position_keys.mT
        distance_scores = shift_to_keys(distance_scores.view(-1, num_queries, num_keys + 1))
        distance_scores = (distance_scores.view(-1, batch_size, num_queries, num_keys) + mask).flatten(0, 1)
        scores = torch.baddbmm(distance_scores, by_content.flatten(0, 1) * scale, keys.flatten(0, 1).mT)
        weights = F.dropout(scores.softmax(dim=-1), self.dropatt, self.training)
        attended = weights @ values.flatten(0, 1)
        return attended.view(-1, batch_size, num_queries, self.head_dim).movedim(0, -2).flatten(-2)
