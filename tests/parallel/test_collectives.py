"""What the ranks of a split model say to each other: so many collectives in a step, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.checkpoints.models import Model, initializer, new_model, split_model
from lmtools.models.architectures import ModelConfig, transformer_lm, transformer_xl
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import make_mesh
from lmtools.parallel.parallelize import materialize, seeded_values, without_memory
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
VOCAB_SIZE = 32
Counts = dict[str, int]


def of_transformer_lm(num_layers: int) -> ModelConfig:
    shape = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 4}
    return transformer_lm(VOCAB_SIZE, decoder_layers=num_layers, **shape)


def of_transformer_xl(num_layers: int) -> ModelConfig:
    shape = {"d_model": 16, "n_head": 4, "d_head": 4, "d_inner": 32, "mem_len": 8}
    return transformer_xl(VOCAB_SIZE, n_layer=num_layers, cutoffs=(), **shape)


def build(config: ModelConfig, *, sequence_parallel: bool) -> Model:
    with without_memory():
        model = new_model(config)
    split_model(model, make_mesh(CPU, dp=1, tp=2), for_training=True, sequence_parallel=sequence_parallel)
    materialize(model, seeded_values(model, initializer(config), seed=1), device=CPU, dtype=torch.float32)
    return model


@contextmanager
def counted(counts: Counts) -> Iterator[None]:
    with CommDebugMode() as mode:
        mode.advanced_module_tracker.__exit__()  # it gets lost where a module is called twice, as dropout in a block
        yield
    for operation, number in mode.get_comm_counts().items():
        name = str(operation).partition(".")[2].strip("_").replace("allreduce", "all_reduce")
        counts[name] = counts.get(name, 0) + number


def collectives_of_a_step(config: ModelConfig, sequence_parallel: bool) -> tuple[Counts, Counts, Counts]:
    """In forward and backward of training, and in the forward of an evaluation."""
    model = build(config, sequence_parallel=sequence_parallel)
    tokens = torch.randint(2, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(5))
    memories = None
    if isinstance(model, TransformerXL):
        with torch.no_grad():
            _, memories = model(tokens, tokens)

    def loss() -> torch.Tensor:
        if isinstance(model, TransformerXL):
            nll, _ = model(tokens, tokens, memories)
            return nll.sum()
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")

    forward: Counts = {}
    backward: Counts = {}
    evaluation: Counts = {}
    with loss_parallel():
        with counted(forward):
            value = loss()
        with counted(backward):
            value.backward()
        with counted(evaluation), torch.no_grad():
            loss()
    return forward, backward, evaluation


def every_model(num_layers: int) -> dict[str, tuple[Counts, Counts, Counts]]:
    return {
        "transformer_lm": collectives_of_a_step(of_transformer_lm(num_layers), False),
        "transformer_lm, split sequence": collectives_of_a_step(of_transformer_lm(num_layers), True),
        "transformer_xl": collectives_of_a_step(of_transformer_xl(num_layers), False),
    }


@cache
def on_two_ranks(num_layers: int) -> list[dict[str, tuple[Counts, Counts, Counts]]]:
    return run_ranks(2, every_model, num_layers)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("model", ["transformer_lm", "transformer_xl"])
def test_a_layer_sums_twice_forward_and_twice_backward(model: str, num_layers: int):
    """Forward: the outputs of attention and feed-forward; backward: the gradients of the inputs of both.

    Besides, forward: the embedding, and of the softmax the highest logit, the normalizer and the target's logit, one
    number a token each; backward: the output projection.
    """
    for rank in on_two_ranks(num_layers):
        forward, backward, evaluation = rank[model]
        assert forward == evaluation == {"all_reduce": 2 * num_layers + 1 + 3}
        assert backward == {"all_reduce": 2 * num_layers + 1}


@pytest.mark.parametrize("num_layers", [1, 3])
def test_with_a_split_sequence_each_sum_is_a_scatter_and_a_gather(num_layers: int):
    """Which move as many bytes as the sum. The gradient of what enters the split part is gathered at its end."""
    for rank in on_two_ranks(num_layers):
        forward, backward, evaluation = rank["transformer_lm, split sequence"]
        in_layers = 2 * num_layers
        assert forward == evaluation
        assert forward == {
            "all_reduce": 1 + 3,
            "reduce_scatter_tensor": in_layers,
            "all_gather_into_tensor": in_layers + 1,
        }
        assert backward == {"reduce_scatter_tensor": in_layers + 1, "all_gather_into_tensor": in_layers + 1}
