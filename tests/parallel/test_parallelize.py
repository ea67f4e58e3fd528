"""A split model is the whole model: values, loss and gradients, also where the ranks do not divide the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lmtools.models.architectures import transformer_lm
from lmtools.models.transformer_lm import TransformerLM, initialize_parameter
from lmtools.parallel.mesh import make_mesh
from lmtools.parallel.parallelize import local_slices, materialize, parallelize, seeded_values
from lmtools.parallel.plans import TRANSFORMER_LM, TRANSFORMER_LM_SEQUENCE, TRANSFORMER_LM_SHARED_INPUT
from tests.support.ranks import run_ranks

VOCAB_SIZE = 37  # a prime: no number of ranks divides it


def build(tp_size: int, *, tied: bool, pre_norm: bool, sequence_parallel: bool = False) -> TransformerLM:
    config = transformer_lm(
        VOCAB_SIZE,
        decoder_layers=2,
        decoder_embed_dim=16,
        decoder_ffn_embed_dim=20,
        decoder_attention_heads=4,
        share_decoder_input_output_embed=tied,
        decoder_normalize_before=pre_norm,
        activation_fn="gelu" if pre_norm else "relu",
        dropout=0.0,
    )
    with torch.device("meta"):
        model = TransformerLM(config)
    if tp_size > 1:
        mesh = make_mesh(torch.device("cpu"), dp=1, tp=tp_size).tp_mesh
        assert mesh is not None
        parallelize(
            model,
            TRANSFORMER_LM,
            mesh,
            shared_input=TRANSFORMER_LM_SHARED_INPUT,
            sequence_plan=TRANSFORMER_LM_SEQUENCE if sequence_parallel else None,
        )

    def nonzero_everywhere(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        initialize_parameter(name, tensor, generator)
        tensor.add_(torch.empty_like(tensor).normal_(0, 0.1, generator=generator))  # biases and norms too

    materialize(
        model, seeded_values(model, nonzero_everywhere, seed=3), device=torch.device("cpu"), dtype=torch.float64
    )
    return model


def loss_and_gradients(tp_size: int, tied: bool, pre_norm: bool, sequence_parallel: bool = False) -> dict[str, Tensor]:
    model = build(tp_size, tied=tied, pre_norm=pre_norm, sequence_parallel=sequence_parallel)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB_SIZE, (3, 8), generator=generator)
    targets = torch.randint(0, VOCAB_SIZE, (24,), generator=generator)
    logits = model(tokens).flatten(0, 1)
    if tp_size > 1:
        assert isinstance(logits, DTensor)
        assert logits.to_local().shape[1] < VOCAB_SIZE, "the logits are never gathered"
        with loss_parallel():
            loss = F.cross_entropy(logits, targets)
            loss.backward()
    else:
        loss = F.cross_entropy(logits, targets)
        loss.backward()
    result = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = parameter.detach()
        result[f"{name} grad"] = parameter.grad
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in result.items()}


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tied", "pre_norm"), [(True, True), (False, False)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_equals_whole(tp_size, tied, pre_norm, sequence_parallel):
    whole = loss_and_gradients(1, tied, pre_norm)
    for split in run_ranks(tp_size, loss_and_gradients, tp_size, tied, pre_norm, sequence_parallel):
        assert split.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(
                split[name], value, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}"
            )


def pieces_of_every_parameter(tp_size: int) -> dict[str, tuple[slice, ...]]:
    model = build(tp_size, tied=True, pre_norm=True)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        slices = local_slices(parameter, parameter.shape)
        assert tuple(s.stop - s.start for s in slices) == tuple(local.shape), name
    assert model.output_projection.weight is model.embed_tokens.weight, "splitting kept the tie"
    return {name: local_slices(parameter, parameter.shape) for name, parameter in model.named_parameters()}


def test_the_pieces_of_all_ranks_are_the_whole():
    ranks = run_ranks(3, pieces_of_every_parameter, 3)
    embedding = [rank["embed_tokens.weight"][0] for rank in ranks]
    assert [(piece.start, piece.stop) for piece in embedding] == [(0, 13), (13, 26), (26, 37)]
    assert all(rank["layers.0.fc2.bias"] == (slice(0, 16),) for rank in ranks)
