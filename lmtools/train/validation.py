"""Validation loss: every token of a split once, over all replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.data.batches import deal_out
from lmtools.evaluate.perplexity import nats_to_bits, perplexity_of_bits
from lmtools.parallel.mesh import Mesh
from lmtools.train.batch import make_batch
from lmtools.train.config import TrainConfig
from lmtools.train.data import Blocks, validation_batches
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
def validate(model: nn.Module, blocks: Blocks, config: TrainConfig, mesh: Mesh, *, eos_index: int) -> Validation:
    """Score a split with the model as it is. Every rank must call it, and each gets the result."""
    model.eval()
    total_nats = 0.0
    num_tokens = 0
    multiple = config.mp if config.sequence_parallel else 1
    for step in deal_out(validation_batches(blocks, config), mesh.dp_size):
        batch = make_batch(blocks.tokens, blocks.spans, step[mesh.dp_rank], eos_index=eos_index, multiple=multiple)
        with loss_parallel():
            loss = loss_sum(model, batch, mesh.device)
        total_nats += float((loss.full_tensor() if isinstance(loss, DTensor) else loss).double())
        num_tokens += batch.num_tokens
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # which a forward pass leaves to the backward pass to come
    summed_nats, summed_tokens = sum_over_ranks([total_nats, num_tokens], mesh)
    # The ranks of a tp group hold the same sums; dividing by their number counts them once.
    nats, tokens = summed_nats / mesh.tp_size, round(summed_tokens / mesh.tp_size)
    return Validation(blocks.name, nats, tokens, blocks.original.tokens if blocks.original is not None else None)


def _perplexity(bits: float) -> float:
    return perplexity_of_bits(bits) if bits < 1024 else math.inf
