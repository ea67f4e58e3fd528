"""The loss scale moves as fairseq's, and goes on from a checkpoint as if the run had not stopped."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import ConfigError, LmtoolsError
from lmtools.train.config import TrainConfig
from lmtools.train.precision import LossScaler, parameter_dtype

STEPS = st.lists(st.booleans(), max_size=60)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; `o` is one that overflows."""
    seen = []
    for step in steps:
        scaler.update(overflow=step == "o")
        seen.append(scaler.scale)
    return seen


# The scales of fairseq 0.12's DynamicLossScaler after the same steps.
STEPS_SEEN = ".....oo..o.....o.ooo........o"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"fp16_init_scale": 128, "fp16_scale_window": 3},
            "128 128 256 256 256 128 64 64 64 32 32 32 64 64 64 32 32 16 8 4 4 4 8 8 8 16 16 16 8",
        ),
        (
            {"fp16_init_scale": 128, "fp16_scale_window": 3, "fp16_scale_tolerance": 0.5},
            "128 128 256 256 256 256 128 128 128 128 128 128 256 256 256 128 128 64 32 16 16 16 32 32 32 64 64 64 64",
        ),
        (
            {"fp16_init_scale": 8, "fp16_scale_window": 4, "threshold_loss_scale": 2.0},
            "8 8 8 16 16 8 4 4 4 2 2 2 2 4 4 2 2 2 2 2 2 2 2 4 4 4 4 8 4",
        ),
    ],
    ids=["window", "tolerance", "threshold"],
)
def test_the_scale_moves_as_fairseqs(options, expected):
    scaler = LossScaler.of(TrainConfig(fp16=True, **options))
    assert scales(scaler, STEPS_SEEN) == [float(scale) for scale in expected.split()]


def test_the_run_ends_when_the_scale_comes_down_to_its_floor():
    scaler = LossScaler.of(TrainConfig(memory_efficient_fp16=True, fp16_init_scale=8, min_loss_scale=1.0))
    assert scales(scaler, "oo") == [4, 2], "as fairseq, which then stops too"
    with pytest.raises(LmtoolsError, match=r"loss scale 2 .*--min-loss-scale 1 .*lower --lr"):
        scaler.update(overflow=True)


@given(STEPS, STEPS, st.integers(1, 8), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_resumed_run_goes_on_in_the_middle_of_a_window(before, after, window, tolerance):
    """fairseq saves the scale alone, and starts a new window."""
    config = TrainConfig(fp16=True, fp16_scale_window=window, fp16_scale_tolerance=tolerance, min_loss_scale=1e-30)
    straight, first, second = (LossScaler.of(config) for _ in range(3))
    for overflow in before:
        first.update(overflow=overflow)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for overflow in after:
        second.update(overflow=overflow)
    for overflow in before + after:
        straight.update(overflow=overflow)
    assert second == straight


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"memory_efficient_bf16": True}])
def test_only_float16_is_scaled(options):
    scaler = LossScaler.of(TrainConfig(**options))
    assert scales(scaler, "o" * 100 + "." * 100_000) == [1.0] * 100_100
    assert scaler.state_dict() == {}


def test_a_change_of_precision_keeps_the_new_runs_scale():
    float16, bfloat16 = (LossScaler.of(TrainConfig(**{name: True})) for name in ("fp16", "bf16"))
    saved = float16.state_dict()
    float16.load_state_dict(bfloat16.state_dict())
    bfloat16.load_state_dict(saved)
    assert (float16.scale, bfloat16.scale) == (128, 1)


@pytest.mark.parametrize(("dp", "update_freq", "window"), [(1, 1, 16384), (8, 4, 512), (1000, 100, 1)])
def test_the_window_is_shorter_the_more_batches_an_update_has(dp, update_freq, window):
    assert LossScaler.of(TrainConfig(fp16=True, dp=dp, update_freq=update_freq)).window == window


def test_a_first_scale_at_the_floor_is_refused():
    with pytest.raises(ConfigError, match="--fp16-init-scale 1: expected more than --min-loss-scale 1"):
        LossScaler.of(TrainConfig(fp16=True, fp16_init_scale=1, min_loss_scale=1.0))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"fp16": True}, torch.float16),
        ({"memory_efficient_fp16": True}, torch.float16),
        ({"bf16": True}, torch.bfloat16),
        ({"memory_efficient_bf16": True}, torch.bfloat16),
    ],
)
def test_parameters_have_the_dtype_that_is_asked_for(options, dtype):
    assert parameter_dtype(TrainConfig(**options)) == dtype
