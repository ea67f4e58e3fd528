"""Floating-point operations that training needs, counted from the shape of the model.

Counted are matrix products: 2 for each weight, and 2 * width for each token that is attended to; three times that with
the backward pass. Recomputed activations are not counted, since they are no use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtools.models.architectures import TransformerXLConfig


def training_flops_per_token(*, vocab_size: int, tokens_per_sample: int, fields: Mapping[str, Any]) -> float:
    """Operations of forward and backward, for one token of a full block, or one that is predicted in a chunk.

    Args:
        vocab_size: rows of the output projection.
        tokens_per_sample: length of a block.
        fields: the fields of `TransformerLMConfig`, or of `TransformerXLConfig`.
    """
    if "d_model" in fields:
        return _of_transformer_xl(TransformerXLConfig(vocab_size=vocab_size, **fields), tokens_per_sample)
    embed_dim, ffn_dim = fields["decoder_embed_dim"], fields["decoder_ffn_embed_dim"]
    weights = fields["decoder_layers"] * (4 * embed_dim**2 + 2 * embed_dim * ffn_dim) + vocab_size * embed_dim
    attention = fields["decoder_layers"] * 2 * 2 * embed_dim * (tokens_per_sample + 1) / 2
    return float(3 * (2 * weights + attention))


def _of_transformer_xl(config: TransformerXLConfig, tokens_per_sample: int) -> float:
    """With a full memory; for each token that is predicted, what is read again before it (`ext_len`) too.

    Left out are the position keys, which a batch shares, and the softmax's tails, which few tokens need.
    """
    width = config.n_head * config.d_head
    num_read = tokens_per_sample + config.ext_len
    times = num_read / tokens_per_sample
    # Keys and values of the memory are projected again for each chunk.
    num_projected = 2 * times + 2 * (config.mem_len + num_read) / tokens_per_sample
    weights = config.n_layer * (num_projected * config.d_model * width + times * 2 * config.d_model * config.d_inner)
    weights += config.cluster_bounds[0][1] * config.embedding_dims[0]
    num_keys = config.mem_len if config.same_length else config.mem_len + (num_read + 1) / 2
    attention = config.n_layer * 3 * 2 * width * num_keys * times  # by content, by distance, and the sum of values
    return float(3 * (2 * weights + attention))
