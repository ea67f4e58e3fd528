"""Transformer-XL: attention by relative position, over a memory of earlier segments (Dai et al. 2019, section 3).

The module holds no hidden state: what a layer remembers goes in and comes out. It has two forms.

- For training, the layer's past inputs, `(B, M, d_model)`: no gradient reaches the earlier segments, but it does reach
  the projections that read them.
- Where weights stand still, their keys and values, and the keys of the relative positions (`KeyValueMemory`): nothing
  is projected twice.

The model knows no parallelism: `lmtools.parallel` splits it from outside, and attention takes the number of heads from
the width that its projections return.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtools.models.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from lmtools.models.architectures import TransformerXLConfig
from lmtools.models.recompute import on_host, recomputed
from lmtools.models.relative_attention import (
    KeyValueMemory,
    RelativeAttention,
    attention_mask,
    relative_positions,
)

LayerMemory = Tensor | KeyValueMemory

_ROOM_TO_GROW = 8
"""Position keys are projected for this many times the keys that there are, up to a full memory."""


def reorder(memories: Sequence[LayerMemory], rows: Tensor) -> list[LayerMemory]:
    """The memory of other rows of the batch, as beam search needs it.

    Args:
        memories: one a layer.
        rows: int64 `(new B,)`, which row each new one continues.
    """
    return [
        memory.index_select(0, rows)
        if isinstance(memory, Tensor)
        else memory._replace(keys=memory.keys.index_select(0, rows), values=memory.values.index_select(0, rows))
        for memory in memories
    ]


class Layer(nn.Module):
    """Attention and feed-forward, each with its residual; LayerNorm before or after."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.mem_len = config.mem_len
        self.ext_len = config.ext_len
        self.self_attn = RelativeAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.fc1 = nn.Linear(config.d_model, config.d_inner)
        self.fc2 = nn.Linear(config.d_inner, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, memory: LayerMemory | None, positions: Tensor | None, mask: Tensor, keep_projections: bool
    ) -> tuple[Tensor, LayerMemory]:
        """One layer.

        Args:
            x: `(B, T, d_model)`.
            memory: of the M positions before, in either form, or None for none.
            positions: from `relative_positions`; None if `memory` has enough position keys.
            mask: from `attention_mask`, `(T, M + T)` or `(B, T, M + T)`.
            keep_projections: the form of the memory that is returned.

        Returns:
            `(B, T, d_model)`, and the memory for the next segment, without gradient.
        """
        past = memory if isinstance(memory, KeyValueMemory) else None
        segment = inputs = x
        if isinstance(memory, Tensor) and memory.shape[1] > 0:
            inputs = torch.cat([memory.to(x.device, non_blocking=True), x], dim=1)  # it may have waited on the host
        normed = self.self_attn_layer_norm(inputs) if self.pre_lnorm else inputs
        attended, projected = self.self_attn(normed, inputs.shape[1] - x.shape[1], positions, mask, past)
        x = x + self.dropout(attended)
        if not self.pre_lnorm:
            x = self.self_attn_layer_norm(x)

        normed = self.final_layer_norm(x) if self.pre_lnorm else x
        x = x + self.dropout(self.fc2(self.activation_dropout(F.relu(self.fc1(normed)))))
        if not self.pre_lnorm:
            x = self.final_layer_norm(x)

        num_queries = x.shape[1]
        if keep_projections:
            keys, values, position_keys = projected
            keys, values = self._kept(keys, num_queries), self._kept(values, num_queries)
            return x, KeyValueMemory(keys, values, position_keys.detach())
        # A view keeps all that it looks into: where the segment is enough, not the memory before it.
        is_in_segment = self.mem_len + min(self.ext_len, num_queries) <= num_queries
        return x, self._kept(segment if is_in_segment else inputs, num_queries)

    def _kept(self, context: Tensor, num_queries: int) -> Tensor:
        """The part of `(B, K, ...)` that the next segment remembers, as a view."""
        end = context.shape[1] - min(self.ext_len, num_queries)
        return context[:, max(0, end - self.mem_len) : end].detach()


class TransformerXL(nn.Module):
    """The whole model: tokens and memory in, scores of the targets and memory out."""

    checkpoint_activations: bool
    """Keep only each layer's input during training and compute the rest again in the backward pass."""
    offload_activations: bool
    """Keep that input in the host's memory, and what the layers remember too; only with `checkpoint_activations`."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = AdaptiveEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.adaptive_softmax = AdaptiveSoftmax(config)
        self.checkpoint_activations = self.offload_activations = False
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make one parameter of those that the configuration says are shared.

        Splitting or materialising parameters replaces them and so breaks the tie: call this again afterwards.
        """
        embedding, softmax = self.embed_tokens, self.adaptive_softmax
        if not self.config.not_tied:
            for rows, logits in zip(embedding.clusters, softmax.clusters, strict=True):
                logits.weight = rows.weight
        if self.config.proj_share_all_but_first and len(softmax.projections) > 0:
            for index in range(1, len(softmax.projections)):
                softmax.projections[index] = embedding.projections[min(index, len(embedding.projections) - 1)]
        if not self.config.untie_r:
            first, *others = (cast(Layer, layer).self_attn for layer in self.layers)
            for attention in others:
                attention.r_w_bias.bias, attention.r_r_bias.bias = first.r_w_bias.bias, first.r_r_bias.bias

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        memories: Sequence[LayerMemory] | None = None,
        *,
        keep_projections: bool = False,
    ) -> tuple[Tensor, list[LayerMemory]]:
        """Score the targets of a segment.

        Args:
            tokens: int64 `(B, T)`.
            targets: int64 `(B, S)`, what comes after the last S of the tokens; negative ones are not scored.
            memories: what this returned for the segment before, one a layer; None for no memory.
            keep_projections: return keys and values as memory. They are right as long as the weights do not change,
                and let no gradient through: for evaluation and generation.

        Returns:
            `(B, S)` negative log-likelihood in nats, 0 where not scored; and the memory for the next segment, of the
            last `mem_len` positions, without gradient.

        Raises:
            ValueError: keys and values given as memory, inputs wanted: they cannot be had from them.
        """
        features, memories = self.features(tokens, memories, keep_projections=keep_projections)
        nll: Tensor = self.adaptive_softmax(features[:, tokens.shape[1] - targets.shape[1] :], targets)
        return nll, memories

    def features(
        self,
        tokens: Tensor,
        memories: Sequence[LayerMemory] | None = None,
        *,
        keep_projections: bool = False,
        window: int | None = None,
        num_remembered: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerMemory]]:
        """Everything but the softmax.

        Args:
            tokens: as in `forward`.
            memories: likewise.
            keep_projections: likewise.
            window: how many positions each one sees at most, its own and the last before it, however the tokens are cut
                into segments; None for what `same_length` says.
            num_remembered: int64 `(B,)`, how many of the last positions of the memory are a row's own; those before are
                padding, and are not seen. None for all.

        Returns:
            `(B, T, d_model)`, and the memory for the next segment.
        """
        config = self.config
        memory = memories[0] if memories else None
        if isinstance(memory, KeyValueMemory) and not keep_projections:
            raise ValueError("keys and values are given as memory, and cannot be turned back into inputs of layers")
        x: Tensor = self.dropout(self.embed_tokens(tokens))
        num_queries = tokens.shape[1]
        num_keys = num_queries + _length(memory)
        if window is None and config.same_length:
            window = config.mem_len
        mask = attention_mask(num_queries, num_keys, window, x, num_remembered)
        num_known = len(memory.position_keys) if isinstance(memory, KeyValueMemory) else 0
        positions = None
        if num_keys + 1 > num_known:
            # What is kept shall last: the memory grows up to mem_len, if there is as much to read.
            full = min(config.mem_len + num_queries, _ROOM_TO_GROW * num_keys)
            num_distances = max(num_keys, full) if keep_projections else num_keys
            positions = self.dropout(relative_positions(num_distances, config.d_model, config.clamp_len, x))

        new_memories = []
        for index, layer in enumerate(self.layers):
            memory = memories[index] if memories else None
            if self.checkpoint_activations and self.training:
                of_input = partial(
                    layer, memory=memory, positions=positions, mask=mask, keep_projections=keep_projections
                )
                x, new_memory = recomputed(of_input, x, offload=self.offload_activations)
                if self.offload_activations and isinstance(new_memory, Tensor):
                    new_memory = on_host(new_memory)
            else:
                x, new_memory = layer(x, memory, positions, mask, keep_projections)
            new_memories.append(new_memory)
        return self.dropout(x), new_memories


def zero_memories(config: TransformerXLConfig, batch_size: int, like: Tensor) -> list[LayerMemory]:
    """A full memory of zero vectors, with which fairseq and Hugging Face start; they are attended to as any other.

    Args:
        config: the model's.
        batch_size: rows of the batch.
        like: gives dtype and device.

    Returns:
        `(batch_size, mem_len, d_model)` for each layer.
    """
    return [like.new_zeros(batch_size, config.mem_len, config.d_model) for _ in range(config.n_layer)]


def _length(memory: LayerMemory | None) -> int:
    if memory is None:
        return 0
    return (memory if isinstance(memory, Tensor) else memory.keys).shape[1]


def initialize_parameter(name: str, tensor: Tensor, generator: torch.Generator, *, config: TransformerXLConfig) -> None:
    """Fill one whole (unsplit) parameter as the original does.

    Matrices, embeddings and the two attention biases are drawn from `init`, projections of clusters from a normal
    distribution of their own, LayerNorm weights around 1; other biases are 0.

    Args:
        name: the parameter's name in `TransformerXL`.
        tensor: the parameter, filled in place.
        generator: the only source of randomness, so that the value depends on its seed and `name` alone.
        config: gives the distributions.

    Raises:
        KeyError: no parameter of the model has this name.
    """
    module, _, kind = name.rpartition(".")
    owner = module.rpartition(".")[2]
    with torch.no_grad():
        if owner == "projections":
            tensor.normal_(0.0, config.proj_init_std, generator=generator)
        elif owner.endswith("layer_norm") and kind == "weight":
            tensor.normal_(1.0, config.init_std, generator=generator)
        elif kind == "bias" and owner not in ("r_w_bias", "r_r_bias"):
            tensor.zero_()
        elif not (owner in _DRAWN or owner.isdecimal()):
            raise KeyError(name)
        elif config.init == "normal":
            tensor.normal_(0.0, config.init_std, generator=generator)
        else:
            tensor.uniform_(-config.init_range, config.init_range, generator=generator)


_DRAWN = frozenset(("q_proj", "k_proj", "v_proj", "r_proj", "out_proj", "r_w_bias", "r_r_bias", "fc1", "fc2", "tails"))
