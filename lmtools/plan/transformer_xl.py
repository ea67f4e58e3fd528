"""Bytes and operations of a Transformer-XL: what `lmtools.plan.memory` has for plain transformers.

Symbols in the formulas: B rows of T tokens that are predicted, t = B T, and X before them that are read again
(`--ext-len`), n = B (T + X), memory M, keys K = M + T + X, c = B K, width E, heads h of width d, W = h d, feed-forward
width F, L layers, tp ranks, s bytes of an element, and m bytes of an element of a dropout's mask (1 on a GPU, s on a
CPU). Cluster i of the vocabulary has V_i types of width E_i; 0 is the shortlist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lmtools.models.architectures import TransformerXLConfig
from lmtools.parallel.plans import shard_bounds
from lmtools.plan.sizes import FLOAT32_BYTES, TOKEN_BYTES


class Batch(NamedTuple):
    """What goes through the model together, and on what.

    Attributes:
        batch_size: B, rows.
        length: T, tokens of a chunk, without what is read again.
        tp: ranks that share the model.
        itemsize: s, bytes of an element.
        mask: m, bytes of an element of a dropout's mask.
    """

    batch_size: int
    length: int
    tp: int
    itemsize: int
    mask: int


def tokens_in_clusters(model: TransformerXLConfig, num_tokens: int) -> list[float]:
    """How many of the tokens are expected in each cluster by Zipf's law: a share of 1 / r for the type of rank r.

    Text has fewer rare words than that, so the tails are not underestimated.
    """
    weights = [_harmonic(end) - _harmonic(start) for start, end in model.cluster_bounds]
    return [num_tokens * weight / sum(weights) for weight in weights]


def _harmonic(number: int) -> float:
    """1 + 1/2 + ... + 1/number."""
    if number < 100:
        return math.fsum(1 / rank for rank in range(1, number + 1))
    return math.log(number) + 0.5772156649015329 + 1 / (2 * number)


def layer_activation_bytes(model: TransformerXLConfig, batch: Batch) -> int:
    """What one layer keeps for its backward pass.

        c E s                       remembered inputs and the chunk's; the next memory too, if M > T
        n E s                       the next memory, if M is from 1 to T
        c E s + 8 c                 with --pre-lnorm: their norm, and its mean and deviation in float32
        n E s                       the chunk's inputs by themselves, for the queries, where B > 1 and M > 0
        (3 n + 2 c + K + 1) W s / tp    queries with either bias, what was attended to; keys, values; position keys
        h n K s / tp                attention weights; with --dropatt twice, and m for each
        3 n E s + 16 n              inputs of the norms and of fc1; with --pre-lnorm 2 n E s + 8 n
        n F s / tp                  fc2's input; with --dropout twice, and m for each
        2 n E m                     masks of --dropout

    The memory is counted as full.
    """
    batch_size, length, tp, itemsize, mask = batch
    num_read = length + model.ext_len
    num_keys = model.mem_len + num_read
    n, c = batch_size * num_read, batch_size * num_keys
    width, heads = model.n_head * model.d_head // tp, model.n_head // tp
    d_model = model.d_model * itemsize
    total = c * d_model + (n * d_model if 0 < model.mem_len <= length else 0)
    if model.pre_lnorm:
        total += c * d_model + 8 * c
    if batch_size > 1 and model.mem_len > 0:
        total += n * d_model
    total += (3 * n + 2 * c + num_keys + 1) * width * itemsize
    total += heads * n * num_keys * (itemsize + (itemsize + mask if model.dropatt else 0))
    total += 2 * n * d_model + 8 * n if model.pre_lnorm else 3 * n * d_model + 16 * n
    total += n * (model.d_inner // tp) * (itemsize + (itemsize + mask if model.dropout else 0))
    if model.dropout:
        total += 2 * n * model.d_model * mask
    return total


def activation_bytes(
    model: TransformerXLConfig,
    batch: Batch,
    *,
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
    in_clusters: Sequence[float] | None = None,
) -> int:
    """All that is kept on the device at the end of a forward pass, memory full.

    The layers (`layer_activation_bytes`), and what was remembered for them, c E s each, or n E s if M is at most T.
    With `--checkpoint-activations` instead of the layers their inputs, n E s each, the next memory, c E s each where
    M > T, and (T + X) K s, who may look where; with `--offload-activations` only the latter of these. And around them

        (K + 1) E s                         the positions
        n (8 + 1 + E_i s) for each cluster  indices, which tokens are its own, embeddings before their projection
        2 n E m                             masks of --dropout, of embeddings and output
        n E s                               the output; only its t E s that are predicted from, where X > 0 and B > 1
        t E_0 s + 4 t (V_0 / tp + tails)    its projection; logits of the shortlist, float32 always
        n_i ((E + E_i) s + 4 V_i / tp)      the same for the n_i targets in tail i
        21 t + 20 n_i of each tail          losses, and which logits are the targets'; 4 for each cluster

    Args:
        model: its shape.
        batch: what goes through it.
        checkpoint_activations: as the option.
        offload_activations: likewise.
        in_clusters: how many targets are in each cluster; None for `tokens_in_clusters`.
    """
    batch_size, length, tp, itemsize, mask = batch
    num_read = length + model.ext_len
    num_keys = model.mem_len + num_read
    num_targets, n, c = batch_size * length, batch_size * num_read, batch_size * num_keys
    d_model = model.d_model * itemsize
    remembered = (c if model.mem_len > length else n) * d_model
    if offload_activations:
        layers = num_read * num_keys * itemsize
    elif checkpoint_activations:
        times = 2 if model.mem_len > length else 1
        layers = model.n_layer * (n * d_model + times * remembered) + num_read * num_keys * itemsize
    else:
        layers = model.n_layer * (layer_activation_bytes(model, batch) + remembered)
    is_projected = model.div_val > 1 or model.embedding_dims[0] != model.d_model
    num_tails = len(model.cluster_bounds) - 1
    is_copied = model.ext_len > 0 and batch_size > 1
    around = (num_keys + 1) * d_model + num_tails * n + (num_targets if is_copied else n) * d_model
    around += TOKEN_BYTES * n * (num_tails + 1)
    if is_projected:
        around += n * sum(model.embedding_dims) * itemsize
    if model.dropout:
        around += 2 * n * model.d_model * mask
    softmax = float(FLOAT32_BYTES * num_targets * num_tails + 21 * num_targets + FLOAT32_BYTES * (num_tails + 1))
    targets = [num_targets, *(in_clusters or tokens_in_clusters(model, num_targets))[1:]]
    for index, ((start, end), dim, count) in enumerate(
        zip(model.cluster_bounds, model.embedding_dims, targets, strict=True)
    ):
        if index > 0:
            softmax += count * (d_model + 20)
        if is_projected:
            softmax += count * dim * itemsize
        softmax += count * shard_bounds(end - start, tp, 0)[1] * FLOAT32_BYTES
    return layers + around + math.ceil(softmax)


def host_bytes(model: TransformerXLConfig, batch: Batch) -> int:
    """What `--offload-activations` keeps on the host: of each layer its input, n E s, and two memories, 2 B M E s."""
    rows = batch.batch_size * (batch.length + model.ext_len + 2 * model.mem_len)
    return model.n_layer * rows * model.d_model * batch.itemsize


def softmax_backward_bytes(model: TransformerXLConfig, batch: Batch) -> int:
    """What the softmax's backward pass needs at once, beside gradients of parameters.

    Of the cluster for which it is largest 8 n_i V_i, gradients of its logits and of what they are after the softmax,
    or 16 n_i V_i / tp where it is split, exponentials too; and 4 n E s, gradients of the output.
    """
    num_targets, n = batch.batch_size * batch.length, batch.batch_size * (batch.length + model.ext_len)
    counts = [num_targets, *tokens_in_clusters(model, num_targets)[1:]]
    logits = max(
        count * shard_bounds(end - start, batch.tp, 0)[1]
        for (start, end), count in zip(model.cluster_bounds, counts, strict=True)
    )
    times = 2 if batch.tp == 1 else 4
    return math.ceil(times * FLOAT32_BYTES * logits) + 4 * n * model.d_model * batch.itemsize


def waiting_gradient_bytes(model: TransformerXLConfig, batch: Batch) -> int:
    """The softmax's gradients of matrices that are the embedding's too: they wait for its own, the last of all."""
    if model.not_tied:
        return 0
    rows = [shard_bounds(end - start, batch.tp, 0)[1] for start, end in model.cluster_bounds]
    return sum(count * dim for count, dim in zip(rows, model.embedding_dims, strict=True)) * batch.itemsize


def layer_backward_bytes(model: TransformerXLConfig, batch: Batch) -> int:
    """What one layer's backward pass needs at once, beside gradients of parameters.

    The larger of 3 h n K s / tp, gradients of attention weights, scores and scores by distance, and of 2 n F s / tp,
    those of the feed-forward layer's activation on both sides.
    """
    num_read = batch.length + model.ext_len
    n = batch.batch_size * num_read
    attention = 3 * (model.n_head // batch.tp) * n * (model.mem_len + num_read)
    return max(attention, 2 * n * model.d_inner // batch.tp) * batch.itemsize


def tp_all_reduces(
    model: TransformerXLConfig,
    *,
    batch_size: int,
    length: int,
    checkpoint_activations: bool,
    in_clusters: Sequence[float] | None = None,
) -> list[float]:
    """Elements of each all-reduce over tp that a batch makes.

    Those of a few numbers a token are left out.

        embedding       n E_i for each cluster
        layers          2 L of n E, and backward L of n E (fc1) and L of c E (attention); 2 L more of n E to compute
                        activations again under `--checkpoint-activations`, L with --pre-lnorm
        softmax         backward t E_0, and n_i E_i for each tail
    """
    num_targets, num_read = batch_size * length, length + model.ext_len
    n, c = batch_size * num_read, batch_size * (model.mem_len + num_read)
    again = (1 if model.pre_lnorm else 2) if checkpoint_activations else 0
    targets = [num_targets, *(in_clusters or tokens_in_clusters(model, num_targets))[1:]]
    return [
        *(n * dim for dim in model.embedding_dims),
        *[n * model.d_model] * (model.n_layer * (3 + again)),
        *[c * model.d_model] * model.n_layer,
        *(count * dim for count, dim in zip(targets, model.embedding_dims, strict=True)),
    ]


def evaluation_flops(
    model: TransformerXLConfig, *, batch_size: int, length: int, in_clusters: Sequence[float] | None = None
) -> float:
    """Operations of matrix products to score a chunk of each row.

    The memory is full, and holds keys and values.

        L 2 n (4 E W + 2 E F)               projections of the chunk and what is read again alone
        L 2 n W (3 K + 1)                   scores by content and by distance, and sums of values
        sum of 2 n E E_i                    embedding, where clusters are projected
        2 t (E E_0 + E_0 (V_0 + tails))     the shortlist, its first term where clusters are projected
        2 n_i (E E_i + E_i V_i)             the n_i targets in tail i, likewise
    """
    num_targets, n, num_keys = (
        batch_size * length,
        batch_size * (length + model.ext_len),
        model.mem_len + length + model.ext_len,
    )
    width, d_model = model.n_head * model.d_head, model.d_model
    dims, bounds = model.embedding_dims, model.cluster_bounds
    is_projected = model.div_val > 1 or dims[0] != d_model
    layer = 2 * n * (4 * d_model * width + 2 * d_model * model.d_inner) + 2 * n * width * (3 * num_keys + 1)
    total = float(model.n_layer * layer)
    if is_projected:
        total += 2 * n * d_model * sum(dims)
    targets = [num_targets, *(in_clusters or tokens_in_clusters(model, num_targets))[1:]]
    for index, ((start, end), dim, count) in enumerate(zip(bounds, dims, targets, strict=True)):
        num_logits = end - start + (len(bounds) - 1 if index == 0 else 0)
        total += 2 * count * dim * (num_logits + (d_model if is_projected else 0))
    return total


def evaluation_activation_bytes(model: TransformerXLConfig, batch: Batch) -> int:
    """What there is at once, at most, when chunks are scored.

    The memory is full, and holds keys and values.

        4 L c W s / tp          keys and values of all layers, those of the last chunk and those of this one
        L (K + 1) W s / tp      position keys
        the largest of
            3 h n K s / tp + (5 n + 2 c) W s / tp + 3 n E s     attention: scores by distance, scores, weights
            4 t V_0 / tp + the largest 8 n_i V_i / tp           logits of the shortlist, of a cluster, after the softmax
            12 t V_0                                            those of the shortlist beside tails, where not split
    """
    batch_size, length, tp, itemsize, _ = batch
    num_targets, n, num_keys = (
        batch_size * length,
        batch_size * (length + model.ext_len),
        model.mem_len + length + model.ext_len,
    )
    c = batch_size * num_keys
    width = model.n_head * model.d_head // tp * itemsize
    remembered = 4 * model.n_layer * c * width + model.n_layer * (num_keys + 1) * width
    attention = 3 * (model.n_head // tp) * n * num_keys * itemsize
    attention += (5 * n + 2 * c) * width + 3 * n * model.d_model * itemsize
    types = [shard_bounds(end - start, tp, 0)[1] for start, end in model.cluster_bounds]
    tails = [count * rows for count, rows in zip(tokens_in_clusters(model, num_targets)[1:], types[1:], strict=True)]
    first = (3 if tails and tp == 1 else 2) * num_targets * types[0]
    logits = FLOAT32_BYTES * max([first, *(num_targets * types[0] + 2 * elements for elements in tails)])
    return remembered + max(attention, math.ceil(logits))
