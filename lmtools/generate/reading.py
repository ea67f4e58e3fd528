"""What a model has read of some sequences, so that it can read on.

A plain transformer has a cache of all positions, a Transformer-XL its memory of the last ones. Either way a row's
log-probabilities are those of its own sequence, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmtools.checkpoints.models import Model
from lmtools.errors import ConfigError
from lmtools.models.architectures import TransformerXLConfig
from lmtools.models.cache import KeyValueCache
from lmtools.models.relative_attention import KeyValueMemory
from lmtools.models.transformer_lm import PAD_INDEX, TransformerLM
from lmtools.models.transformer_xl import TransformerXL, reorder

_SEGMENT_LEN = 256
"""Tokens that a Transformer-XL reads at once. No result depends on it, but attention takes its square of memory."""


class Reader(Protocol):
    """Some sequences, each read up to a place of its own."""

    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read on in each row. Every rank of the model's tp mesh must call it.

        Args:
            tokens: the next tokens of each row, of any lengths from 1.

        Returns:
            `(B, V)`, log-probabilities of what comes after the last of them, whole on every rank; in float32, or in
            float64 for a model in float64.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be taken several times, or not at all."""


def start_reading(model: Model, num_rows: int, *, capacity: int, device: torch.device) -> Reader:
    """Rows of which nothing was read yet.

    Args:
        model: on this rank's device, split or not, in eval mode.
        num_rows: how many.
        capacity: the most tokens that a row will have; a memory needs no such bound.
        device: the model's.

    Raises:
        ConfigError: the model remembers nothing.
    """
    if isinstance(model, TransformerXL):
        return MemoryReader(model, device)
    return CacheReader(model, KeyValueCache(num_rows, capacity=capacity, device=device))


class CacheReader:
    """Reads by a plain transformer, rows of different lengths padded at their ends."""

    def __init__(self, model: TransformerLM, cache: KeyValueCache) -> None:
        self._model = model
        self._cache = cache

    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `Reader`."""
        device = self._cache.lengths.device
        lengths = torch.tensor([len(row) for row in tokens], device=device)
        width = max(map(len, tokens))
        padded = torch.tensor([[*row, *[PAD_INDEX] * (width - len(row))] for row in tokens], device=device)
        hidden = self._model.features(padded, cache=self._cache)
        self._cache.advance(lengths)
        logits: Tensor = self._model.output_projection(hidden[torch.arange(len(tokens), device=device), lengths - 1])
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)

    def select(self, rows: Sequence[int]) -> None:
        """See `Reader`."""
        self._cache.select(torch.tensor(rows, device=self._cache.lengths.device))


class Remembered(NamedTuple):
    """What a Transformer-XL remembers of some rows.

    Attributes:
        memories: one a layer, of the last W positions.
        lengths: how many of these are each row's own. They are the last ones; those before are padding, unseen.
    """

    memories: list[KeyValueMemory]
    lengths: list[int]


class MemoryReader:
    """Reads by a Transformer-XL: what it remembers of the tokens before is its cache.

    A position sees itself and the `mem_len` before it, or with `same_length` one less, in prompts too. That is what
    reading token by token comes to; so it makes no difference how prompts are cut into segments, and rows that have
    read different numbers of tokens can go on side by side, their memories aligned at the end.
    """

    def __init__(self, model: TransformerXL, device: torch.device) -> None:
        require_memory(model.config, "the model")
        self._model = model
        self._device = device
        self._remembered: Remembered | None = None

    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `Reader`. Rows with equally many new tokens are read together."""
        of_length: dict[int, list[int]] = {}
        for row, of_row in enumerate(tokens):
            of_length.setdefault(len(of_row), []).append(row)
        before, hidden, after = self._remembered, [], []
        for rows in of_length.values():
            known = before if before is None or len(of_length) == 1 else take(before, rows)
            new_tokens = torch.tensor([tokens[row] for row in rows], device=self._device)
            of_rows, now_known = self._read_on(new_tokens, known)
            hidden.append(of_rows)
            after.append(now_known)
        order = [row for rows in of_length.values() for row in rows]
        back = sorted(range(len(order)), key=order.__getitem__)
        self._remembered = after[0] if len(after) == 1 else take(side_by_side(after), back)
        return self._model.adaptive_softmax.log_probs(torch.cat(hidden)[back])

    def select(self, rows: Sequence[int]) -> None:
        """See `Reader`."""
        if self._remembered is not None:
            self._remembered = take(self._remembered, rows)

    def _read_on(self, tokens: Tensor, known: Remembered | None) -> tuple[Tensor, Remembered]:
        """Read int64 `(B, T)` in segments.

        Returns:
            `(B, d_model)` of the last position, and what is remembered now.
        """
        config = self._model.config
        window = config.mem_len if config.same_length else config.mem_len + 1
        for segment in torch.split(tokens, _SEGMENT_LEN, dim=1):
            memories, lengths = known if known is not None else (None, [0] * len(tokens))
            width = 0 if memories is None else memories[0].keys.shape[1]
            is_padded = min(lengths) < width
            hidden, new_memories = self._model.features(
                segment,
                memories,
                keep_projections=True,
                window=window,
                num_remembered=torch.tensor(lengths, device=self._device) if is_padded else None,
            )
            lengths = [min(length + segment.shape[1], config.mem_len) for length in lengths]
            known = Remembered(cast(list[KeyValueMemory], new_memories), lengths)
        assert known is not None, "there is a token to read"
        return hidden[:, -1], known


def require_memory(config: TransformerXLConfig, where: str) -> None:
    """Refuse a Transformer-XL that cannot read on.

    Raises:
        ConfigError: it remembers nothing of what it read, or not its end.
    """
    if config.mem_len == 0:
        raise ConfigError(
            f"{where}: remembers nothing (mem_len 0), so that each token would follow from the one before alone; give "
            "--mem-len, such as the length of the chunks that it was trained on"
        )
    if config.ext_len != 0:
        raise ConfigError(
            f"{where}: leaves the last {config.ext_len} positions out of its memory (ext_len); expected 0"
        )


def take(remembered: Remembered, rows: Sequence[int]) -> Remembered:
    """These rows, in this order, without padding that none of them needs."""
    lengths = [remembered.lengths[row] for row in rows]
    memories = remembered.memories
    index = torch.tensor(rows, device=memories[0].keys.device)
    start = memories[0].keys.shape[1] - max(lengths)
    taken = [
        memory._replace(keys=memory.keys[:, start:], values=memory.values[:, start:])
        for memory in cast(list[KeyValueMemory], reorder(memories, index))
    ]
    return Remembered(taken, lengths)


def side_by_side(parts: Sequence[Remembered]) -> Remembered:
    """The rows of all parts, one part after the other; the shorter memories are padded at their beginning."""
    width = max(part.memories[0].keys.shape[1] for part in parts)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([F.pad(tensor, (0, 0, width - tensor.shape[1], 0)) for tensor in tensors])

    memories = []
    for of_layer in zip(*(part.memories for part in parts), strict=True):
        # The same vectors, up to the largest distance that each part has needed so far.
        position_keys = max((memory.position_keys for memory in of_layer), key=len)
        keys = joined([memory.keys for memory in of_layer])
        values = joined([memory.values for memory in of_layer])
        memories.append(KeyValueMemory(keys, values, position_keys))
    return Remembered(memories, [length for part in parts for length in part.lengths])
