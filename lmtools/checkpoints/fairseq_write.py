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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtools import __version__
from lmtools.checkpoints.torch_file import StreamedTensor, write_torch_file
from lmtools.checkpoints.weights import Progress, Weights, bytes_of, part_slices, shape_of, stream_bytes, weights_of
from lmtools.errors import ConfigError
from lmtools.files import atomic_directory, require_free_space
from lmtools.models.architectures import TransformerLMConfig
from lmtools.parallel.parallelize import ReadSlice
from lmtools.parallel.plans import TRANSFORMER_LM, Split, split_of

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
    weights = weights_of(config, read, dtype)
    _require_equal_parts(config, num_parts)
    with atomic_directory(folder) as temporary:
        num_bytes = num_parts * sum(
            math.prod(shape_of(part_slices(name, shape, TRANSFORMER_LM, num_parts, 0))) * dtype.itemsize
            for name, shape in weights.shapes.items()
        )
        require_free_space(temporary, num_bytes, str(folder))
        paths = write_fairseq(temporary, weights, num_parts=num_parts, origin={}, stem=stem)
    return [folder / path.name for path in paths]


def write_fairseq(
    folder: Path,
    weights: Weights,
    *,
    num_parts: int,
    origin: Mapping[str, Any],
    progress: Progress = lambda num_bytes: None,
    stem: str = "model",
) -> list[Path]:
    """A `Writer`; `stem` is the files' common name.

    fairseq needs parts of equal size. A vocabulary that the parts do not divide is given rows of zeros at its end; each
    part says how many rows are the model's own, and lmtools leaves the others out when it reads them.
    """
    config = weights.config
    _require_equal_parts(config, num_parts)
    vocab_size = padded_vocab_size(config.vocab_size, num_parts)
    weights = _with_rows(weights, vocab_size)
    names = [f"{stem}.pt"] if num_parts == 1 else [f"{stem}-model_part-{part}.pt" for part in range(num_parts)]
    record: dict[str, Any] = {"version": __version__, "set_id": uuid.uuid4().hex, "vocab_size": config.vocab_size}
    record["origin"] = dict(origin)
    for part, name in enumerate(names):
        content = {
            **_options(config, num_parts, part),
            "model": _state_dict(weights, num_parts, part, progress),
            **_progress(),
            "lmtools": record,
        }
        write_torch_file(folder / name, content)
    return [folder / name for name in names]


def padded_vocab_size(vocab_size: int, num_parts: int) -> int:
    """Rows of the embedding over all parts in fairseq's layout: a multiple of the number of parts."""
    return -(-vocab_size // num_parts) * num_parts


def _require_equal_parts(config: TransformerLMConfig, num_parts: int) -> None:
    for what, length in (
        ("attention heads", config.decoder_attention_heads),
        ("units of the feed-forward", config.decoder_ffn_embed_dim),
    ):
        if num_parts < 1 or length % num_parts:
            raise ConfigError(f"{num_parts} parts: do not divide the model's {length} {what}, as fairseq needs them to")


def _with_rows(weights: Weights, vocab_size: int) -> Weights:
    """The same model with rows of zeros after those of its vocabulary."""
    own_rows = weights.config.vocab_size
    if vocab_size == own_rows:
        return weights

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        rows = slices[0]
        if split_of(name, TRANSFORMER_LM) is not Split.VOCABULARY or rows.stop <= own_rows:
            return weights.read(name, slices)
        own = weights.read(name, (slice(min(rows.start, own_rows), own_rows), *slices[1:]))
        return torch.cat([own, own.new_zeros(rows.stop - max(rows.start, own_rows), *own.shape[1:])])

    shapes = {
        name: (vocab_size, *shape[1:]) if split_of(name, TRANSFORMER_LM) is Split.VOCABULARY else shape
        for name, shape in weights.shapes.items()
    }
    return replace(weights, shapes=shapes, read=read)


def _state_dict(weights: Weights, num_parts: int, part: int, progress: Progress) -> OrderedDict[str, StreamedTensor]:
    """One part's tensors under fairseq's names; a tied output projection has none, as in 2020."""
    config = weights.config
    state = OrderedDict({"decoder.version": _small(torch.tensor([_DECODER_VERSION]))})
    if not (config.decoder_learned_pos or config.no_token_positional_embeddings):
        # Positions are computed; a buffer of one number tells the device, and fairseq of 2020 insists on it.
        state["decoder.embed_positions._float_tensor"] = _small(torch.zeros(1))
    for name, shape in weights.shapes.items():
        slices = part_slices(name, shape, TRANSFORMER_LM, num_parts, part)
        chunks = partial(_counted, weights, name, slices, progress)
        state[f"decoder.{name}"] = StreamedTensor(weights.dtypes[name], shape_of(slices), chunks)
    return state


def _counted(weights: Weights, name: str, slices: tuple[slice, ...], progress: Progress) -> Iterator[memoryview]:
    for chunk in stream_bytes(weights, name, slices):
        yield chunk
        progress(chunk.nbytes)


def _small(tensor: Tensor) -> StreamedTensor:
    return StreamedTensor(tensor.dtype, tuple(tensor.shape), lambda: [bytes_of(tensor)])


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
