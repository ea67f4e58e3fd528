"""Training on any mesh is training on one rank: losses, gradients, norms and weights, to float64's rounding."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtools.train.data import open_data
from tests.support.ranks import run_ranks
from tests.support.training import (
    advance,
    cpu_mesh,
    start_near_the_end_of_the_epoch,
    state_of_noise,
    tiny_run,
    whole,
)

VOCAB_SIZE = 149  # a prime: no number of ranks divides it


@dataclass(frozen=True)
class Outcome:
    """What three updates did.

    Attributes:
        losses: sums in nats.
        counts: tokens.
        norms: before clipping.
        gradients: of the mean loss, clipped, in the last update.
        weights: after it.
    """

    losses: list[float]
    counts: list[int]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_over_the_epochs_edge(num_batches_left: int, flags: dict[str, Any]) -> Outcome:
    """Three updates, the second of which has `num_batches_left` batches where the others have 4."""
    run = tiny_run(clip_norm=0.5, **flags)
    mesh = cpu_mesh(run)
    data = open_data(run.train)
    state = state_of_noise(run, mesh, vocab_size=VOCAB_SIZE, dtype=torch.float64)
    start_near_the_end_of_the_epoch(state, data, 4 + num_batches_left)
    results = advance(run, data, state, mesh, 3)
    assert [result.skipped for result in results] == [None] * 3
    gradients = {}
    for name, parameter in state.parameters.items():
        assert parameter.grad is not None, name
        gradients[name] = whole(parameter.grad)
    return Outcome(
        [result.loss_sum for result in results],
        [result.num_tokens for result in results],
        [result.gradient_norm for result in results],
        gradients,
        {name: whole(parameter) for name, parameter in state.parameters.items()},
    )


Flags = dict[str, Any]

UNTIED: Flags = {"share_decoder_input_output_embed": False}
POST_NORM: Flags = {"decoder_normalize_before": False}
SEQUENCE: Flags = {"sequence_parallel": True}
RECOMPUTE: Flags = {"checkpoint_activations": True}

VARIANTS: dict[tuple[int, int], list[Flags]] = {
    (2, 1): [{}, SEQUENCE | RECOMPUTE],
    (4, 1): [{}],
    (1, 2): [{}, {"zero": 2}, {"zero": 3}],
    (2, 2): [
        *[{}, {"zero": 2}, {"zero": 3}],
        *[UNTIED, UNTIED | {"zero": 3}],
        *[SEQUENCE, RECOMPUTE | {"zero": 2}, SEQUENCE | RECOMPUTE | {"zero": 3}],
        POST_NORM | SEQUENCE | {"zero": 2},
    ],
}
"""What is tried on each mesh of mp x dp."""


def train_variants(mp: int, dp: int) -> list[list[Outcome]]:
    """Each variant, with 1 and with 3 batches left; in one process, since DTensor's first steps take a second."""
    mesh = {"mp": mp, "dp": dp, "update_freq": 4 // dp}
    return [[train_over_the_epochs_edge(left, mesh | flags) for left in (1, 3)] for flags in VARIANTS[mp, dp]]


@cache
def on_mesh(mp: int, dp: int) -> list[list[list[Outcome]]]:
    """By rank, variant, and batches left."""
    return run_ranks(mp * dp, train_variants, mp, dp)


@cache
def on_one_rank(*, tied: bool, pre_norm: bool) -> list[Outcome]:
    flags = {"update_freq": 4, "share_decoder_input_output_embed": tied, "decoder_normalize_before": pre_norm}
    return [train_over_the_epochs_edge(left, flags) for left in (1, 3)]


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.counts == expected.counts
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-12, atol=0)
    for part in ("gradients", "weights"):
        tensors, expected_tensors = getattr(found, part), getattr(expected, part)
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in expected_tensors.items():
            # Adam divides a gradient by its own size: of one that is nothing but rounding (k's bias) it makes a step.
            is_noise = part == "weights" and name.endswith("k_proj.bias")
            torch.testing.assert_close(
                tensors[name],
                tensor,
                rtol=1e-9,
                atol=0.05 if is_noise else 1e-12,
                msg=lambda text, where=f"{part} {name}": f"{where}: {text}",
            )


def test_the_reference_is_clipped_and_its_norm_is_that_of_all_gradients():
    for outcome in on_one_rank(tied=True, pre_norm=True):
        assert outcome.counts[1] < outcome.counts[0], "the epoch's last update is a smaller one"
        assert min(outcome.norms) > 0.5, "clipping is at work"
        clipped = math.sqrt(sum(float(gradient.square().sum()) for gradient in outcome.gradients.values()))
        assert clipped == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("mp", "dp", "variant"),
    [
        pytest.param(mp, dp, index, marks=[pytest.mark.slow] if mp * dp == 4 else [])
        for (mp, dp), variants in VARIANTS.items()
        for index in range(len(variants))
    ],
    ids=[
        f"mp{mp} dp{dp} " + " ".join(f"{name}={value}" for name, value in variant.items())
        for (mp, dp), variants in VARIANTS.items()
        for variant in variants
    ],
)
def test_any_mesh_trains_as_one_rank(mp: int, dp: int, variant: int):
    """With 1 batch left, dp_rank 1 has none in the only micro-step; with 3, none in the second of two."""
    flags = VARIANTS[mp, dp][variant]
    expected = on_one_rank(
        tied="share_decoder_input_output_embed" not in flags, pre_norm="decoder_normalize_before" not in flags
    )
    for rank in on_mesh(mp, dp):
        for found, reference in zip(rank[variant], expected, strict=True):
            assert_same(found, reference)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"mp": 2, "checkpoint_activations": True}, {"dp": 2, "zero": 3}], ids=str)
def test_compiled_blocks_train_as_they_are(flags: Flags):
    ranks = flags.get("mp", 1) * flags.get("dp", 1)
    flags = flags | {"compile": True, "update_freq": 4 // flags.get("dp", 1)}
    for outcome in run_ranks(ranks, train_compiled, flags, timeout_seconds=280):
        assert_same(outcome, on_one_rank(tied=True, pre_norm=True)[0])


def train_compiled(flags: Flags) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler has many of its own
        return train_over_the_epochs_edge(1, flags)
