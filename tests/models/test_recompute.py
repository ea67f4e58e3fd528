"""Layers that are computed again in the backward pass, their inputs kept on the device or on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtools.models.architectures import TransformerLMConfig, transformer_xl
from lmtools.models.recompute import on_host, recomputed
from lmtools.models.transformer_lm import TransformerLM
from lmtools.models.transformer_xl import TransformerXL

DROPOUT = {"dropout": 0.2, "dropatt": 0.2}
XL = {"n_layer": 3, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "cutoffs": (5, 8), "div_val": 2, **DROPOUT}
LM = TransformerLMConfig(
    vocab_size=13,
    decoder_layers=3,
    decoder_embed_dim=8,
    decoder_ffn_embed_dim=12,
    decoder_attention_heads=2,
    max_target_positions=16,
    dropout=0.2,
    attention_dropout=0.2,
)
TOKENS = torch.randint(0, 13, (2, 16), generator=torch.Generator().manual_seed(2))


def transformer_lm_gradients(**kept: bool) -> list[Tensor]:
    return gradients(TransformerLM(LM), lambda model: model(TOKENS).square().sum(), kept)


def transformer_xl_gradients(options: dict[str, Any], **kept: bool) -> list[Tensor]:
    """Of four segments, each with the memory that the ones before left."""

    def loss(model: nn.Module) -> Tensor:
        total, memories = torch.zeros(()), None
        for tokens in TOKENS.split(4, dim=1):
            nll, memories = model(tokens, tokens, memories)
            total = total + nll.sum()
        return total

    return gradients(TransformerXL(transformer_xl(13, **(XL | options))), loss, kept)


def gradients(model: Any, loss: Callable[[nn.Module], Tensor], kept: dict[str, bool]) -> list[Tensor]:
    """The loss, and each parameter's gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    for name, value in kept.items():
        setattr(model, name, value)
    torch.manual_seed(3)
    total = loss(model.train())
    total.backward()
    return [total.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_bit_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 10
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("offload_activations", [False, True])
def test_a_transformer_learns_the_same_to_the_bit(offload_activations):
    again = transformer_lm_gradients(checkpoint_activations=True, offload_activations=offload_activations)
    assert_bit_equal(again, transformer_lm_gradients())


@pytest.mark.parametrize("offload_activations", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"mem_len": 4},
        {"mem_len": 6, "same_length": True},
        {"mem_len": 2, "ext_len": 1},
        {"mem_len": 0},
        {"pre_lnorm": True},
    ],
    ids=str,
)
def test_a_transformer_xl_learns_the_same_from_its_memory_to_the_bit(options, offload_activations):
    again = transformer_xl_gradients(options, checkpoint_activations=True, offload_activations=offload_activations)
    assert_bit_equal(again, transformer_xl_gradients(options))


def passed_twice(*, offload: bool) -> tuple[int, bool]:
    """How often a layer runs until its gradient is there, and whether its input lived on after the forward pass."""
    calls = 0

    def layer(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.square().exp()

    weight = torch.ones(5, requires_grad=True)
    x = weight + 1  # no leaf: an addition keeps nothing of its result
    output = recomputed(layer, x, offload=offload)
    is_there = weakref.ref(x.untyped_storage())
    del x
    lived_on = is_there() is not None
    output.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((5,), 4 * torch.e**4))
    return calls, lived_on


def test_of_what_is_offloaded_a_copy_is_kept_and_not_the_tensor():
    assert passed_twice(offload=False) == (2, True)
    assert passed_twice(offload=True) == (2, False)


@pytest.mark.parametrize("offload_activations", [False, True])
@pytest.mark.parametrize(
    "model", [TransformerLM(LM), TransformerXL(transformer_xl(13, **XL, mem_len=0))], ids=["lm", "xl"]
)
def test_between_the_passes_no_layers_input_is_where_it_was_if_it_is_offloaded(model, offload_activations):
    inputs = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    model.checkpoint_activations, model.offload_activations = True, offload_activations
    # What a Transformer-XL remembers is a view of the inputs, on a CPU: let go of it.
    output = model.train()(TOKENS) if isinstance(model, TransformerLM) else model.train()(TOKENS, TOKENS)[0]
    assert [storage() is None for storage in inputs] == [offload_activations] * 3
    del output


def test_what_is_on_the_host_stays_as_it_is():
    assert on_host(TOKENS) is TOKENS
