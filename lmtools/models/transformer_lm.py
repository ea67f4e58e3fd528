"""fairseq's decoder-only Transformer language model, for one device.

The model knows no parallelism: `lmtools.parallel` splits it from outside by the table in `parallel/plans.py`. Two
things make that possible, and both are plain single-device code: attention takes the number of heads from the
width that its projections return, and no module holds a hidden state.

Parameter names are fairseq's without the leading `decoder.`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtools.models.architectures import ActivationName, TransformerLMConfig
from lmtools.models.cache import KeyValueCache
from lmtools.models.recompute import recomputed

PAD_INDEX = 1
"""fairseq's `<pad>`. Positions are counted from PAD_INDEX + 1, so the first token of a window has position 2."""

Extend: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""One layer's part of a cache: keys and values of new tokens in; those of all tokens, and who may look where, out."""


def sinusoidal_positions(num_positions: int, embed_dim: int) -> Tensor:
    """The fixed position vectors: sine half, then cosine half (fairseq/modules/sinusoidal_positional_embedding.py).

    Frequencies are exp(-i ln(10000) / (embed_dim / 2 - 1)), not the paper's interleaved ones.

    Args:
        num_positions: longest window.
        embed_dim: width; an odd one ends in a zero column.

    Returns:
        float32 `(num_positions, embed_dim)`; row t is position PAD_INDEX + 1 + t.
    """
    return _sinusoids(torch.arange(PAD_INDEX + 1, PAD_INDEX + 1 + num_positions), embed_dim)


def _sinusoids(positions: Tensor, embed_dim: int) -> Tensor:
    half = embed_dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) * -(math.log(10000) / max(half - 1, 1))
    angles = positions[..., None].float() * torch.exp(exponents)
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, embed_dim % 2))


class SelfAttention(nn.Module):
    """Causal multi-head self-attention with separate q, k and v projections."""

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        embed_dim = config.decoder_embed_dim
        self.head_dim = config.head_dim
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, query_start: int = 0, extend: Extend | None = None) -> Tensor:
        """Attend from positions `query_start` on to all positions up to each.

        Args:
            x: `(B, T, E)`.
            query_start: position of the first query; what comes before is only attended to.
            extend: adds what was read earlier; then all of `x` is queried.

        Returns:
            `(B, T - query_start, E)`.
        """
        # The width after a projection is num_heads * head_dim of the heads that live here, all or a tp rank's share.
        q, k, v = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, inputs in (
                (self.q_proj, x[:, query_start:]),
                (self.k_proj, x),
                (self.v_proj, x),
            )
        )
        mask = _causal_mask(x.shape[1], query_start, x.device) if query_start else None
        if extend is not None:
            k, v, mask = extend(k, v)
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return output


def _causal_mask(num_keys: int, query_start: int, device: torch.device) -> Tensor:
    """`(T - query_start, T)`, True where a query may look."""
    positions = torch.arange(num_keys, device=device)
    return positions[None, :] <= positions[query_start:, None]


class Block(nn.Module):
    """Attention and feed-forward, each with its residual; pre-norm or post-norm."""

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        self.normalize_before = config.decoder_normalize_before
        self.activation_fn: ActivationName = config.activation_fn
        self.self_attn = SelfAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.decoder_embed_dim)
        self.fc1 = nn.Linear(config.decoder_embed_dim, config.decoder_ffn_embed_dim)
        self.fc2 = nn.Linear(config.decoder_ffn_embed_dim, config.decoder_embed_dim)
        self.final_layer_norm = nn.LayerNorm(config.decoder_embed_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor, query_start: int = 0, extend: Extend | None = None) -> Tensor:
        """`(B, T, E)` to `(B, T - query_start, E)`: the outputs from position `query_start` on."""
        normed = self.self_attn_layer_norm(x) if self.normalize_before else x
        x = x[:, query_start:] + self.dropout(self.self_attn(normed, query_start=query_start, extend=extend))
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)

        normed = self.final_layer_norm(x) if self.normalize_before else x
        hidden = self.activation_dropout(_activate(self.fc1(normed), self.activation_fn))
        x = x + self.dropout(self.fc2(hidden))
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x


def _activate(x: Tensor, name: ActivationName) -> Tensor:
    match name:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_accurate":
            return F.gelu(x, approximate="tanh")


class TransformerLM(nn.Module):
    """The whole model: tokens in, logits out."""

    checkpoint_activations: bool
    """Keep only each block's input during training and compute the rest again in the backward pass."""
    offload_activations: bool
    """Keep that input in the host's memory; only with `checkpoint_activations`."""

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        embed_dim = config.decoder_embed_dim
        if embed_dim % config.decoder_attention_heads:
            raise ValueError(f"{config.decoder_attention_heads} heads do not divide decoder_embed_dim {embed_dim}")
        self.config = config
        self.embed_scale = 1.0 if config.no_scale_embedding else math.sqrt(embed_dim)
        self.embed_tokens = nn.Embedding(config.vocab_size, embed_dim)
        # Learned positions keep fairseq's rows, the PAD_INDEX + 1 at the top that no token has included.
        self.embed_positions = (
            nn.Embedding(config.max_target_positions + PAD_INDEX + 1, embed_dim)
            if config.decoder_learned_pos and not config.no_token_positional_embeddings
            else None
        )
        self.layernorm_embedding = nn.LayerNorm(embed_dim) if config.layernorm_embedding else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.decoder_layers))
        self.layer_norm = (
            nn.LayerNorm(embed_dim) if config.decoder_normalize_before and not config.no_decoder_final_norm else None
        )
        self.output_projection = nn.Linear(embed_dim, config.vocab_size, bias=False)
        self.checkpoint_activations = self.offload_activations = False
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output projection the embedding, where the model shares them.

        Splitting or materialising parameters replaces them and so breaks the tie: call this again afterwards.
        """
        if self.config.share_decoder_input_output_embed:
            self.output_projection.weight = self.embed_tokens.weight

    def features(self, tokens: Tensor, score_from: int = 0, cache: KeyValueCache | None = None) -> Tensor:
        """Everything but the output projection.

        Rows of unequal length are padded on the right: attention is causal, so the padding changes nothing before it.

        Args:
            tokens: int64 `(B, T)`.
            score_from: only outputs from this position on are needed. The last block then computes queries and
                feed-forward for these alone.
            cache: what was read before; `tokens` come after it and are added to it. The caller then says how many of
                each row were no padding (`advance`). Not together with `score_from`.

        Returns:
            `(B, T - score_from, E)`.
        """
        x: Tensor = self.embed_tokens(tokens)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        positions = torch.arange(tokens.shape[1], device=x.device) if cache is None else cache.begin(tokens.shape[1])
        of_positions = self._embed_positions(positions, x)
        if of_positions is not None:
            x = x + of_positions
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout(x)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            query_start = score_from if index == last else 0
            if self.checkpoint_activations and self.training:
                x = recomputed(partial(layer, query_start=query_start), x, offload=self.offload_activations)
            else:
                extend = None if cache is None else partial(cache.extend, index)
                x = layer(x, query_start=query_start, extend=extend)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x

    def forward(self, tokens: Tensor, score_from: int = 0) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: int64 `(B, T)`.
            score_from: the first position whose logits are wanted.

        Returns:
            `(B, T - score_from, V)`.
        """
        logits: Tensor = self.output_projection(self.features(tokens, score_from))
        return logits

    def _embed_positions(self, positions: Tensor, like: Tensor) -> Tensor | None:
        """`(..., E)` to be added to the embeddings at `positions`, counted from 0; None for a model without any."""
        if self.config.no_token_positional_embeddings:
            return None
        positions = positions + PAD_INDEX + 1
        if self.embed_positions is not None:
            learned: Tensor = self.embed_positions(positions)
            return learned
        return _sinusoids(positions, self.config.decoder_embed_dim).to(like.dtype)


def initialize_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill one whole (unsplit) parameter as fairseq's Megatron models are initialised.

    Matrices are Xavier uniform, with gain 1/sqrt(2) for q, k and v; the embedding is normal with deviation
    E ** -0.5 and a zero `<pad>` row; biases are 0 and LayerNorm weights 1.

    Args:
        name: the parameter's name in `TransformerLM`.
        tensor: the parameter, filled in place.
        generator: the only source of randomness, so that the value depends on its seed and `name` alone.

    Raises:
        KeyError: no parameter of the model has this name.
    """
    module, _, kind = name.rpartition(".")
    with torch.no_grad():
        if kind == "bias":
            tensor.zero_()
        elif module.endswith("norm") or module == "layernorm_embedding":
            tensor.fill_(1.0)
        elif module in ("embed_tokens", "embed_positions"):
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
            tensor[PAD_INDEX].zero_()
        elif module == "output_projection":
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        elif module.endswith(("q_proj", "k_proj", "v_proj")):
            nn.init.xavier_uniform_(tensor, gain=1 / math.sqrt(2), generator=generator)
        elif module.endswith(("out_proj", "fc1", "fc2")):
            nn.init.xavier_uniform_(tensor, generator=generator)
        else:
            raise KeyError(name)
