"""Whatever the checkpoint is, onto this mesh: a rank reads only its share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmtools.checkpoints.fairseq import FairseqCheckpoint, fairseq_checkpoint, read_parts
from lmtools.checkpoints.huggingface_files import WEIGHTS
from lmtools.checkpoints.huggingface_read import HuggingFaceCheckpoint, open_huggingface
from lmtools.checkpoints.models import Model, new_model, split_model
from lmtools.checkpoints.safetensors import SafetensorsCheckpoint, find_manifest, open_safetensors
from lmtools.checkpoints.training import is_training_checkpoint
from lmtools.checkpoints.training_read import TrainingCheckpoint, open_training
from lmtools.checkpoints.transformer_xl import (
    TransformerXLCheckpoint,
    is_transformers_folder,
    open_transformer_xl,
    transformer_xl_checkpoint,
)
from lmtools.checkpoints.vocabulary import Vocabulary, read_vocabulary
from lmtools.data.dictionary import Dictionary
from lmtools.errors import CheckpointError, ConfigError
from lmtools.models.architectures import ModelConfig, TransformerLMConfig, TransformerXLConfig
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.parallelize import materialize, without_memory
from lmtools.parallel.plans import shard_bounds

Checkpoint: TypeAlias = (
    FairseqCheckpoint | SafetensorsCheckpoint | TrainingCheckpoint | HuggingFaceCheckpoint | TransformerXLCheckpoint
)
"""What all have: `format`, `paths`, `config`, `num_parts`, `dtypes`, `identity`, `read`, `verify_part`, `drifted`."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Args:
        path: a training checkpoint's folder, a safetensors set's or a file of it, transformers' folder of an XGLM,
            GPT-2 or Transformer-XL model, or what `open_fairseq` or `open_transformer_xl` takes.

    Raises:
        CheckpointError: it is not there, not complete, or not one that lmtools reads.
    """
    if is_training_checkpoint(path):
        return open_training(path)
    if is_transformers_folder(path):
        return open_transformer_xl(path) or open_huggingface(path)
    if find_manifest(path) is not None or Path(path).suffix == ".safetensors" or (Path(path) / WEIGHTS[0]).is_file():
        return open_safetensors(path)
    of_a_run = [name for name in ("checkpoint_best", "checkpoint_last") if is_training_checkpoint(Path(path) / name)]
    if of_a_run:
        raise CheckpointError(f"{path}: holds the checkpoints of a training run; name one, as {path}/{of_a_run[0]}")
    return open_torch_files(path)


def open_torch_files(path: str | Path) -> FairseqCheckpoint | TransformerXLCheckpoint:
    """Open what fairseq or the original Transformer-XL saved, as `open_checkpoint` does; each file is read once."""
    contents = read_parts(path)
    return transformer_xl_checkpoint(contents) or fairseq_checkpoint(contents)


def require_transformer_lm(checkpoint: Checkpoint, advice: str) -> TransformerLMConfig:
    """The configuration of a checkpoint that holds a plain transformer.

    Raises:
        ConfigError: it holds a Transformer-XL; ends with the advice.
    """
    if not isinstance(checkpoint.config, TransformerLMConfig):
        raise ConfigError(f"{checkpoint.paths[0]}: holds a Transformer-XL; {advice}")
    return checkpoint.config


def as_transformer_xl(checkpoint: Checkpoint) -> TrainingCheckpoint | TransformerXLCheckpoint | None:
    """The checkpoint, if it holds a Transformer-XL: these are the kinds that can."""
    if isinstance(checkpoint.config, TransformerXLConfig):
        assert isinstance(checkpoint, (TrainingCheckpoint, TransformerXLCheckpoint))
        return checkpoint
    return None


def require_divisible(checkpoint: Checkpoint, tp_size: int) -> None:
    """Refuse a tensor-parallel size that torch cannot split the model over.

    Vocabularies may be cut unevenly, heads and feed-forward layers may not, and no rank may be without any of them.

    Raises:
        ConfigError: names the sizes that work.
    """
    num_heads, num_units = _divided(checkpoint.config)
    if num_heads % tp_size or num_units % tp_size:
        both = math.gcd(num_heads, num_units)
        sizes = ", ".join(str(size) for size in range(1, both + 1) if both % size == 0)
        raise ConfigError(
            f"--mp {tp_size}: does not divide the model's {num_heads} attention heads and {num_units} feed-forward "
            f"units; use one of {sizes}"
        )
    require_rows_on_every_rank(checkpoint.config, tp_size)


def require_rows_on_every_rank(config: ModelConfig, tp_size: int) -> None:
    """Refuse a tensor-parallel size that leaves a rank without rows of a vocabulary, or of a cluster of one.

    Raises:
        ConfigError: names the vocabulary.
    """
    for num_rows in _vocabularies(config):
        if shard_bounds(num_rows, tp_size, tp_size - 1)[0] == num_rows:
            raise ConfigError(f"--mp {tp_size}: leaves a rank without any of the vocabulary of {num_rows}; use fewer")


def _divided(config: ModelConfig) -> tuple[int, int]:
    """Attention heads and feed-forward units."""
    if isinstance(config, TransformerXLConfig):
        return config.n_head, config.d_inner
    return config.decoder_attention_heads, config.decoder_ffn_embed_dim


def _vocabularies(config: ModelConfig) -> list[int]:
    """Rows of each matrix that is split by vocabulary."""
    if isinstance(config, TransformerXLConfig):
        return [end - start for start, end in config.cluster_bounds]
    return [config.vocab_size]


def require_dictionary_fits(checkpoint: Checkpoint, num_types: int, where: str | Path) -> None:
    """Refuse a dictionary of another size than the embedding.

    Args:
        checkpoint: from `open_checkpoint`.
        num_types: of the dictionary, special symbols included.
        where: the dictionary's file, for the message.

    Raises:
        CheckpointError: the embedding has neither the dictionary's rows, nor these and fairseq's padding of them, a
            multiple of 8 for each of any number of parts that the heads allow.
    """
    rows = checkpoint.config.vocab_size
    num_heads, _ = _divided(checkpoint.config)
    multiples = [8 * num_parts for num_parts in range(1, num_heads + 1) if num_heads % num_parts == 0]
    if rows != num_types and rows not in [-(-num_types // multiple) * multiple for multiple in multiples]:
        raise CheckpointError(
            f"{where}: has {num_types} types, the embedding of {checkpoint.paths[0].name} has {rows} rows, which is "
            "neither as many nor as many with fairseq's padding; this is not the dictionary of the checkpoint"
            + ("; put the vocab.pkl that came with it beside it" if _has_words_of_its_own(checkpoint) else "")
        )


def _has_words_of_its_own(checkpoint: Checkpoint) -> bool:
    """Whether it is transformers' Transformer-XL, which comes with a vocabulary."""
    return isinstance(checkpoint, TransformerXLCheckpoint) and checkpoint.of_transformers


def own_vocabulary(checkpoint: Checkpoint) -> Vocabulary | None:
    """The vocabulary of a checkpoint whose rows are no dictionary's indices, from the file beside it.

    Raises:
        CheckpointError: the file is broken, or of another model.
    """
    if not isinstance(checkpoint, TransformerXLCheckpoint) or checkpoint.vocabulary_path is None:
        return None
    return read_vocabulary(checkpoint.vocabulary_path, num_rows=checkpoint.config.vocab_size)


def rows_of_dictionary(
    checkpoint: Checkpoint, dictionary: Dictionary, where: str | Path
) -> npt.NDArray[np.int32] | None:
    """The model's row for each index of a dictionary, -1 where it has none; None if they are the same.

    Args:
        checkpoint: from `open_checkpoint`.
        dictionary: the data's.
        where: its file, for the message.

    Raises:
        CheckpointError: rows and indices should be the same, and are not as many.
    """
    rows = checkpoint.rows_of(dictionary) if isinstance(checkpoint, HuggingFaceCheckpoint) else None
    if rows is None:
        require_dictionary_fits(checkpoint, len(dictionary), where)
    return rows


def load_model(
    checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype, *, progress: Callable[[int], None] = lambda num_bytes: None
) -> Model:
    """Build the model and fill it from the checkpoint. Every rank of the mesh must call it.

    Any number of parts loads on any tensor-parallel size that divides the heads. Peak memory of a rank is its share of
    the model and one tensor.

    Args:
        checkpoint: from `open_checkpoint`.
        mesh: where we are.
        dtype: what the parameters are converted to.
        progress: called with the number of bytes that were just checked or read.

    Returns:
        The model in eval mode, on `mesh.device`, without gradients.

    Raises:
        CheckpointError: parts that contradict each other. The parts are divided among the ranks to be compared.
        ConfigError: the tp size does not divide the heads or the feed-forward units.
    """
    require_divisible(checkpoint, mesh.tp_size)
    for part in range(mesh.rank, checkpoint.num_parts, mesh.world_size):
        checkpoint.verify_part(part)
        progress(checkpoint.paths[part].stat().st_size)

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        tensor = checkpoint.read(name, slices)
        progress(tensor.nbytes)
        return tensor

    with without_memory():
        model = new_model(checkpoint.config)
    split_model(model, mesh)
    materialize(model, read, device=mesh.device, dtype=dtype)
    return model.requires_grad_(False).eval()


def load_transformer_lm(
    checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype, *, progress: Callable[[int], None] = lambda num_bytes: None
) -> TransformerLM:
    """As `load_model`, of a checkpoint that `require_transformer_lm` has let pass."""
    model = load_model(checkpoint, mesh, dtype, progress=progress)
    assert isinstance(model, TransformerLM)
    return model
