"""Bytes on one rank of a training run: weights, gradients, optimizer state, activations.

The rank is the first one of its tp and of its dp group, which has the most where a dimension does not divide. Symbols
in the formulas: B blocks of T tokens, n = B * T, width E, feed-forward width F, h heads, vocabulary V, tp ranks, and
s bytes of an element (4 in float32, 2 in float16 and bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from lmtools.checkpoints.models import new_model, plan_of
from lmtools.models.architectures import ModelConfig, TransformerLMConfig, TransformerXLConfig
from lmtools.parallel.parallelize import without_memory
from lmtools.parallel.plans import shard_bounds, split_of
from lmtools.plan import transformer_xl
from lmtools.plan.sizes import FLOAT32_BYTES, TOKEN_BYTES, Device, Shape, mask_bytes
from lmtools.train.config import TrainConfig
from lmtools.train.precision import parameter_dtype


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one rank.

    Attributes:
        weights: what the rank keeps of the parameters.
        gradients: what it keeps of their gradients.
        optimizer: the optimizer's state, master weights included.
        activations: kept from the forward pass for the backward pass, at their most.
        workspace: the largest of what comes and goes.
        gathered: whole weights and gradients that `--zero` puts together for a while.
        host: of the host's memory, what `--offload-activations` keeps there; not in the total.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    gathered: int
    host: int

    @property
    def total(self) -> int:
        """All of it at once on the device, which is a little more than ever is."""
        return sum(value for name, value in asdict(self).items() if name != "host")


@cache  # a plan asks several times, and 72 blocks take a second
def parameter_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """The whole shape of each parameter, tied ones once; from a model on the meta device."""
    with without_memory():
        model = new_model(config)
    return MappingProxyType({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})


def tp_shapes(config: ModelConfig, tp: int) -> dict[str, Shape]:
    """What tp rank 0 has of each parameter: ceil(length / tp) along the dimension that the plan table splits."""
    local = {}
    plan = plan_of(config)
    for name, shape in parameter_shapes(config).items():
        dim = split_of(name, plan).dim
        local[name] = shape if dim is None else (*shape[:dim], shard_bounds(shape[dim], tp, 0)[1], *shape[dim + 1 :])
    return local


def zero_shapes(shapes: Mapping[str, Shape], dp: int, zero: int) -> dict[str, Shape]:
    """What dp rank 0 keeps: with `--zero` 2 or 3 ceil(rows / dp) of each parameter's rows, else all."""
    if dp == 1 or zero == 0:
        return dict(shapes)
    return {name: (-(-shape[0] // dp), *shape[1:]) for name, shape in shapes.items()}


def num_elements(shapes: Mapping[str, Shape]) -> int:
    """Sum of the products of the shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def optimizer_bytes(shapes: Mapping[str, Shape], config: TrainConfig) -> int:
    """The optimizer's state for parameters of these local shapes, always in float32.

    Adam: 8 bytes an element (two moments) and 4 a parameter (its step). SGD: 4 an element with momentum, else none.
    Adafactor: for a matrix (R, C) 4 * (R + C), for a vector 4 an element, and 4 an element with `--beta1`; 4 a
    parameter. Parameters in float16 or bfloat16 have 4 an element more, their master weights, unless the run is
    memory-efficient.
    """
    elements = num_elements(shapes)
    match config.optimizer:
        case "adam":
            per_element, steps, factors = 2, len(shapes), 0
        case "sgd":
            per_element, steps, factors = int(config.momentum > 0), 0, 0
        case "adafactor":
            per_element, steps = int(config.beta1 is not None), len(shapes)
            factors = sum(sum(shape) for shape in shapes.values())  # rows and columns, or the vector itself
    master = parameter_dtype(config).itemsize < FLOAT32_BYTES and not (
        config.memory_efficient_fp16 or config.memory_efficient_bf16
    )
    return FLOAT32_BYTES * ((per_element + int(master)) * elements + steps + factors)


def block_activation_bytes(
    model: TransformerLMConfig,
    *,
    batch_size: int,
    length: int,
    tp: int,
    itemsize: int,
    sequence_parallel: bool,
    device: Device,
) -> int:
    """What one block keeps for its backward pass.

        2 n E s                     inputs of both norms (pre-norm; with post-norm outputs) \
        n E s for each dropout      its mask, a byte an element on a GPU                     | / tp with
        16 n                        mean and deviation of both norms, float32               /  --sequence-parallel
        2 n E s                     inputs of q, k, v and of fc1
        4 n E s / tp                q, k, v and what the heads attended to
        4 n h / tp                  log-sum-exp of the attention, float32
        2 n F s / tp                fc1's output and fc2's input, one of them with relu
        n F s / tp                  mask of the activation's dropout

    On a CPU attention dropout has no fused kernel: instead of the log-sum-exp 3 B h T^2 s / tp are kept.
    """
    n = batch_size * length
    embed_dim, ffn_dim, heads = model.decoder_embed_dim, model.decoder_ffn_embed_dim, model.decoder_attention_heads
    mask = mask_bytes(device, itemsize)
    between = 2 * n * embed_dim * itemsize + 4 * FLOAT32_BYTES * n
    if model.dropout:
        between += 2 * n * embed_dim * mask
    if sequence_parallel:
        between //= tp
    whole = 2 * n * embed_dim * itemsize
    attention = 4 * n * embed_dim * itemsize
    if model.attention_dropout and device == "cpu":
        attention += 3 * n * heads * length * itemsize
    else:
        attention += n * heads * FLOAT32_BYTES
    hidden = n * ffn_dim * itemsize * (1 if model.activation_fn == "relu" and not model.activation_dropout else 2)
    if model.activation_dropout:
        hidden += n * ffn_dim * mask
    return between + whole + (attention + hidden) // tp


def block_input_bytes(model: TransformerLMConfig, n: int, *, tp: int, itemsize: int, sequence_parallel: bool) -> int:
    """What all blocks read, n E s each; under `--sequence-parallel` only the first one's is whole on every rank."""
    first = n * model.decoder_embed_dim * itemsize
    return first + (model.decoder_layers - 1) * (first // (tp if sequence_parallel else 1))


def activation_bytes(
    model: TransformerLMConfig,
    *,
    batch_size: int,
    length: int,
    tp: int,
    itemsize: int,
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
    sequence_parallel: bool = False,
    device: Device = "cuda",
) -> int:
    """All that is kept on the device at the end of a forward pass.

    The blocks (`block_activation_bytes`), or with `--checkpoint-activations` their inputs (`block_input_bytes`), or
    with `--offload-activations` none of these; the tokens, 8 n; the embedding's dropout mask; the last norm,
    2 n E s + 8 n with its output, where there is one, else n E s; the softmax, 4 n V / tp, float32 always.
    """
    n = batch_size * length
    width = n * model.decoder_embed_dim
    final_norm = model.decoder_normalize_before and not model.no_decoder_final_norm
    around = TOKEN_BYTES * n + width * itemsize
    around += n * shard_bounds(model.vocab_size, tp, 0)[1] * FLOAT32_BYTES
    if model.dropout:
        around += width * mask_bytes(device, itemsize)
    between = tp if sequence_parallel else 1
    if final_norm:
        around += (width * itemsize + 2 * FLOAT32_BYTES * n) // between
    if model.layernorm_embedding:
        around += width * itemsize + 2 * FLOAT32_BYTES * n
    if offload_activations:
        return around
    if checkpoint_activations:
        return around + block_input_bytes(model, n, tp=tp, itemsize=itemsize, sequence_parallel=sequence_parallel)
    block = block_activation_bytes(
        model,
        batch_size=batch_size,
        length=length,
        tp=tp,
        itemsize=itemsize,
        sequence_parallel=sequence_parallel,
        device=device,
    )
    return around + model.decoder_layers * block


def training_memory(
    config: TrainConfig, model: ModelConfig, *, batch_size: int, device: Device = "cuda"
) -> TrainingMemory:
    """Everything on rank 0.

    Workspace is the largest of: the loss's gradient, twice, 8 n V / tp; with `--checkpoint-activations` one block's
    activations; with parameters in float16 or bfloat16 the update of the largest one in float32, 8 an element; a
    Transformer-XL's gradients within one layer (`transformer_xl.layer_backward_bytes`), which come to a recomputed
    layer's activations, and with either those that wait (`transformer_xl.waiting_gradient_bytes`).
    Gathered are, for `--zero` 3, two blocks and what is outside the blocks; for `--zero` 2 all weights, from the
    forward to the backward pass; and for both, the gradients of a block.

    Args:
        config: the run.
        model: its model.
        batch_size: blocks in a batch of one replica, or its streams.
        device: the kernels that activations are counted for.
    """
    itemsize = parameter_dtype(config).itemsize
    on_tp_rank = tp_shapes(model, config.mp)
    kept = zero_shapes(on_tp_rank, config.dp, config.zero)
    of_batch = _batch_memory(config, model, batch_size, itemsize, device)
    largest = max(math.prod(shape) for shape in kept.values())
    return TrainingMemory(
        weights=num_elements(kept) * itemsize,
        gradients=num_elements(kept) * itemsize,
        optimizer=optimizer_bytes(kept, config),
        activations=of_batch.activations,
        workspace=max(
            of_batch.backward,
            of_batch.block if config.checkpoint_activations else 0,
            2 * FLOAT32_BYTES * largest if itemsize < FLOAT32_BYTES else 0,
        ),
        gathered=_gathered_elements(on_tp_rank, config) * itemsize,
        host=of_batch.host,
    )


class _BatchMemory(NamedTuple):
    """Bytes that a batch takes: kept on the device and on the host, of one block, and of the backward pass at once."""

    activations: int
    host: int
    block: int
    backward: int


def _batch_memory(
    config: TrainConfig, model: ModelConfig, batch_size: int, itemsize: int, device: Device
) -> _BatchMemory:
    length, tp, n = config.tokens_per_sample, config.mp, batch_size * config.tokens_per_sample
    again, offload, sequence = config.checkpoint_activations, config.offload_activations, config.sequence_parallel
    if isinstance(model, TransformerXLConfig):
        batch = transformer_xl.Batch(batch_size, length, tp, itemsize, mask_bytes(device, itemsize))
        waiting = transformer_xl.waiting_gradient_bytes(model, batch)
        of_layer = transformer_xl.layer_backward_bytes(model, batch)
        return _BatchMemory(
            transformer_xl.activation_bytes(model, batch, checkpoint_activations=again, offload_activations=offload),
            transformer_xl.host_bytes(model, batch) if offload else 0,
            transformer_xl.layer_activation_bytes(model, batch) + of_layer + waiting,
            max(transformer_xl.softmax_backward_bytes(model, batch), of_layer) + waiting,
        )
    sizes = {"batch_size": batch_size, "length": length, "tp": tp, "itemsize": itemsize}
    return _BatchMemory(
        activation_bytes(
            model,
            **sizes,
            checkpoint_activations=again,
            offload_activations=offload,
            sequence_parallel=sequence,
            device=device,
        ),
        block_input_bytes(model, n, tp=tp, itemsize=itemsize, sequence_parallel=sequence) if offload else 0,
        block_activation_bytes(model, **sizes, sequence_parallel=sequence, device=device),
        2 * n * shard_bounds(model.vocab_size, tp, 0)[1] * FLOAT32_BYTES,
    )


def _gathered_elements(on_tp_rank: Mapping[str, Shape], config: TrainConfig) -> int:
    if config.dp == 1 or config.zero == 0:
        return 0
    block = num_elements({name: shape for name, shape in on_tp_rank.items() if name.startswith("layers.0.")})
    outside = num_elements({name: shape for name, shape in on_tp_rank.items() if not name.startswith("layers.")})
    weights = num_elements(on_tp_rank) if config.zero == 2 else 2 * block + outside
    return weights + max(block, outside)
