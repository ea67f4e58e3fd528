"""A model that knows nothing, in the parts that fairseq would have written."""

from __future__ import annotations

from pathlib import Path

import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.models.architectures import transformer_lm_megatron
from lmtools.models.transformer_lm import TransformerLM, initialize_parameter
from lmtools.parallel.parallelize import seeded_values


def write_random_checkpoint(folder: Path, vocab_size: int, num_parts: int) -> None:
    config = transformer_lm_megatron(
        vocab_size,
        decoder_layers=1,
        decoder_embed_dim=16,
        decoder_ffn_embed_dim=16,
        decoder_attention_heads=8,
        max_target_positions=64,
        share_decoder_input_output_embed=True,
    )
    with torch.device("meta"):
        values = seeded_values(TransformerLM(config), initialize_parameter, seed=1)
    write_fairseq_parts(folder, config, values, num_parts=num_parts, dtype=torch.float16)
