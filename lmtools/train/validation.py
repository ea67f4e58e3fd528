"""Validation loss: every token of a split once, over all replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.data.batches import deal_out
from lmtools.data.streams import IGNORED
from lmtools.evaluate.perplexity import nats_to_bits, perplexity_of_bits
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import Mesh
from lmtools.train.batch import Batch, make_batch, make_stream_batch
from lmtools.train.config import TrainConfig
from lmtools.train.data import Blocks, cut_blocks_for_validation, validation_batches
from lmtools.train.memory import Memories, first_memories
from lmtools.train.signals import StopSignal
from lmtools.train.step import loss_sum, sum_over_ranks


@dataclass(frozen=True)
class Validation:
    """The loss of one split.

    Attributes:
        subset: its name.
        total_nats: summed over its tokens.
        num_tokens: how many were scored: all of them.
        num_words: tokens of the original text, where that is known.
    """

    subset: str
    total_nats: float
    num_tokens: int
    num_words: int | None

    @property
    def loss_base2(self) -> float:
        """Bits per token."""
        return nats_to_bits(self.total_nats / self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Per token; infinite for a model that has diverged."""
        return _perplexity(self.loss_base2)

    @property
    def word_perplexity(self) -> float | None:
        """Per token of the original text, where its counts are known; infinite for a model that has diverged."""
        if self.num_words is None:
            return None
        return _perplexity(nats_to_bits(self.total_nats) / self.num_words)


@torch.no_grad()
def validate(
    model: nn.Module, blocks: Blocks, config: TrainConfig, mesh: Mesh, stop: StopSignal, *, eos_index: int
) -> Validation | None:
    """Score a split with the model as it is. Every rank must call it, and each gets the result.

    Args:
        model: split or whole; it is in training mode again afterwards.
        blocks: the split.
        config: the run.
        mesh: where we are.
        stop: tells of a signal that asks to save and end.
        eos_index: stands before the stream's first token.

    Returns:
        None if a rank has received such a signal before the end.
    """
    model.eval()
    is_stopped = False
    total_nats = 0.0
    num_tokens = 0
    memories: Memories = None  # of this split alone
    ext_len = model.config.ext_len if isinstance(model, TransformerXL) else 0
    for number, batch in enumerate(_batches(blocks, config, mesh, eos_index, ext_len)):
        if number == 0:
            memories = first_memories(model, config, len(batch.tokens), mesh.device)
        with loss_parallel():
            loss, memories = loss_sum(model, batch, mesh.device, memories)
        total_nats += float((loss.full_tensor() if isinstance(loss, DTensor) else loss).double())
        num_tokens += int((batch.targets != IGNORED).sum())
        [num_stopped] = sum_over_ranks([bool(stop.received)], mesh)
        is_stopped = num_stopped > 0
        if is_stopped:
            break
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # which a forward pass leaves to the backward pass to come
    if is_stopped:
        return None
    summed_nats, summed_tokens = sum_over_ranks([total_nats, num_tokens], mesh)
    # The ranks of a tp group hold the same sums; dividing by their number counts them once.
    nats, tokens = summed_nats / mesh.tp_size, round(summed_tokens / mesh.tp_size)
    return Validation(blocks.name, nats, tokens, blocks.original.tokens if blocks.original is not None else None)


def _batches(blocks: Blocks, config: TrainConfig, mesh: Mesh, eos_index: int, ext_len: int) -> Iterator[Batch]:
    """This rank's, as many as every other rank's."""
    if config.task == "truncated_bptt_lm":
        streams = cut_blocks_for_validation(blocks, config)
        num_rows = streams.num_rows // mesh.dp_size
        rows = slice(mesh.dp_rank * num_rows, (mesh.dp_rank + 1) * num_rows)
        for step in range(streams.num_steps):
            ids = streams.chunk_ids(step, rows)
            yield make_stream_batch(blocks.tokens, streams, ids, eos_index=eos_index, ext_len=ext_len)
        return
    multiple = config.mp if config.sequence_parallel else 1
    for step_ids in deal_out(validation_batches(blocks, config), mesh.dp_size):
        ids = step_ids[mesh.dp_rank]
        yield make_batch(blocks.tokens, blocks.spans, ids, eos_index=eos_index, multiple=multiple)


def _perplexity(bits: float) -> float:
    return perplexity_of_bits(bits) if bits < 1024 else math.inf
