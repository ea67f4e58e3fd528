"""Writes fairseq's model checkpoints: one file, or the parts that its model parallelism reads.

    folder/model.pt                       one part: a plain `transformer_lm`, options in `cfg`
    folder/model-model_part-0.pt, ...     several: a `transformer_lm_megatron`, options in `args`, a Namespace

fairseq keeps options in two ways, and each file has the one that its readers know. Every released fairseq reads
`args`, and model parallelism ran in 2020's only; but torch has refused a Namespace by default since 2.6, so a file
that a current torch shall load has `cfg`, plain dicts. Which part holds what is in `lmtools.parallel.plans`.
"""

from __future__ import annotations

import argparse
import math
import uuid
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtools import __version__
from lmtools.errors import ConfigError
from lmtools.files import atomic_directory, require_free_space
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.parallelize import ReadSlice
from lmtools.parallel.plans import TRANSFORMER_LM, shard_bounds, split_of

_DECODER_VERSION = 3.0
"""fairseq drops the final LayerNorm of a decoder that says less than 3, or nothing."""


def write_fairseq_parts(
    folder: str | Path,
    config: TransformerLMConfig,
    read: ReadSlice,
    *,
    num_parts: int,
    dtype: torch.dtype,
    stem: str = "model",
) -> list[Path]:
    """Write a model as fairseq would have saved it, without an optimizer's state. The folder is complete or absent.

    One part at a time is in memory, and of that, one tensor twice.

    Args:
        folder: the checkpoint's folder, which must not exist or be empty.
        config: the model.
        read: gives any slice of any whole parameter, by lmtools' name; tied parameters are asked for once.
        num_parts: how many model-parallel ranks the files are for.
        dtype: what the parameters are converted to.
        stem: the files' common name.

    Returns:
        The files, in rank order.

    Raises:
        ConfigError: the parts would not be of equal size, as fairseq needs them.
        LmtoolsError: the folder has content, or the disk is full or may not be written.
    """
    folder = Path(folder)
    _require_equal_parts(config, num_parts)
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in TransformerLM(config).named_parameters()}
    names = [f"{stem}.pt"] if num_parts == 1 else [f"{stem}-model_part-{part}.pt" for part in range(num_parts)]
    origin = {"version": __version__, "set_id": uuid.uuid4().hex}
    with atomic_directory(folder) as temporary:
        require_free_space(temporary, num_parts * _part_bytes(shapes, num_parts, dtype), str(folder))
        for part, name in enumerate(names):
            content = {
                **_options(config, num_parts, part),
                "model": _state_dict(config, shapes, read, num_parts, part, dtype),
                **_progress(),
                "lmtools": origin,
            }
            torch.save(content, temporary / name)
    return [folder / name for name in names]


def _require_equal_parts(config: TransformerLMConfig, num_parts: int) -> None:
    for what, length in (
        ("attention heads", config.decoder_attention_heads),
        ("units of the feed-forward", config.decoder_ffn_embed_dim),
        ("rows of the vocabulary", config.vocab_size),
    ):
        if num_parts < 1 or length % num_parts:
            raise ConfigError(f"{num_parts} parts: do not divide the model's {length} {what}, as fairseq needs them to")


def _part_slices(name: str, shape: tuple[int, ...], num_parts: int, part: int) -> tuple[slice, ...]:
    slices = [slice(0, length) for length in shape]
    dim = split_of(name, TRANSFORMER_LM).dim
    if dim is not None:
        slices[dim] = slice(*shard_bounds(shape[dim], num_parts, part))
    return tuple(slices)


def _part_bytes(shapes: dict[str, tuple[int, ...]], num_parts: int, dtype: torch.dtype) -> int:
    num_elements = 0
    for name, shape in shapes.items():
        num_elements += math.prod(piece.stop - piece.start for piece in _part_slices(name, shape, num_parts, 0))
    return num_elements * dtype.itemsize


def _state_dict(
    config: TransformerLMConfig,
    shapes: dict[str, tuple[int, ...]],
    read: ReadSlice,
    num_parts: int,
    part: int,
    dtype: torch.dtype,
) -> OrderedDict[str, Tensor]:
    """One part's tensors under fairseq's names; a tied output projection has none, as in 2020."""
    state = OrderedDict({"decoder.version": torch.tensor([_DECODER_VERSION])})
    if not (config.decoder_learned_pos or config.no_token_positional_embeddings):
        # Positions are computed; a buffer of one number tells the device, and fairseq of 2020 insists on it.
        state["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    for name, shape in shapes.items():
        piece = read(name, _part_slices(name, shape, num_parts, part))
        # A copy, so that no storage is written that is larger than its tensor.
        state[f"decoder.{name}"] = torch.empty(piece.shape, dtype=dtype).copy_(piece)
    return state


def _options(config: TransformerLMConfig, num_parts: int, part: int) -> dict[str, Any]:
    """`args` or `cfg`: what fairseq needs to build the model, and its language modelling task, again."""
    model: dict[str, Any] = asdict(config)
    del model["vocab_size"]  # of the dictionary, for fairseq
    model |= {
        "decoder_input_dim": config.decoder_embed_dim,
        "decoder_output_dim": config.decoder_embed_dim,
        "decoder_layerdrop": 0,
        "decoder_layers_to_keep": None,
        "adaptive_input": False,
        "adaptive_input_cutoff": None,
        "adaptive_input_factor": 4,
        "adaptive_softmax_cutoff": None,
        "adaptive_softmax_dropout": 0,
        "adaptive_softmax_factor": 4,
        "character_embeddings": False,
        "tie_adaptive_weights": False,
        "tie_adaptive_proj": False,
    }
    task: dict[str, Any] = {
        "data": "",
        "sample_break_mode": "none",
        "tokens_per_sample": config.max_target_positions,
        "max_target_positions": config.max_target_positions,
        "output_dictionary_size": -1,
        "self_target": False,
        "future_target": False,
        "past_target": False,
        "add_bos_token": False,
    }
    if num_parts == 1:
        cfg = {
            "_name": None,
            "common": {"model_parallel_size": 1},
            "model": {"_name": "transformer_lm", **model},
            "task": {"_name": "language_modeling", **task},
            "criterion": {"_name": "cross_entropy"},
        }
        return {"args": None, "cfg": cfg}
    args = argparse.Namespace(
        arch="transformer_lm_megatron",
        task="language_modeling",
        criterion="vocab_parallel_cross_entropy",
        model_parallel_size=num_parts,
        checkpoint_suffix=f"-model_part-{part}",
        **{**task, **model},
    )
    return {"args": args}


def _progress() -> dict[str, Any]:
    """The state of a training that has not begun: fairseq fine-tunes from it, with an optimizer of its own."""
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": 0,
    }
    iterator = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    return {
        "optimizer_history": [history],
        "extra_state": {"train_iterator": iterator, "val_loss": None},
        "last_optimizer_state": None,
    }
