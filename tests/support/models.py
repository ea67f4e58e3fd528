"""Models with values of their own in every element, written in parts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.load import Checkpoint
from lmtools.models.architectures import TransformerLMConfig, transformer_lm
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.parallelize import without_memory

MANY_HEADS = transformer_lm(
    157,
    decoder_layers=1,
    decoder_embed_dim=96,
    decoder_ffn_embed_dim=96,
    decoder_attention_heads=48,
    max_target_positions=32,
    activation_fn="gelu",
    decoder_normalize_before=True,
    share_decoder_input_output_embed=True,
)
"""Its heads split over 1, 2, 3, 4, 6, 8, 12 and 16 ranks; its vocabulary evenly over 1 only."""


def random_values(config: TransformerLMConfig) -> dict[str, Tensor]:
    """Random values for every parameter, biases and norms too."""
    generator = torch.Generator().manual_seed(1)
    with without_memory():
        shapes = {name: value.shape for name, value in TransformerLM(config).named_parameters()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_random(folder: Path, config: TransformerLMConfig, num_parts: int) -> list[Path]:
    values = random_values(config)
    return write_fairseq_parts(
        folder, config, lambda name, at: values[name][at], num_parts=num_parts, dtype=torch.float32
    )


def values_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every parameter of a checkpoint, whole."""
    with without_memory():
        shapes = {name: value.shape for name, value in TransformerLM(checkpoint.config).named_parameters()}
    return {name: checkpoint.read(name, tuple(slice(0, length) for length in shape)) for name, shape in shapes.items()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of parameters are equal in name, dtype, shape and every bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )
