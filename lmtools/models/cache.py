"""What a model has read, kept so that it can read on: keys and values of every layer.

Row b is a sequence and column t its position t, also where the rows are of different lengths: a row's new tokens go
after those that it has, over the padding of a longer row's prompt, and nothing is ever read beyond a row's own length.
The heads are those that live here, all or a tp rank's share; the cache takes their number from what it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of some sequences.

    Attributes:
        lengths: int64 `(B,)`, how many tokens of each row were read.
    """

    def __init__(self, num_rows: int, *, capacity: int, device: torch.device) -> None:
        """Make room for `capacity` tokens of each row; memory is taken when a layer first writes."""
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._capacity = capacity
        self._num_columns = 0  # the longest row's length, known without asking the device
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._positions = torch.empty(0)
        self._mask = torch.empty(0)

    def begin(self, num_tokens: int) -> Tensor:
        """Announce `num_tokens` new tokens of each row, before the layers `extend`.

        Returns:
            int64 `(B, num_tokens)`, their positions.

        Raises:
            ValueError: there is no room for them.
        """
        self._num_columns += num_tokens
        if self._num_columns > self._capacity:
            raise ValueError(f"{self._num_columns} tokens for a cache of {self._capacity}")
        device = self.lengths.device
        self._positions = self.lengths[:, None] + torch.arange(num_tokens, device=device)
        columns = torch.arange(self._num_columns, device=device)
        self._mask = (columns <= self._positions[:, :, None])[:, None]
        return self._positions

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep a layer's keys and values of the new tokens.

        Args:
            layer: layers are numbered from 0 and must first come in order.
            keys: `(B, H, T, D)`.
            values: `(B, H, T, D)`.

        Returns:
            Keys and values of all tokens, `(B, H, columns, D)`, and a mask `(B, 1, T, columns)`, True where a new token
            may look.
        """
        if layer == len(self._layers):
            batch, num_heads, _, head_dim = keys.shape
            shape = (batch, num_heads, self._capacity, head_dim)
            self._layers.append((keys.new_zeros(shape), values.new_zeros(shape)))
        rows = torch.arange(len(self.lengths), device=keys.device)[:, None]
        for kept, new in zip(self._layers[layer], (keys, values), strict=True):
            kept[rows, :, self._positions] = new.transpose(1, 2)
        all_keys, all_values = (kept[:, :, : self._num_columns] for kept in self._layers[layer])
        return all_keys, all_values, self._mask

    def advance(self, num_tokens: Tensor) -> None:
        """Say how many of the announced tokens were real, int64 `(B,)`; the rest was padding on the right."""
        self.lengths = self.lengths + num_tokens

    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 `(B',)`, in this order; a row may be taken several times, or not at all."""
        self.lengths = self.lengths[rows]
        for layer, (keys, values) in enumerate(self._layers):  # one after the other: never all of them twice
            self._layers[layer] = keys[rows], values[rows]
