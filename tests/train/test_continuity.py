"""A run that was interrupted is the run that was not: bit for bit on the same mesh, to rounding on another."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtools.checkpoints.training import read_record
from lmtools.train import start, validation
from lmtools.train.checkpoints import LAST
from lmtools.train.signals import StopSignal
from lmtools.train.step import loss_sum
from tests.support.ranks import run_ranks
from tests.support.training import Leg, metrics, train_a_leg

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
SCALED = {
    "fp16": True,
    "fp16_init_scale": 2**19,  # the first updates overflow
    "fp16_scale_window": 4,  # and later ones again, in the middle of what is resumed
}
SCHEDULE = {"lr_scheduler": "inverse_sqrt", "warmup_updates": 5}


def legs(flags: dict[str, Any], save_dir: Path, ends: list[int]) -> list[Leg]:
    """One run in several legs, each resumed from the one before."""
    return [train_a_leg({**flags, "save_dir": str(save_dir), "max_update": end}) for end in ends]


def at_once_and_in_legs(flags: dict[str, Any], folder: Path, end: int, ends: list[int]) -> Leg:
    """What a run without interruption comes to; and all but the last leg of one in legs."""
    legs(flags, folder / "legs", ends)
    return legs(flags, folder / "at once", [end])[0]


def assert_identical(found: Leg, expected: Leg) -> None:
    assert found.progress == expected.progress
    assert found.loss_scaler == expected.loss_scaler
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("mp", "dp", "ends", "flags"),
    [
        (1, 1, [10, 12, 20], {}),
        pytest.param(1, 1, [4, 9, 11], SCALED, marks=pytest.mark.slow),
        pytest.param(
            *(1, 1, [10, 20], {"memory_efficient_bf16": True, "update_freq": 2, "optimizer": "sgd", "momentum": 0.9}),
            marks=pytest.mark.slow,
        ),
        pytest.param(2, 2, [10, 20], {}, marks=pytest.mark.slow),
        pytest.param(
            2, 2, [3, 7], SCALED | {"zero": 3, "sequence_parallel": True, "clip_norm": 0.5}, marks=pytest.mark.slow
        ),
        pytest.param(
            *(1, 2, [6, 9], {"zero": 2, "checkpoint_activations": True, "bf16": True, "optimizer": "adafactor"}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mp1", "mp1 fp16", "mp1 bf16 sgd", "mp2 dp2", "mp2 dp2 fp16 zero3", "dp2 bf16 zero2 adafactor"],
)
def test_in_legs_as_in_one(tmp_path: Path, mp, dp, ends, flags):
    """With 12 batches of 32 blocks an epoch: legs end within an epoch, and after update 12 (6 at dp 2) at its edge."""
    flags = {"mp": mp, "dp": dp, "batch_size": 32, **DROPOUT, **SCHEDULE, **flags}
    at_once = run_ranks(mp * dp, at_once_and_in_legs, flags, tmp_path, ends[-1], ends[:-1])
    last_leg = run_ranks(mp * dp, train_a_leg, {**flags, "save_dir": str(tmp_path / "legs"), "max_update": ends[-1]})
    assert last_leg[0].origin.startswith(f"resumed from {tmp_path / 'legs'}")
    assert last_leg[0].origin.endswith(f"_{ends[-2]}")
    for found, expected in zip(last_leg, at_once, strict=True):
        assert_identical(found, expected)
    if "fp16" in flags:
        assert last_leg[0].progress["num_skipped"] > 1
        assert {name for name in last_leg[0].tensors if name.endswith(".master")}
    updates = [line for line in metrics(tmp_path / "legs") if line["kind"] == "update"]
    assert updates == [line for line in metrics(tmp_path / "at once") if line["kind"] == "update"]
    assert sum(line["skipped"] is None for line in updates) == ends[-1]


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint_and_its_metrics_are_cut(tmp_path: Path):
    flags = {"save_interval_updates": 4, "valid_subset": "valid", "validate_interval_updates": 3, **DROPOUT}
    legs(flags, tmp_path / "killed", [7])
    # As if killed in update 7: its checkpoint is not there, and its line in the metrics is half written.
    os.remove(tmp_path / "killed" / LAST)
    os.symlink("checkpoint_1_4", tmp_path / "killed" / LAST)
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as stream:
        stream.write('{"kind": "upda')
    resumed = legs(flags, tmp_path / "killed", [9])[0]
    at_once = legs(flags, tmp_path / "at once", [9])[0]
    assert_identical(resumed, at_once)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "at once")
    kinds = [(line["kind"], line["num_updates"]) for line in metrics(tmp_path / "killed")]
    expected = [("update", number) for number in range(1, 10)]
    for number in (3, 6, 9):
        expected.insert(expected.index(("update", number)) + 1, ("valid", number))
    assert kinds == expected


@pytest.mark.parametrize("during_validation", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_signal_ends_the_run_without_the_validation_which_is_made_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during_validation: bool
):
    flags = {"valid_subset": "valid", "validate_interval_updates": 2, "batch_size": 128, "keep_best_checkpoints": 9}
    flags |= {"batch_size_valid": 100}  # 4 batches
    legs(flags, tmp_path / "stopped", [1])
    stop = StopSignal()
    num_batches = 0

    def loss_sum_and_signal(*arguments: Any) -> Any:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 2:
            stop.received = signal.SIGTERM
        return loss_sum(*arguments)

    if during_validation:
        monkeypatch.setattr(validation, "loss_sum", loss_sum_and_signal)
    else:
        stop.received = signal.SIGTERM
    stopped = train_a_leg({**flags, "save_dir": str(tmp_path / "stopped")}, stop)
    assert (stopped.received, stopped.progress["num_updates"], stopped.progress["owes_validation"]) == (15, 2, True)
    assert num_batches == (2 if during_validation else 0)
    monkeypatch.undo()
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as stream:  # as if killed after the validation was made
        stream.write('{"kind": "valid", "num_updates": 2, "num_skipped": 0}\n')
    resumed = legs(flags, tmp_path / "stopped", [3])[0]

    at_once = train_a_leg(
        {**flags, "save_dir": str(tmp_path / "at once"), "max_update": 3, "validate_interval_updates": 1}
    )
    assert_identical(resumed, at_once)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "at once")
    amended, expected = (read_record(tmp_path / name / "checkpoint_1_2") for name in ("stopped", "at once"))
    assert amended["valid_loss"] == expected["valid_loss"] is not None
    assert amended["progress"] | {"seconds": 0} == expected["progress"] | {"seconds": 0}


def test_a_run_that_has_ended_is_not_trained_on(tmp_path: Path):
    first = legs({}, tmp_path, [3])[0]
    written = (tmp_path / "metrics.jsonl").read_bytes()
    again = legs({}, tmp_path, [3])[0]
    assert_identical(again, first)
    assert (tmp_path / "metrics.jsonl").read_bytes() == written


# --- on another mesh ---


def in_float64(flags: dict[str, Any], save_dir: Path, end: int) -> Leg:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "parameter_dtype", lambda config: torch.float64)
        return legs(flags, save_dir, [end])[0]


@pytest.mark.slow
def test_each_leg_on_another_mesh(tmp_path: Path):
    """Weights and optimizer's state go from mesh to mesh; dp times update_freq stays, so that updates are the same."""
    save_dir = tmp_path / "legs"
    meshes = [
        {"mp": 1, "dp": 1, "update_freq": 2},
        {"mp": 2, "dp": 2, "update_freq": 1, "zero": 3},
        {"mp": 4, "dp": 1, "update_freq": 2},
        {"mp": 1, "dp": 2, "update_freq": 1, "zero": 2},
        {"mp": 2, "dp": 1, "update_freq": 2, "sequence_parallel": True},
        {"mp": 1, "dp": 1, "update_freq": 2},
    ]
    at_once = in_float64(meshes[0] | SCHEDULE, tmp_path / "at once", 2 * len(meshes))
    for number, mesh in enumerate(meshes, start=1):
        leg = run_ranks(mesh["mp"] * mesh["dp"], in_float64, mesh | SCHEDULE, save_dir, 2 * number)[0]
    assert leg.progress == at_once.progress
    assert leg.tensors.keys() == at_once.tensors.keys()
    for name, tensor in at_once.tensors.items():
        # The gradient of k's bias is nothing but rounding, from which Adam makes a step of any size.
        if "k_proj.bias" not in name:
            torch.testing.assert_close(
                leg.tensors[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_with_another_dp_no_batch_is_repeated_or_left_out(tmp_path: Path):
    flags = {"batch_size": 32, "max_epoch": 1, "max_update": None}
    run_ranks(2, train_a_leg, flags | {"dp": 2, "save_dir": str(tmp_path), "max_update": 2})
    train_a_leg(flags | {"save_dir": str(tmp_path)})
    updates = [line for line in metrics(tmp_path) if line["kind"] == "update"]
    assert len(updates) == 2 + (12 - 2 * 2)
    num_tokens = json.loads((tmp_path / LAST / "lmtools.json").read_text())["progress"]
    assert num_tokens["position"] == {"epoch": 2, "num_batches": 0}
    assert sum(line["num_tokens"] for line in updates) == 5255, "each token of the split once"
