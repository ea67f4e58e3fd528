"""Named presets, as plain functions: `ARCHITECTURES["transformer_lm_megatron_11b"](vocab_size=51200)`.

The numbers are those of fairseq/models/transformer_lm.py and fairseq/model_parallel/models/transformer_lm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmtools.models.transformer_lm import TransformerLMConfig


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
