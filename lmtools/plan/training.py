"""A training run's plan: memory of a rank, traffic and work of an update, and how long that takes at a given speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lmtools.checkpoints.models import model_config
from lmtools.models.architectures import TransformerXLConfig
from lmtools.models.flops import training_flops_per_token
from lmtools.plan.memory import TrainingMemory, num_elements, parameter_shapes, tp_shapes, training_memory
from lmtools.plan.sizes import Device
from lmtools.plan.speed import Speed, StepTime, step_time
from lmtools.plan.traffic import Traffic, training_traffic
from lmtools.train.config import Run
from lmtools.train.precision import parameter_dtype


@dataclass(frozen=True)
class TrainingPlan:
    """What a run needs.

    Attributes:
        parameters: of the whole model.
        parameters_on_rank: of a tp rank's share, before `--zero`.
        dtype: of weights, gradients and activations.
        batch_size: blocks in a batch of one replica.
        tokens_in_update: over all replicas and batches.
        memory: of the first rank.
        traffic: of an update.
        flops_in_update: on one rank, recomputed activations included.
        time: of an update, where a speed was given.
    """

    parameters: int
    parameters_on_rank: int
    dtype: str
    batch_size: int
    tokens_in_update: int
    memory: TrainingMemory
    traffic: list[Traffic]
    flops_in_update: float
    time: StepTime | None


def plan_training(run: Run, *, vocab_size: int, speed: Speed | None, device: Device = "cuda") -> TrainingPlan:
    """Plan a resolved run.

    Args:
        run: from `lmtools.train.config.resolve`.
        vocab_size: types of the dictionary.
        speed: of devices and links, or None for no estimate of time.
        device: the kernels that activations are counted for.
    """
    config = run.train
    model = model_config(run.model, vocab_size)
    batch_size = blocks_in_batch(config.batch_size, config.max_tokens, config.tokens_per_sample)
    shapes = parameter_shapes(model)
    tokens_on_replica = batch_size * config.tokens_per_sample * config.update_freq
    traffic = training_traffic(config, model, batch_size=batch_size)
    flops = (
        tokens_on_replica
        / config.mp
        * flops_per_token(
            run.model,
            vocab_size=vocab_size,
            length=config.tokens_per_sample,
            checkpoint_activations=config.checkpoint_activations,
        )
    )
    return TrainingPlan(
        parameters=num_elements(shapes),
        parameters_on_rank=num_elements(tp_shapes(model, config.mp)),
        dtype=str(parameter_dtype(config)).removeprefix("torch."),
        batch_size=batch_size,
        tokens_in_update=tokens_on_replica * config.dp,
        memory=training_memory(config, model, batch_size=batch_size, device=device),
        traffic=traffic,
        flops_in_update=flops,
        time=step_time(flops, sum(row.sent_bytes for row in traffic), speed) if speed else None,
    )


def blocks_in_batch(batch_size: int | None, max_tokens: int | None, length: int) -> int:
    """The most blocks of `length` tokens in a batch: `--batch-size`, or as many as `--max-tokens` holds, at least 1."""
    limits = [] if max_tokens is None else [max(1, max_tokens // length)]
    return min([*limits, *([] if batch_size is None else [batch_size])])


def flops_per_token(fields: Mapping[str, Any], *, vocab_size: int, length: int, checkpoint_activations: bool) -> float:
    """Operations of a whole model for a token: `training_flops_per_token`, 3 forward passes' worth.

    `--checkpoint-activations` adds a fourth of the blocks: a third of that without its output projection's 6 V E, of a
    Transformer-XL its shortlist's.
    """
    flops = training_flops_per_token(vocab_size=vocab_size, tokens_per_sample=length, fields=fields)
    model = model_config(fields, vocab_size)
    if isinstance(model, TransformerXLConfig):
        output = model.cluster_bounds[0][1] * model.embedding_dims[0]
    else:
        output = vocab_size * model.decoder_embed_dim
    return flops + ((flops - 6 * output) / 3 if checkpoint_activations else 0)


def training_document(plan: TrainingPlan, gpu_memory: int | None) -> dict[str, Any]:
    """A plan as JSON values, with whether it fits in `gpu_memory` bytes."""
    document = {"task": "train", **asdict(plan)}
    document["memory"]["total"] = plan.memory.total
    document["gpu_memory"] = gpu_memory
    document["fits"] = None if gpu_memory is None else plan.memory.total <= gpu_memory
    return document
