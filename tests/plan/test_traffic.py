"""Collectives that are planned against those that a real batch makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from lmtools.models.architectures import TransformerLMConfig
from lmtools.plan.memory import num_elements, parameter_shapes
from lmtools.plan.traffic import Traffic, tp_collectives, training_traffic
from lmtools.train.batch import Batch
from lmtools.train.step import loss_sum
from tests.support.ranks import run_ranks
from tests.support.training import cpu_mesh, state_of_noise, tiny_run

SHAPE: dict[str, Any] = {"decoder_layers": 3, "tokens_per_sample": 32, "batch_size": 4}
KINDS = {
    "_c10d_functional.all_reduce.default": "all-reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all-gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce-scatter",
    "c10d._allgather_base_.default": "all-gather",
    "c10d._reduce_scatter_base_.default": "reduce-scatter",
}


class Collectives(TorchDispatchMode):
    """Counts the collectives of activations, `(B, T, E)` in full or in part, or of flat parameters."""

    def __init__(self, num_dims: int) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self._num_dims = num_dims

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        kind = KINDS.get(str(function))
        tensors = [value for value in args if isinstance(value, Tensor)]
        if kind is not None and tensors[0].dim() == self._num_dims:
            self.counts[kind] += 1
            self.elements[kind] += max(tensor.numel() for tensor in tensors)
        return outputs


def collectives_of_a_batch(flags: dict[str, Any], num_dims: int) -> tuple[dict[str, int], dict[str, int]]:
    run = tiny_run(**SHAPE, **flags)
    mesh = cpu_mesh(run)
    state = state_of_noise(run, mesh, vocab_size=144, dtype=torch.float32)
    tokens = torch.full((4, 32), 5)
    with Collectives(num_dims) as seen, loss_parallel():
        loss_sum(state.model, Batch(None, tokens, tokens, 128), mesh.device)[0].backward()  # type: ignore[arg-type, no-untyped-call]
    return dict(seen.counts), dict(seen.elements)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("checkpoint_activations", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_batch_makes_the_planned_collectives(sequence_parallel, checkpoint_activations):
    flags = {"sequence_parallel": sequence_parallel, "checkpoint_activations": checkpoint_activations}
    [(counts, _), *_] = run_ranks(2, collectives_of_a_batch, {"mp": 2, **flags}, 3)
    assert counts == tp_collectives(3, **flags)


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_gathers_weights_and_scatters_gradients(zero):
    [(_, elements), *_] = run_ranks(2, collectives_of_a_batch, {"dp": 2, "zero": zero}, 1)
    run = tiny_run(**SHAPE, dp=2, zero=zero)
    model = TransformerLMConfig(vocab_size=144, **run.model)
    planned = {row.kind: row.message_bytes // 4 for row in training_traffic(run.train, model, batch_size=4)}
    assert elements == pytest.approx(planned, rel=0.01)


def test_on_a_ring():
    """A rank sends twice a message's share of the others for an all-reduce."""
    run = tiny_run(**SHAPE, mp=4, dp=2, update_freq=3)
    model = TransformerLMConfig(vocab_size=144, **run.model)
    gradients = num_elements(parameter_shapes(model))
    tp, dp = training_traffic(run.train, model, batch_size=4)
    count = 3 * (1 + 4 * 3 + 1)
    message = 4 * 32 * 16 * 4
    assert tp == Traffic("all-reduce", "tp", count, count * message, count * message * 2 * 3 // 4)
    assert (dp.kind, dp.axis, dp.count) == ("all-reduce", "dp", 1)
    assert gradients / 4 < dp.message_bytes / 4 < gradients / 2, "a tp rank's share, and what is replicated"
    assert dp.sent_bytes == dp.message_bytes, "2 * (2 - 1) / 2"


def test_one_process_sends_nothing():
    run = tiny_run(**SHAPE)
    assert training_traffic(run.train, TransformerLMConfig(vocab_size=144, **run.model), batch_size=4) == []
