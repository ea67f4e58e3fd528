"""The model alone: its definition, memory in and out, published size, initial values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmtools.checkpoints.transformer_xl_names import parameter_sources
from lmtools.checkpoints.unpickle import read_torch_file
from lmtools.errors import ConfigError
from lmtools.models.architectures import TransformerXLConfig, transformer_xl
from lmtools.models.relative_attention import attention_mask, relative_positions
from lmtools.models.transformer_xl import (
    Layer,
    LayerMemory,
    TransformerXL,
    initialize_parameter,
    reorder,
    zero_memories,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamped": {"clamp_len": 3},
    "same length": {"mem_len": 5, "same_length": True},
    "pre-norm": {"pre_lnorm": True},
    "shared biases": {"untie_r": False, "clamp_len": 2},
    "narrowing": {"div_val": 2},
}


def small_model(**overrides: Any) -> TransformerXL:
    shape = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 3, "d_inner": 12, "cutoffs": (5, 8), "mem_len": 20}
    model = TransformerXL(transformer_xl(13, **(shape | overrides))).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def some_tokens(batch_size: int, length: int) -> Tensor:
    return torch.randint(0, 13, (batch_size, length), generator=torch.Generator().manual_seed(2))


def some_inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def run_segments(
    model: TransformerXL, segments: Sequence[Tensor], *, keep_projections: bool, memories: Any = None
) -> tuple[Tensor, list[LayerMemory]]:
    """The features of segments that follow each other."""
    features = []
    for tokens in segments:
        of_segment, memories = model.features(tokens, memories, keep_projections=keep_projections)
        features.append(of_segment)
    return torch.cat(features, dim=1), memories


def slow_reference(model: TransformerXL, tokens: Tensor, context: list[Tensor]) -> Tensor:
    """Dai et al. 2019, section 3.3, position by position and head by head.

    One row of tokens; `context` has each layer's inputs at the positions before.
    """
    config = model.config
    frequencies = [10000 ** (-2 * i / config.d_model) for i in range(config.d_model // 2)]

    def relative(distance: int) -> Tensor:
        if config.clamp_len > 0:
            distance = min(distance, config.clamp_len)
        waves = [math.sin(distance * f) for f in frequencies] + [math.cos(distance * f) for f in frequencies]
        return torch.tensor(waves, dtype=torch.float64)

    h = model.embed_tokens(tokens)
    for layer, remembered in zip(model.layers, context, strict=True):
        attention = layer.self_attn
        norm, last_norm = layer.self_attn_layer_norm, layer.final_layer_norm
        everything = torch.cat([remembered, h])
        keyed = norm(everything) if config.pre_lnorm else everything
        outputs = []
        for position in range(len(h)):
            i = len(remembered) + position
            heads = []
            for head in range(config.n_head):
                part = slice(head * config.d_head, (head + 1) * config.d_head)
                w_q, w_ke = attention.q_proj.weight[part], attention.k_proj.weight[part]
                w_kr, w_v = attention.r_proj.weight[part], attention.v_proj.weight[part]
                u, v = attention.r_w_bias.bias[head], attention.r_r_bias.bias[head]
                seen = [j for j in range(i + 1) if not config.same_length or i - j < config.mem_len]
                scores = torch.stack(
                    [
                        (w_q @ keyed[i]) @ (w_ke @ keyed[j])  # (a)
                        + (w_q @ keyed[i]) @ (w_kr @ relative(i - j))  # (b)
                        + u @ (w_ke @ keyed[j])  # (c)
                        + v @ (w_kr @ relative(i - j))  # (d)
                        for j in seen
                    ]
                )
                weights = (scores / math.sqrt(config.d_head)).softmax(dim=0)
                heads.append(sum(weight * (w_v @ keyed[j]) for weight, j in zip(weights, seen, strict=True)))
            outputs.append(attention.out_proj(torch.cat(heads)))
        x = h + torch.stack(outputs)
        if not config.pre_lnorm:
            x = norm(x)
        x = x + layer.fc2(torch.relu(layer.fc1(last_norm(x) if config.pre_lnorm else x)))
        h = x if config.pre_lnorm else last_norm(x)
    return h


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_its_definition(variant):
    model = small_model(**VARIANTS[variant])
    tokens = some_tokens(2, 6)
    context = [*some_inputs(2, 2, 4, 8)]
    features, _ = model.features(tokens, context)
    for row in range(2):
        expected = slow_reference(model, tokens[row], [memory[row] for memory in context])
        torch.testing.assert_close(features[row], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_definition(variant):
    model = small_model(**VARIANTS[variant])
    tokens = some_tokens(1, 5)
    context = [*some_inputs(2, 1, 3, 8)]
    weight = some_inputs(5, 8)
    # The softmax takes no part in features, unless its parameters are the embedding's.
    parameters = [parameter for name, parameter in model.named_parameters() if not name.startswith("adaptive")]
    found = torch.autograd.grad((model.features(tokens, context)[0][0] * weight).sum(), parameters)
    reference = slow_reference(model, tokens[0], [memory[0] for memory in context])
    expected = torch.autograd.grad((reference * weight).sum(), parameters)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@settings(deadline=None, max_examples=20)
@given(
    cuts=st.sets(st.integers(1, 11)),
    variant=st.sampled_from(sorted(VARIANTS)),
    keep_projections=st.booleans(),
)
def test_segments_with_memory_equal_one_long_pass(cuts, variant, keep_projections):
    """As long as the memory holds all that is looked at: all, or with same_length the last mem_len."""
    model = small_model(**VARIANTS[variant])
    tokens = some_tokens(2, 12)
    bounds = [0, *sorted(cuts), 12]
    segments = [tokens[:, start:end] for start, end in pairwise(bounds)]
    with torch.no_grad():
        whole, _ = model.features(tokens)
        pieces, _ = run_segments(model, segments, keep_projections=keep_projections)
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("keep_projections", [False, True])
def test_rows_of_a_batch_do_not_meet(variant, keep_projections):
    model = small_model(**VARIANTS[variant])
    tokens = some_tokens(4, 9)
    batch, _ = run_segments(model, tokens.split(3, dim=1), keep_projections=keep_projections)
    for row in range(4):
        alone, _ = run_segments(model, tokens[row : row + 1].split(3, dim=1), keep_projections=keep_projections)
        torch.testing.assert_close(alone[0], batch[row])


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_and_values_are_the_same_memory(variant):
    """Also where it is shorter than what was read, and when it began as vectors."""
    model = small_model(**(VARIANTS[variant] | {"mem_len": 4}))
    memories = zero_memories(model.config, 2, next(model.parameters()))
    segments = some_tokens(2, 11).split(3, dim=1)
    vectors, _ = run_segments(model, segments, keep_projections=False, memories=memories)
    projected, _ = run_segments(model, segments, keep_projections=True, memories=memories)
    torch.testing.assert_close(projected, vectors)


def test_position_keys_are_projected_once():
    model = small_model(mem_len=4)
    calls: list[int] = []
    for layer in model.layers:
        layer.self_attn.r_proj.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    with torch.no_grad():
        run_segments(model, some_tokens(2, 12).split(3, dim=1), keep_projections=True)
    assert calls == [4 + 3 + 1] * model.config.n_layer


def test_a_memory_longer_than_any_text_costs_nothing():
    model = small_model(mem_len=10**9)
    segments = some_tokens(2, 12).split(3, dim=1)
    with torch.no_grad():
        found, memories = run_segments(model, segments, keep_projections=True)
        expected, _ = run_segments(small_model(mem_len=12), segments, keep_projections=True)
    torch.testing.assert_close(found, expected)
    assert all(len(memory.position_keys) < 100 for memory in memories)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_a_later_token(variant):
    model = small_model(**VARIANTS[variant])
    tokens = some_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6] = (tokens[0, 6] + 1) % 13
    before, after = model.features(tokens)[0], model.features(changed)[0]
    assert torch.equal(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


def test_memory_is_the_last_inputs_of_each_layer():
    model = small_model(mem_len=7)
    tokens = some_tokens(2, 10)
    _, first = model.features(tokens[:, :5])
    assert [tuple(memory.shape) for memory in first] == [(2, 5, 8)] * 2
    _, second = model.features(tokens[:, 5:], first)
    torch.testing.assert_close(second[0], model.embed_tokens(tokens[:, 3:]))
    torch.testing.assert_close(second[1][:, :2], first[1][:, 3:])


def test_a_memory_that_lies_in_the_segment_keeps_nothing_from_before_it():
    """A view keeps all that it looks into, and the keys' and values' inputs reach back to the memory."""
    tokens = some_tokens(2, 6)
    for mem_len, positions in ((4, 6), (6, 6), (7, 12)):
        model = small_model(mem_len=mem_len)
        _, memories = model.features(tokens, model.features(tokens)[1])
        sizes = [memory.untyped_storage().nbytes() for memory in memories if isinstance(memory, Tensor)]
        assert sizes == [2 * positions * 8 * 8] * 2, "bytes of 2 rows of 8 float64 numbers"


@pytest.mark.parametrize("keep_projections", [False, True])
def test_without_memory_nothing_is_remembered(keep_projections):
    model = small_model(mem_len=0)
    segments = some_tokens(2, 8).split(4, dim=1)
    features, _ = run_segments(model, segments, keep_projections=keep_projections)
    torch.testing.assert_close(features, torch.cat([model.features(tokens)[0] for tokens in segments], dim=1))


def test_an_extended_context_is_not_remembered():
    """The original's ext_len: segments overlap by it, and no position is remembered twice."""
    model = small_model(mem_len=6, ext_len=2)
    tokens = some_tokens(1, 11)
    _, memories = model.features(tokens[:, :5])
    assert memories[0].shape[1] == 3
    _, memories = model.features(tokens[:, 3:8], memories)
    torch.testing.assert_close(memories[0], model.embed_tokens(tokens[:, :6]))
    _, after_a_short_one = model.features(tokens[:, 6:7], memories)
    torch.testing.assert_close(after_a_short_one[0], memories[0])


def test_keys_and_values_are_no_memory_for_training():
    model = small_model()
    _, memories = model.features(some_tokens(1, 4), keep_projections=True)
    with pytest.raises(ValueError, match="cannot be turned back"):
        model.features(some_tokens(1, 4), memories)


def test_no_gradient_reaches_the_segment_before_but_the_projections_of_its_memory_learn():
    model = small_model().train()
    tokens = some_tokens(1, 8)
    _, memories = model.features(tokens[:, :4])
    assert not any(memory.requires_grad for memory in memories)
    model.features(tokens[:, 4:], memories)[0].sum().backward()
    read_only_now = set(tokens[0, 4:].tolist())
    for index, (start, end) in enumerate(model.config.cluster_bounds):
        gradient = model.embed_tokens.clusters[index].weight.grad
        touched = {start + row for row in gradient.abs().sum(dim=1).nonzero().flatten().tolist()}
        assert touched <= read_only_now & set(range(start, end))

    key_gradient = model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()
    model.features(tokens[:, 4:], [memory * 1.5 for memory in memories])[0].sum().backward()
    assert not torch.allclose(model.layers[0].self_attn.k_proj.weight.grad, key_gradient)


@pytest.mark.parametrize("keep_projections", [False, True])
def test_memories_are_reordered_with_their_rows(keep_projections):
    model = small_model()
    tokens = some_tokens(3, 8)
    _, memories = model.features(tokens[:, :5], keep_projections=keep_projections)
    rows = torch.tensor([2, 0, 0, 1])
    found, _ = model.features(tokens[rows, 5:], reorder(memories, rows), keep_projections=keep_projections)
    expected, _ = model.features(tokens[:, 5:], memories, keep_projections=keep_projections)
    torch.testing.assert_close(found, expected[rows])


def test_only_the_last_positions_are_scored_if_there_are_fewer_targets():
    model = small_model()
    tokens, targets = some_tokens(2, 6), some_tokens(2, 7)[:, 1:]
    whole, _ = model(tokens, targets)
    torch.testing.assert_close(model(tokens, targets[:, 4:])[0], whole[:, 4:])


def test_a_layer_can_be_computed_again_in_the_backward_pass():
    model = small_model().train()
    layer: Layer = model.layers[0]
    x = some_inputs(2, 4, 8).requires_grad_()
    memory = some_inputs(2, 3, 8)
    arguments = (memory, relative_positions(7, 8, -1, x), attention_mask(4, 7, None, x), False)
    plain, _ = layer(x, *arguments)
    again, _ = checkpoint(layer, x, *arguments, use_reentrant=False)
    inputs = [x, *layer.parameters()]
    for expected, found in zip(
        torch.autograd.grad(plain.sum(), inputs), torch.autograd.grad(again.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_dropout_only_in_training():
    model = small_model(dropout=0.5, dropatt=0.5)
    tokens = some_tokens(2, 6)
    assert torch.equal(model.features(tokens)[0], model.features(tokens)[0])
    model.train()
    assert not torch.equal(model.features(tokens)[0], model.features(tokens)[0])


def test_the_readmes_model_has_its_published_size():
    shape = {"n_layer": 16, "d_model": 410, "n_head": 10, "d_head": 41, "d_inner": 2100}
    with torch.device("meta"):
        model = TransformerXL(transformer_xl(267_744, mem_len=150, **shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == 151_123_537


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        ({}, {"clusters"}),
        ({"not_tied": True}, set()),
        ({"div_val": 2}, {"clusters", "projections"}),
        ({"d_embed": 4}, {"clusters", "projections"}),
        ({"div_val": 2, "proj_share_all_but_first": False}, {"clusters"}),
    ],
)
def test_what_is_tied_is_one_parameter(overrides, shared):
    model = small_model(**overrides)
    embedding, softmax = model.embed_tokens, model.adaptive_softmax
    for index in range(3):
        same = softmax.clusters[index].weight is embedding.clusters[index].weight
        assert same == ("clusters" in shared)
    for index in range(len(softmax.projections)):
        same = any(softmax.projections[index] is projection for projection in embedding.projections)
        assert same == ("projections" in shared and index > 0)


def test_shared_attention_biases_are_one_parameter():
    biases = [name for name, _ in small_model(untie_r=False).named_parameters() if "r_w_bias" in name]
    assert biases == ["layers.0.self_attn.r_w_bias.bias"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": 2}, "--attn-type 2: only 0"),
        ({"d_model": 7}, "--d-model 7: expected an even number"),
        ({"d_embed": -7}, "--d-embed -7: expected 1 or more, or -1 for --d-model"),
        ({"cutoffs": (8, 5)}, "--cutoffs 8,5: expected positive, rising numbers"),
        ({"same_length": True, "mem_len": 0}, "--same-length: .*--mem-len must be given"),
        ({"div_val": 8}, "--div-val 8: leaves no width to the last of 3 clusters"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        small_model(**options)


def test_cutoffs_at_or_above_the_vocabulary_are_dropped():
    assert transformer_xl(40_000).cluster_bounds == [(0, 20_000), (20_000, 40_000)]
    assert transformer_xl(13, cutoffs=(5, 13, 20)).cluster_bounds == [(0, 5), (5, 13)]
    assert transformer_xl(13, cutoffs=(5,), adaptive=False).cluster_bounds == [(0, 13)]


def initialized(config: TransformerXLConfig, seed: int) -> dict[str, Tensor]:
    fill = partial(initialize_parameter, config=config)
    values = {}
    for name, parameter in TransformerXL(config).named_parameters():
        values[name] = torch.empty_like(parameter)
        fill(name, values[name], torch.Generator().manual_seed(seed))
    return values


def test_initial_values_depend_on_the_generator_alone():
    config = small_model(div_val=2).config
    first, second, other = initialized(config, 7), initialized(config, 7), initialized(config, 8)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["layers.0.fc1.weight"], other["layers.0.fc1.weight"])


def test_initial_values_are_spread_as_genuine_fairseqs(golden: Path):
    """Mean and deviation of each tensor, within what their size leaves to chance."""
    path = golden / "txl" / "checkpoint_init.pt"
    state = {name: lazy.read() for name, lazy in read_torch_file(path).content["model"].items()}
    config = transformer_xl(
        144, n_layer=2, d_model=24, n_head=2, d_head=12, d_inner=48, cutoffs=(40, 80), div_val=2, mem_len=16
    )
    ours = initialized(config, 1)
    for name, source in parameter_sources(state, config, str(path)).items():
        theirs = source.take(state)
        if theirs.std() == 0:
            assert torch.equal(ours[name], theirs), name
        else:
            chance = 5 / math.sqrt(theirs.numel())
            assert (ours[name].std() / theirs.std()).log().abs() < chance, name
            assert (ours[name].mean() - theirs.mean()).abs() < chance * theirs.std() * math.sqrt(2), name


def test_uniform_initial_values():
    values = initialized(dataclasses.replace(small_model().config, init="uniform", init_range=0.3, d_inner=500), 1)
    assert 0.29 < values["layers.0.fc1.weight"].abs().max() <= 0.3
    assert values["layers.0.fc1.bias"].abs().max() == 0


def test_a_parameter_that_the_model_does_not_have_is_refused():
    config = small_model().config
    with pytest.raises(KeyError):
        initialize_parameter("layers.0.qkv_net.weight", torch.empty(2, 2), torch.Generator(), config=config)
