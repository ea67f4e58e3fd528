"""The shape of a model, and named presets as plain functions: `transformer_lm_megatron_11b(vocab_size=51200)`.

No torch here: the command line reads the fields to make its options.

The numbers are those of fairseq/models/transformer_lm.py and fairseq/model_parallel/models/transformer_lm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

ActivationName = Literal["relu", "gelu", "gelu_accurate"]


@dataclass(frozen=True)
class TransformerLMConfig:
    """The shape of a model; fields are named as fairseq's options.

    Attributes:
        vocab_size: rows of the embedding that the checkpoint holds, fairseq's `madeupword` padding included. They
            all take part in the softmax.
        decoder_layers: number of blocks.
        decoder_embed_dim: width of the residual stream.
        decoder_ffn_embed_dim: width of the feed-forward layer.
        decoder_attention_heads: number of attention heads; must divide `decoder_embed_dim`.
        max_target_positions: the longest window that the model was made for.
        activation_fn: `relu`, `gelu` (by erf) or `gelu_accurate` (by tanh).
        decoder_normalize_before: LayerNorm before each sublayer and once at the end (pre-norm), else after each.
        no_decoder_final_norm: leave out the pre-norm model's last LayerNorm.
        decoder_learned_pos: learned positions instead of sinusoidal ones.
        no_token_positional_embeddings: no positions at all.
        layernorm_embedding: a LayerNorm on the embedded input.
        no_scale_embedding: do not multiply the embeddings by sqrt(embed_dim).
        share_decoder_input_output_embed: the output projection is the embedding.
        dropout: on the embedded input and on what each sublayer adds.
        attention_dropout: on the attention weights.
        activation_dropout: after the feed-forward's activation.
    """

    vocab_size: int
    decoder_layers: int = 6
    decoder_embed_dim: int = 512
    decoder_ffn_embed_dim: int = 2048
    decoder_attention_heads: int = 8
    max_target_positions: int = 1024
    activation_fn: ActivationName = "relu"
    decoder_normalize_before: bool = False
    no_decoder_final_norm: bool = False
    decoder_learned_pos: bool = False
    no_token_positional_embeddings: bool = False
    layernorm_embedding: bool = False
    no_scale_embedding: bool = False
    share_decoder_input_output_embed: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.decoder_embed_dim // self.decoder_attention_heads


def transformer_lm(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """fairseq's plain `transformer_lm`: post-norm, ReLU, untied."""
    return TransformerLMConfig(vocab_size=vocab_size, **overrides)


def transformer_lm_megatron(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """The 72-layer Megatron shape: d 3072, pre-norm, GELU, dropout 0.1 everywhere fairseq has it."""
    preset: dict[str, Any] = {
        "decoder_layers": 72,
        "decoder_embed_dim": 3072,
        "decoder_ffn_embed_dim": 3072 * 4,
        "decoder_attention_heads": 32,
        "activation_fn": "gelu",
        "decoder_normalize_before": True,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    }
    return transformer_lm(vocab_size, **(preset | overrides))


def transformer_lm_megatron_11b(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """Megatron-11b: as `transformer_lm_megatron` with a feed-forward of 6 d."""
    return transformer_lm_megatron(vocab_size, **({"decoder_ffn_embed_dim": 3072 * 6} | overrides))


ARCHITECTURES: dict[str, Callable[..., TransformerLMConfig]] = {
    "transformer_lm": transformer_lm,
    "transformer_lm_megatron": transformer_lm_megatron,
    "transformer_lm_megatron_11b": transformer_lm_megatron_11b,
}
