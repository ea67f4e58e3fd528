"""Truncated BPTT: memory flows through an epoch, and a run is the same on any mesh and in any number of legs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtools.checkpoints.models import model_config, new_model
from lmtools.data.indexed import IndexedDataset
from lmtools.errors import CheckpointError, ConfigError, DataError
from lmtools.train import loop, start
from lmtools.train.config import resolve
from lmtools.train.data import open_data
from lmtools.train.signals import StopSignal
from lmtools.train.start import start_state
from lmtools.train.validation import validate
from tests.support.ranks import run_ranks
from tests.support.training import (
    GOLDEN,
    TINY_XL,
    Leg,
    advance,
    cpu_mesh,
    metrics,
    state_of_noise,
    tiny_run,
    train_a_leg,
    whole_state,
)

XL: dict[str, Any] = {"arch": "transformer_xl"}
DROPOUT = {"dropout": 0.1, "dropatt": 0.1}


# --- in legs ---


def legs(flags: dict[str, Any], save_dir: Path, ends: list[int]) -> list[Leg]:
    return [train_a_leg({**XL, **flags, "save_dir": str(save_dir), "max_update": end}) for end in ends]


def at_once_and_in_legs(flags: dict[str, Any], folder: Path, end: int, ends: list[int]) -> Leg:
    legs(flags, folder / "legs", ends)
    return legs(flags, folder / "at once", [end])[0]


def last_leg(flags: dict[str, Any], folder: Path, end: int) -> Leg:
    return legs(flags, folder / "legs", [end])[0]


@pytest.mark.parametrize(
    ("mp", "dp", "ends", "flags"),
    [
        (1, 1, [1, 5, 11, 13], {}),
        pytest.param(
            *(1, 1, [3, 7], {"fp16": True, "fp16_init_scale": 2**19, "fp16_scale_window": 3, "fairseq_compat": True}),
            marks=pytest.mark.slow,
        ),
        pytest.param(1, 2, [4, 7], {"update_freq": 2, "clip_norm": 0.25}, marks=pytest.mark.slow),
        pytest.param(2, 2, [3, 6], {"zero": 3, "offload_activations": True}, marks=pytest.mark.slow),
    ],
    ids=["mp1", "mp1 fp16", "dp2", "mp2 dp2 zero3"],
)
def test_in_legs_as_in_one(tmp_path: Path, mp, dp, ends, flags):
    """With 11 steps of 32 rows an epoch: legs end within the first epoch, at its edge and in the second."""
    flags = {"mp": mp, "dp": dp, "batch_size": 32 // dp, **DROPOUT, **flags}
    at_once = run_ranks(mp * dp, at_once_and_in_legs, flags, tmp_path, ends[-1], ends[:-1])
    found = run_ranks(mp * dp, last_leg, flags, tmp_path, ends[-1])
    assert found[0].origin.endswith(f"_{ends[-2]}")
    for ours, expected in zip(found, at_once, strict=True):
        assert ours.progress == expected.progress
        assert ours.loss_scaler == expected.loss_scaler
        assert ours.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert torch.equal(ours.tensors[name], tensor), name
    both = [[line for line in metrics(tmp_path / name) if line["kind"] == "update"] for name in ("legs", "at once")]
    assert both[0] == both[1]


def test_memory_matters_to_what_is_resumed(tmp_path, monkeypatch):
    """The test above would see it if a leg began without."""
    legs({}, tmp_path / "legs", [3])
    with_memory = legs({"save_dir": "x"}, tmp_path / "at once", [5])[0]
    monkeypatch.setattr(start, "load_memories", lambda *_, **__: None)
    without = legs({}, tmp_path / "legs", [5])[0]
    assert any(not torch.equal(without.tensors[name], tensor) for name, tensor in with_memory.tensors.items())


@pytest.mark.slow
def test_the_replicas_may_change_but_not_the_rows(tmp_path):
    legs({"batch_size": 8}, tmp_path / "two", [2])
    assert legs({"batch_size": 8}, tmp_path / "two", [4])[0].progress["num_updates"] == 4
    leg, _ = run_ranks(2, last_leg_of_two, tmp_path)
    assert leg.progress["num_updates"] == 6
    with pytest.raises(CheckpointError, match=r"within an epoch of --batch-size x --dp 8, this run has 4; go on with"):
        legs({"batch_size": 4}, tmp_path / "two", [8])
    with pytest.raises(CheckpointError, match=r"within an epoch of --tokens-per-sample 16, this run has 8"):
        legs({"batch_size": 8, "tokens_per_sample": 8}, tmp_path / "two", [8])


def last_leg_of_two(folder: Path) -> Leg:
    return legs({"batch_size": 4, "dp": 2}, folder / "two", [6])[0]


def test_validation_leaves_the_memory_of_training_alone(tmp_path):
    flags = {"valid_subset": "valid", "validate_interval_updates": 2, "batch_size_valid": 5}
    with_validation = legs(flags, tmp_path / "with", [5])[0]
    without = legs({}, tmp_path / "without", [5])[0]
    for name, tensor in without.tensors.items():
        assert torch.equal(with_validation.tensors[name], tensor), name
    validations = [line for line in metrics(tmp_path / "with") if line["kind"] == "valid"]
    assert [line["num_tokens"] for line in validations] == [len(IndexedDataset(GOLDEN / "bin" / "valid").tokens)] * 3


# --- on another mesh, in float64 ---


def updates_of(flags: dict[str, Any], num_updates: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    run = tiny_run(**XL, **flags)
    mesh, data = cpu_mesh(run), open_data(run.train)
    state = state_of_noise(run, mesh, vocab_size=len(data.dictionary), dtype=torch.float64)
    results = advance(run, data, state, mesh, num_updates)
    losses, norms = [r.loss_sum for r in results], [r.gradient_norm for r in results]
    return losses, norms, {k: v for k, v in whole_state(state).items() if k.startswith("model.")}


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_size": 4, "dp": 2},
        {"batch_size": 8, "mp": 2},
        pytest.param({"batch_size": 2, "dp": 2, "mp": 2, "zero": 2, "update_freq": 1}, marks=pytest.mark.slow),
    ],
    ids=["dp2", "mp2", "mp2 dp2 zero2"],
)
def test_losses_gradients_and_weights_do_not_depend_on_the_mesh(flags):
    rows = flags["batch_size"] * flags.get("dp", 1)
    losses, norms, weights = updates_of({"batch_size": rows}, 4)
    for found in run_ranks(flags.get("dp", 1) * flags.get("mp", 1), updates_of, flags, 4):
        np.testing.assert_allclose(found[0], losses, rtol=1e-10)
        np.testing.assert_allclose(found[1], norms, rtol=1e-8)
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=1e-7, atol=1e-9)


def test_an_epoch_begins_without_memory():
    """The first step of an epoch, with the same weights, has the same loss in each epoch."""
    losses, _, _ = updates_of({"batch_size": 32, "lr": 1e-30}, 13)
    assert losses[11:] == losses[:2]
    assert len(set(losses[:11])) == 11


def losses_with(ext_len: int) -> tuple[float, float]:
    """Of training and of validation, with a memory of all that was read."""
    run = tiny_run(**XL, batch_size=8, update_freq=4, mem_len=64, ext_len=ext_len, valid_subset="valid")
    mesh, data = cpu_mesh(run), open_data(run.train)
    state = state_of_noise(run, mesh, vocab_size=len(data.dictionary), dtype=torch.float64)
    [update] = advance(run, data, state, mesh, 1)
    state = state_of_noise(run, mesh, vocab_size=len(data.dictionary), dtype=torch.float64)
    validation = validate(
        state.model, data.valid[0], run.train, mesh, StopSignal(), eos_index=data.dictionary.eos_index
    )
    assert validation is not None
    return update.loss_sum, validation.total_nats


def test_an_extended_context_is_read_again():
    """It is no part of the memory, so that nothing would be seen twice, or not at all."""
    np.testing.assert_allclose(losses_with(5), losses_with(0), rtol=1e-12)


def test_a_validation_split_of_which_nothing_is_predicted_is_refused():
    with pytest.raises(
        DataError, match=r"bin/valid: by fairseq's rule none of its \d+ tokens is predicted in 500 stre"
    ):
        open_data(tiny_run(**XL, valid_subset="valid", batch_size_valid=500, fairseq_compat=True).train)


def test_a_loss_that_is_not_finite_is_not_remembered(monkeypatch):
    run = tiny_run(**XL, nan="skip")
    mesh, data = cpu_mesh(run), open_data(run.train)
    state = state_of_noise(run, mesh, vocab_size=len(data.dictionary), dtype=torch.float64)
    advance(run, data, state, mesh, 1)
    assert state.memories is not None
    state.memories[0].fill_(float("nan"))
    bad, good = advance(run, data, state, mesh, 2)
    assert (bad.skipped, good.skipped) == ("nan", None)


# --- genuine fairseq's updates ---


def assert_updates_are_fairseqs(folder: Path, data: Path, monkeypatch, **flags: Any) -> None:
    recorded = [json.loads(line) for line in (folder / "updates.rank0.jsonl").read_text().splitlines()]
    epoch = next(number for number in range(1, len(recorded)) if recorded[number]["micro"][0]["ids"][0] == 0)
    recorded = recorded[: min(epoch, 100)]  # rounding grows: after 230 the losses are apart by 1 %
    rates = iter([update["lr_used"] for update in recorded])
    monkeypatch.setattr(loop, "learning_rate", lambda *_, **__: next(rates))
    options = TINY_XL | {"data": str(data), "finetune_from": str(folder / "checkpoint_init.pt"), "resume": "never"}
    options |= {"fairseq_compat": True, "clip_norm": 0.25, "adam_betas": (0.9, 0.999)}
    options |= {"weight_decay": 0.0, "save_dir": "unused"}
    run = resolve(None, options | flags)
    mesh, run_data = cpu_mesh(run), open_data(run.train)
    state, _ = start_state(run, run_data, mesh)
    results = advance(run, run_data, state, mesh, len(recorded))
    assert [result.num_tokens for result in results] == [update["micro"][0]["ntokens"] for update in recorded]
    expected = [update["micro"][0]["loss_sum"] for update in recorded]
    np.testing.assert_allclose([result.loss_sum for result in results][:20], expected[:20], rtol=1e-5)
    np.testing.assert_allclose([result.loss_sum for result in results], expected, rtol=2e-3)
    np.testing.assert_allclose(results[0].gradient_norm, recorded[0]["gnorm"], rtol=3e-5)  # measured 1e-5


OWN = {"d_model": 24, "d_inner": 48, "n_head": 2, "d_head": 12, "mem_len": 16, "div_val": 2}


def test_updates_are_fairseqs(golden: Path, monkeypatch):
    assert_updates_are_fairseqs(golden / "txl", golden / "bin", monkeypatch, **OWN)


@pytest.mark.slow
@pytest.mark.shared
def test_updates_are_fairseqs_of_wikitext(shared_golden: Path, monkeypatch):
    shape = {"n_layer": 3, "d_model": 48, "n_head": 4, "d_head": 12, "d_inner": 96, "mem_len": 32}
    shape |= {"tokens_per_sample": 32, "cutoffs": (200, 500)}
    data = shared_golden / "bin" / "built_1k"
    assert_updates_are_fairseqs(shared_golden / "txl" / "div1", data, monkeypatch, **shape)


# --- options ---


def test_the_readmes_command():
    options = {"data": "d", "task": "truncated_bptt_lm", "arch": "transformer_xl", "tokens_per_sample": 150}
    options |= {"batch_size": 15, "max_update": 200000, "n_layer": 16, "d_model": 410, "n_head": 10, "d_head": 41}
    options |= {"d_inner": 2100, "dropout": 0.1, "dropatt": 0.0, "mem_len": 150, "optimizer": "adam", "dp": 4}
    options |= {"clip_norm": 0.25, "lr_scheduler": "cosine", "warmup_updates": 0, "lr": 0.00025, "fp16": True}
    run = resolve(None, options)
    assert run.model["cutoffs"] == (20000, 40000, 200000)
    with torch.device("meta"):
        model = new_model(model_config(run.model, 267_744))
    assert sum(parameter.numel() for parameter in model.parameters()) == 151_123_537


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task": "language_modeling"}, "--arch transformer_xl has --task truncated_bptt_lm"),
        ({"batch_size": None, "max_tokens": 64}, "--batch-size: give how many streams"),
        ({"max_tokens": 64}, "--max-tokens: is not for --task truncated_bptt_lm"),
        ({"sequence_parallel": True}, "--sequence-parallel: is not for"),
        ({"zero": 2, "untie_r": False}, "--zero with --no-untie-r"),
        ({"mp": 3}, "--mp 3: does not divide the model's 2 attention heads"),
        ({"decoder_layers": 3}, "--decoder-layers: is no option of --arch transformer_xl"),
        ({"dropatt": 1.0}, "--dropatt 1.0: expected less than 1"),
        ({"same_length": True, "mem_len": 0}, "--same-length: attends to"),
    ],
)
def test_options_that_cannot_work_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        tiny_run(**XL, **flags)
