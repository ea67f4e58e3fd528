"""Model and optimizer of a run, split over the mesh."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from lmtools.checkpoints.models import Model, initializer, model_config, new_model, split_model
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.parallelize import ReadSlice, materialize, seeded_values
from lmtools.train.adafactor import Adafactor
from lmtools.train.config import TrainConfig
from lmtools.train.optimizer import SGD, Adam, ShardedOptimizer


def build_model(
    config: TrainConfig,
    model_fields: Mapping[str, Any],
    vocab_size: int,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    read: ReadSlice | None = None,
) -> Model:
    """Build, split and fill the model. Every rank must call it.

    Args:
        config: the run.
        model_fields: the fields of the model's configuration, without `vocab_size`.
        vocab_size: types of the dictionary, or rows of the checkpoint that the model starts from.
        mesh: where we are.
        dtype: of the parameters.
        read: where initial values come from; None makes them up from (seed, parameter name).
    """
    architecture = model_config(model_fields, vocab_size)
    with torch.device("meta"):
        model = new_model(architecture)
    split_model(model, mesh, for_training=True, sequence_parallel=config.sequence_parallel)
    read = read or seeded_values(model, initializer(architecture), config.seed)
    materialize(model, read, device=mesh.device, dtype=dtype)
    model.checkpoint_activations = config.checkpoint_activations
    model.offload_activations = config.offload_activations
    if config.compile:
        for layer in model.layers:
            layer.compile()
    if mesh.dp_mesh is not None and config.zero:
        # The last norm of a post-norm block gives a view where the sequence is split. Nothing writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh.dp_mesh, reshard_after_forward=config.zero == 3)
        fully_shard(model, mesh=mesh.dp_mesh, reshard_after_forward=config.zero == 3)
    return model.train()


def build_optimizer(model: Model, config: TrainConfig) -> ShardedOptimizer:
    """The optimizer of a run, over parameters that are split already."""
    master_weights = not (config.memory_efficient_fp16 or config.memory_efficient_bf16)
    lr, weight_decay = config.lr, config.weight_decay
    match config.optimizer:
        case "adam":
            return Adam(
                model.parameters(),
                lr=lr,
                betas=config.adam_betas,
                eps=config.adam_eps,
                weight_decay=weight_decay,
                master_weights=master_weights,
            )
        case "sgd":
            return SGD(
                model.parameters(),
                lr=lr,
                momentum=config.momentum,
                weight_decay=weight_decay,
                master_weights=master_weights,
            )
        case "adafactor":
            return Adafactor(
                model.parameters(),
                lr=lr,
                eps=config.adafactor_eps,
                clip_threshold=config.clip_threshold,
                decay_rate=config.decay_rate,
                beta1=config.beta1,
                weight_decay=weight_decay,
                scale_parameter=config.scale_parameter,
                master_weights=master_weights,
            )
