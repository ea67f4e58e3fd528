"""A split Transformer-XL is the whole one: losses, memory and gradients, whatever the ranks do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmtools.checkpoints.models import initializer, new_model, split_model
from lmtools.models.architectures import transformer_xl
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import make_mesh
from lmtools.parallel.parallelize import materialize, seeded_values, without_memory
from lmtools.parallel.plans import TRANSFORMER_XL, split_of, unused_patterns
from tests.support.ranks import run_ranks

SHAPE = {"n_layer": 2, "d_model": 8, "n_head": 4, "d_head": 3, "d_inner": 12, "cutoffs": (7, 14), "mem_len": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrowing": {"div_val": 2},
    "shared biases": {"untie_r": False, "pre_lnorm": True, "d_embed": 4, "same_length": True},
    "one cluster": {"cutoffs": ()},
    "nothing shared": {"div_val": 2, "not_tied": True, "proj_share_all_but_first": False},
}
CPU = torch.device("cpu")


def build(tp: int, options: dict[str, Any]) -> TransformerXL:
    config = transformer_xl(29, **(SHAPE | options))
    with without_memory():
        model = new_model(config)
    split_model(model, make_mesh(CPU, dp=1, tp=tp))

    def nonzero_everywhere(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        initializer(config)(name, tensor, generator)
        tensor.add_(torch.empty_like(tensor).normal_(0, 0.3, generator=generator))

    materialize(model, seeded_values(model, nonzero_everywhere, seed=3), device=CPU, dtype=torch.float64)
    assert isinstance(model, TransformerXL)
    return model


def two_segments(tp: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model = build(tp, options)
    tokens = torch.randint(0, 29, (2, 9), generator=torch.Generator().manual_seed(5))
    memories = None
    losses = []
    for start in (0, 4):
        targets = tokens[:, start + 1 : start + 5]
        if start:
            targets = targets.clamp(max=4)  # the tails have no target
        nll, memories = model(tokens[:, start : start + 4], targets, memories)
        losses.append(nll)
    torch.cat(losses).sum().backward()
    found = {
        "nll": torch.cat(losses).detach(),
        "log_probs": model.adaptive_softmax.log_probs(model.features(tokens)[0]),
    }
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[f"{name} grad"] = parameter.grad
    with torch.no_grad():
        found["remembered"], memories = model(tokens[:, :4], tokens[:, 1:5], None, keep_projections=True)
        found["then"], _ = model(tokens[:, 4:8], tokens[:, 5:], memories, keep_projections=True)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in found.items()
    }


def all_variants(tp: int) -> dict[str, dict[str, Tensor]]:
    return {variant: two_segments(tp, options) for variant, options in VARIANTS.items()}


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_equals_whole(tp):
    """Clusters of 7, 7 and 15 types: no number of ranks divides them."""
    whole = all_variants(1)
    for rank in run_ranks(tp, all_variants, tp, timeout_seconds=120):
        for variant, found in rank.items():
            assert found.keys() == whole[variant].keys()
            for name, value in whole[variant].items():
                torch.testing.assert_close(
                    found[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, n=name, v=variant: f"{v} {n}: {text}"
                )


def parts(_: int) -> dict[str, tuple[int, ...]]:
    model = build(2, {"div_val": 2})
    return {
        name: tuple(parameter.to_local().shape)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }


def test_what_a_rank_holds():
    first, second = run_ranks(2, parts, 0)
    assert first["layers.0.self_attn.r_w_bias.bias"] == (2, 3)
    assert first["layers.1.self_attn.r_proj.weight"] == (6, 8)
    assert (first["embed_tokens.clusters.0.weight"], second["embed_tokens.clusters.0.weight"]) == ((4, 8), (3, 8))
    assert (first["adaptive_softmax.clusters.2.bias"], second["adaptive_softmax.clusters.2.bias"]) == ((8,), (7,))


def test_every_parameter_matches_one_row_of_the_plan_and_no_row_is_dead():
    with without_memory():
        model = new_model(transformer_xl(29, **(SHAPE | VARIANTS["nothing shared"])))
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        split_of(name, TRANSFORMER_XL)
    assert unused_patterns(names, TRANSFORMER_XL) == []
