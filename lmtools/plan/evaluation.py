"""An evaluation's plan: windows, operations, memory, hours. Symbols are those of `lmtools.plan.memory`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmtools.data.blocks import Offsets, eval_windows
from lmtools.evaluate.scoring import LOGITS_BYTES
from lmtools.models.architectures import TransformerLMConfig, TransformerXLConfig
from lmtools.parallel.plans import shard_bounds
from lmtools.plan import transformer_xl
from lmtools.plan.memory import num_elements, parameter_shapes, tp_shapes
from lmtools.plan.sizes import FLOAT32_BYTES
from lmtools.plan.speed import Speed


@dataclass(frozen=True)
class EvalPlan:
    """What an evaluation needs.

    Attributes:
        parameters: of the whole model.
        parameters_on_rank: of a tp rank's share.
        num_windows: how many windows score the split, or chunks of its streams.
        tokens_scored: each token once.
        tokens_read: what goes through the model, contexts included.
        weights: bytes on one rank.
        activations: bytes on one rank, at their most.
        flops: of all windows, on all ranks together.
        hours: at the given speed, over all ranks; None without one. Traffic is not counted.
    """

    parameters: int
    parameters_on_rank: int
    num_windows: int
    tokens_scored: int
    tokens_read: int
    weights: int
    activations: int
    flops: float
    hours: float | None

    @property
    def memory(self) -> int:
        """Bytes on one rank."""
        return self.weights + self.activations


def plan_evaluation(
    model: TransformerLMConfig,
    *,
    num_tokens: int,
    tokens_per_sample: int,
    context_window: int,
    batch_size: int,
    itemsize: int,
    mp: int,
    dp: int,
    speed: Speed | None,
) -> EvalPlan:
    """Plan `lmtools eval` with `--sample-break-mode none`.

    Args:
        model: its shape.
        num_tokens: of the split.
        tokens_per_sample: the longest window.
        context_window: tokens of each window that are only seen.
        batch_size: windows at a time.
        itemsize: bytes of an element.
        mp: tensor-parallel ranks.
        dp: replicas.
        speed: of a device, or None for no estimate of hours.

    Raises:
        ConfigError: the context leaves no room for a token to score.
    """
    windows = eval_windows(
        np.array([num_tokens]), tokens_per_sample=tokens_per_sample, context_window=context_window, break_mode="none"
    )
    local = num_elements(tp_shapes(model, mp))
    flops = evaluation_flops(model, windows)
    return EvalPlan(
        parameters=num_elements(parameter_shapes(model)),
        parameters_on_rank=local,
        num_windows=len(windows),
        tokens_scored=num_tokens,
        tokens_read=int((windows[:, 2] - windows[:, 0]).sum()),
        weights=local * itemsize,
        activations=eval_activation_bytes(
            model,
            batch_size=min(batch_size, len(windows)),
            length=min(tokens_per_sample, num_tokens),
            num_scored=tokens_per_sample - context_window,
            tp=mp,
            itemsize=itemsize,
        ),
        flops=flops,
        hours=_hours(flops, mp * dp, speed),
    )


def plan_stream_evaluation(
    model: TransformerXLConfig,
    *,
    num_tokens: int,
    tokens_per_sample: int,
    batch_size: int,
    itemsize: int,
    mp: int,
    dp: int,
    speed: Speed | None,
) -> EvalPlan:
    """Plan `lmtools eval --task truncated_bptt_lm`, by lmtools' rule.

    Memory is counted as full from the beginning, and what is read again (`ext_len`) as there before each chunk.

    Args:
        model: its shape, and how much it remembers.
        num_tokens: of the split.
        tokens_per_sample: of a chunk.
        batch_size: streams of a replica.
        itemsize: bytes of an element.
        mp: tensor-parallel ranks.
        dp: replicas.
        speed: of a device, or None for no estimate of hours.
    """
    local = num_elements(tp_shapes(model, mp))
    length = min(tokens_per_sample, num_tokens)
    flops = transformer_xl.evaluation_flops(model, batch_size=1, length=length) / length * num_tokens
    num_chunks = -(-num_tokens // tokens_per_sample)
    return EvalPlan(
        parameters=num_elements(parameter_shapes(model)),
        parameters_on_rank=local,
        num_windows=num_chunks,
        tokens_scored=num_tokens,
        tokens_read=num_tokens + num_chunks * model.ext_len,
        weights=local * itemsize,
        activations=transformer_xl.evaluation_activation_bytes(
            model, transformer_xl.Batch(batch_size, length, mp, itemsize, mask=0)
        ),
        flops=flops,
        hours=_hours(flops, mp * dp, speed),
    )


def _hours(flops: float, num_ranks: int, speed: Speed | None) -> float | None:
    return flops / (num_ranks * speed.flops * speed.utilisation) / 3600 if speed else None


def evaluation_flops(model: TransformerLMConfig, windows: Offsets) -> float:
    """Operations of matrix products for all windows.

    A window of T tokens that scores its last S takes

        (L - 1) * (2 T (4 E^2 + 2 E F) + 2 E T (T + 1))         all blocks but the last
        2 T * 2 E^2 + 2 S (2 E^2 + 2 E F) + 2 E S (2 T - S + 1)     the last: keys and values of all, queries of S
        2 S E V                                                  logits

    where a query looks at itself and what is before it, two products of 2 E operations for each.
    """
    embed_dim, ffn_dim = model.decoder_embed_dim, model.decoder_ffn_embed_dim
    length = (windows[:, 2] - windows[:, 0]).astype(np.float64)
    scored = (windows[:, 2] - windows[:, 1]).astype(np.float64)
    projections = 4 * embed_dim**2 + 2 * embed_dim * ffn_dim
    block = 2 * length * projections + 2 * embed_dim * length * (length + 1)
    last = 2 * length * 2 * embed_dim**2 + 2 * scored * (2 * embed_dim**2 + 2 * embed_dim * ffn_dim)
    last += 2 * embed_dim * scored * (2 * length - scored + 1)
    logits = 2 * scored * embed_dim * model.vocab_size
    return float(((model.decoder_layers - 1) * block + last + logits).sum())


def eval_activation_bytes(
    model: TransformerLMConfig, *, batch_size: int, length: int, num_scored: int, tp: int, itemsize: int
) -> int:
    """What is there at once, at most, on a device that takes a whole batch: the larger of

        n (3 E + 2 F / tp) s            a block's input, sum and norm, and the feed-forward on both sides
        m E s + 8 r V / tp              the scored positions, logits of r of them in float32, and their softmax

    with n = B T tokens, m = B S scored ones, and r at most LOGITS_BYTES / 4 V.
    """
    embed_dim, ffn_dim = model.decoder_embed_dim, model.decoder_ffn_embed_dim
    block = batch_size * length * (3 * embed_dim + 2 * ffn_dim // tp) * itemsize
    positions = batch_size * num_scored
    rows = min(positions, max(1, LOGITS_BYTES // (FLOAT32_BYTES * model.vocab_size)))
    logits = positions * embed_dim * itemsize + rows * shard_bounds(model.vocab_size, tp, 0)[1] * 2 * FLOAT32_BYTES
    return max(block, logits)


def eval_document(plan: EvalPlan, gpu_memory: int | None) -> dict[str, Any]:
    """A plan as JSON values, with whether it fits in `gpu_memory` bytes."""
    fits = None if gpu_memory is None else plan.memory <= gpu_memory
    return {"task": "eval", **asdict(plan), "memory": plan.memory, "gpu_memory": gpu_memory, "fits": fits}
