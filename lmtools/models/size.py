"""How large a model is, by its options alone: nothing is built."""

from __future__ import annotations

from lmtools.models.architectures import ModelConfig, TransformerXLConfig


def num_matrix_elements(config: ModelConfig) -> int:
    """Elements of a model's matrices. It has a little more: biases, norms, learned positions, projections of clusters.

    A Transformer-XL's words count once, though its output may have a table of its own.
    """
    if isinstance(config, TransformerXLConfig):
        width = config.n_head * config.d_head
        layer = 5 * config.d_model * width + 2 * config.d_model * config.d_inner
        clusters = zip(config.cluster_bounds, config.embedding_dims, strict=True)
        return config.n_layer * layer + sum((end - start) * dim for (start, end), dim in clusters)
    embed_dim = config.decoder_embed_dim
    layer = 4 * embed_dim**2 + 2 * embed_dim * config.decoder_ffn_embed_dim
    num_tables = 1 if config.share_decoder_input_output_embed else 2
    return config.decoder_layers * layer + num_tables * config.vocab_size * embed_dim
