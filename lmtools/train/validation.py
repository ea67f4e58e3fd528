"""Validation loss: every token of a split once, over all replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.data.batches import deal_out
from lmtools.evaluate.perplexity import nats_to_bits, perplexity_of_bits, word_perplexity
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
        word_perplexity: per token of the original text, where its counts are known.
    """

    subset: str
    total_nats: float
    num_tokens: int
    word_perplexity: float | None

    @property
    def loss_base2(self) -> float:
        """Bits per token."""
        return nats_to_bits(self.total_nats / self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Per token; infinite for a model that has diverged."""
        return perplexity_of_bits(self.loss_base2) if self.loss_base2 < 1024 else math.inf


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
    summed_nats, summed_tokens = sum_over_ranks([total_nats, num_tokens], mesh)
    # The ranks of a tp group hold the same sums; dividing by their number counts them once.
    nats, tokens = summed_nats / mesh.tp_size, round(summed_tokens / mesh.tp_size)
    original = blocks.original
    known = original is not None and math.isfinite(nats)
    renormalized = word_perplexity(nats, original.tokens) if known and original is not None else None
    return Validation(blocks.name, nats, tokens, renormalized)
