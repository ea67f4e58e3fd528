"""The clusters: probabilities by hand and against PyTorch's own adaptive softmax, what is computed and what learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtools.models.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from lmtools.models.architectures import TransformerXLConfig, transformer_xl

VARIANTS: dict[str, dict[str, Any]] = {
    "one cluster": {"cutoffs": ()},
    "one width": {"cutoffs": (5, 8)},
    "narrowing": {"cutoffs": (5, 8), "div_val": 2},
    "projected": {"cutoffs": (5, 8), "d_embed": 4},
    "one cluster, projected": {"cutoffs": (), "d_embed": 4},
}
V, D = 13, 8


def config_of(variant: str) -> TransformerXLConfig:
    return transformer_xl(V, d_model=D, **VARIANTS[variant])


def drawn(module: nn.Module) -> Any:
    """The module in float64, its parameters drawn at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_(generator=generator)
    return module


def some_hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def probability(softmax: AdaptiveSoftmax, hidden: Tensor, target: int) -> float:
    """One target, from the definition, with sums written out."""

    def exponentials(layer: nn.Linear, index: int) -> list[float]:
        projected = hidden @ softmax.projections[index] if len(softmax.projections) else hidden
        return [math.exp(logit) for logit in layer(projected).tolist()]

    first = exponentials(softmax.clusters[0], 0)
    tails = exponentials(softmax.tails, 0) if softmax.tails is not None else []
    total = sum(first) + sum(tails)
    if target < len(first):
        return first[target] / total
    index = next(i for i, (start, end) in enumerate(softmax.bounds) if start <= target < end)
    within = exponentials(softmax.clusters[index], index)
    return tails[index - 1] / total * within[target - softmax.bounds[index][0]] / sum(within)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_the_definition(variant):
    softmax = drawn(AdaptiveSoftmax(config_of(variant)))
    hidden = some_hidden(V)
    nll = softmax(hidden, torch.arange(V))
    for target in range(V):
        expected = -math.log(probability(softmax, hidden[target], target))
        assert nll[target].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_the_scores_of_every_type_and_sum_to_one(variant):
    softmax = drawn(AdaptiveSoftmax(config_of(variant)))
    hidden = some_hidden(2, 3)
    log_probs = softmax.log_probs(hidden)
    assert log_probs.shape == (2, 3, V)
    torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones(2, 3, dtype=torch.float64))
    for target in range(V):
        torch.testing.assert_close(-softmax(hidden, torch.full((2, 3), target)), log_probs[..., target])


def test_pytorchs_adaptive_softmax_without_tail_biases_is_the_same():
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, V, [5, 8], div_value=2.0, head_bias=True).double()
    softmax = drawn(AdaptiveSoftmax(config_of("narrowing")))
    with torch.no_grad():
        softmax.projections[0].copy_(torch.eye(D))
        theirs.head.weight.copy_(torch.cat([softmax.clusters[0].weight, softmax.tails.weight]))
        theirs.head.bias.copy_(torch.cat([softmax.clusters[0].bias, softmax.tails.bias]))
        for index in (1, 2):
            softmax.clusters[index].bias.zero_()
            theirs.tail[index - 1][0].weight.copy_(softmax.projections[index].T)
            theirs.tail[index - 1][1].weight.copy_(softmax.clusters[index].weight)
    hidden, targets = some_hidden(50), torch.arange(50) % V
    torch.testing.assert_close(-softmax(hidden, targets), theirs(hidden, targets).output)
    torch.testing.assert_close(softmax.log_probs(hidden), theirs.log_prob(hidden))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_log_probabilities(variant):
    softmax = drawn(AdaptiveSoftmax(config_of(variant)))
    hidden, targets = some_hidden(20).requires_grad_(), torch.arange(20) % V
    inputs = [hidden, *softmax.parameters()]
    found = torch.autograd.grad(softmax(hidden, targets).sum(), inputs)
    picked = softmax.log_probs(hidden).gather(-1, targets[:, None])
    for ours, expected in zip(found, torch.autograd.grad(-picked.sum(), inputs), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_negative_targets_are_not_scored(variant):
    softmax = drawn(AdaptiveSoftmax(config_of(variant)))
    hidden = some_hidden(4).requires_grad_()
    nll = softmax(hidden, torch.tensor([3, -100, 12, -1]))
    assert nll[[1, 3]].tolist() == [0.0, 0.0]
    nll.sum().backward()
    assert (hidden.grad[[1, 3]] == 0).all()
    assert (hidden.grad[[0, 2]] != 0).all()


def test_a_tail_is_computed_only_for_its_targets():
    softmax = drawn(AdaptiveSoftmax(config_of("narrowing")))
    rows = []
    for cluster in softmax.clusters:
        cluster.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    softmax(some_hidden(6), torch.tensor([12, 0, 5, 11, 4, -100]))
    assert rows == [6, 1, 2]


def test_parameters_of_a_tail_without_targets_get_a_zero_gradient():
    """Replicas add up their gradients, so that none may be missing on one of them."""
    softmax = drawn(AdaptiveSoftmax(config_of("narrowing")))
    softmax(some_hidden(3), torch.tensor([0, 1, 12])).sum().backward()
    for parameter in (softmax.clusters[1].weight, softmax.clusters[1].bias, softmax.projections[1]):
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_in_the_vocabulary_is_refused(variant):
    config = config_of(variant)
    for wrong in (V, V + 100):
        with pytest.raises(IndexError, match="out of bounds"):
            drawn(AdaptiveSoftmax(config))(some_hidden(1), torch.tensor([wrong]))
        with pytest.raises(IndexError):
            drawn(AdaptiveEmbedding(config))(torch.tensor([wrong]))
    with pytest.raises(IndexError):
        drawn(AdaptiveEmbedding(config))(torch.tensor([-1]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_embedding_is_a_row_of_its_cluster_projected(variant):
    embedding = drawn(AdaptiveEmbedding(config_of(variant)))
    tokens = torch.randperm(V, generator=torch.Generator().manual_seed(3)).view(1, V)
    vectors = embedding(tokens)
    for position, token in enumerate(tokens[0].tolist()):
        index = next(i for i, (start, end) in enumerate(embedding.bounds) if start <= token < end)
        row = embedding.clusters[index].weight[token - embedding.bounds[index][0]]
        if VARIANTS[variant].get("div_val", 1) > 1:
            row = embedding.projections[index] @ row
        elif "d_embed" in VARIANTS[variant]:
            row = embedding.projections[0] @ row
        torch.testing.assert_close(vectors[0, position], row * math.sqrt(D))


def test_only_the_rows_that_were_read_learn():
    embedding = drawn(AdaptiveEmbedding(config_of("narrowing")))
    embedding(torch.tensor([3, 6, 6])).sum().backward()
    touched = [cluster.weight.grad.abs().sum(dim=1).nonzero().flatten().tolist() for cluster in embedding.clusters]
    assert touched == [[3], [1], []]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_the_vocabulary_are_in_float32(dtype):
    softmax = AdaptiveSoftmax(transformer_xl(5000, d_model=8, cutoffs=(2000,)))
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
    hidden, targets = some_hidden(40).float(), torch.arange(40) * 124
    exact = softmax(hidden, targets)
    half = softmax.to(dtype)(hidden.to(dtype), targets)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0, atol=0.05)
