"""A run saves when it should, keeps what it should, and a save that fails costs it nothing that it had."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lmtools.checkpoints.training import read_record
from lmtools.checkpoints.training_index import tensor_shapes
from lmtools.errors import CheckpointError
from lmtools.train import validation
from lmtools.train.checkpoints import BEST, LAST, superfluous
from lmtools.train.data import open_data
from lmtools.train.signals import StopSignal
from tests.support.ranks import run_ranks
from tests.support.training import advance, cpu_mesh, metrics, state_of_noise, tiny_run, train_a_leg


def checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints that are there, in the order of their updates."""
    names = [path.name for path in folder.glob("checkpoint_[0-9]*_*")]
    return sorted(names, key=lambda name: int(name.split("_")[2]))


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


# --- when ---


def test_between_updates_between_epochs_and_at_the_end(tmp_path: Path):
    """12 batches of 32 blocks an epoch."""
    train_a_leg({"save_dir": str(tmp_path), "batch_size": 32, "save_interval_updates": 5, "max_update": 26})
    names = ["checkpoint_1_5", "checkpoint_1_10", "checkpoint_1_12", "checkpoint_2_15", "checkpoint_2_20"]
    assert checkpoints(tmp_path) == [*names, "checkpoint_2_24", "checkpoint_3_25", "checkpoint_3_26"]
    assert os.readlink(tmp_path / LAST) == "checkpoint_3_26"
    assert not (tmp_path / BEST).exists(), "nothing was validated"
    records = {name: read_record(tmp_path / name) for name in checkpoints(tmp_path)}
    assert [name for name, record in records.items() if record["end_of_epoch"]] == [
        "checkpoint_1_12",
        "checkpoint_2_24",
    ]
    assert records["checkpoint_2_24"]["progress"]["position"] == {"epoch": 3, "num_batches": 0}


@pytest.mark.slow
def test_every_second_epoch(tmp_path: Path):
    flags = {"batch_size": 64, "save_interval": 2, "max_epoch": 3, "max_update": None}
    leg = train_a_leg({"save_dir": str(tmp_path), **flags})
    per_epoch = leg.progress["num_updates"] // 3
    assert checkpoints(tmp_path) == [f"checkpoint_2_{2 * per_epoch}", f"checkpoint_3_{3 * per_epoch}"]


@pytest.mark.slow
def test_a_skipped_update_is_no_reason_to_save_or_validate(tmp_path: Path):
    """Update 0 is a multiple of every interval, and the number stays as long as updates are skipped."""
    flags = {"fp16": True, "fp16_init_scale": 2**30, "save_interval_updates": 2, "validate_interval_updates": 2}
    leg = train_a_leg({"save_dir": str(tmp_path), "valid_subset": "valid", "max_update": 3, **flags})
    assert leg.progress["num_skipped"] > 2
    assert checkpoints(tmp_path) == ["checkpoint_1_2", "checkpoint_1_3"]
    assert [line["num_updates"] for line in metrics(tmp_path) if line["kind"] == "valid"] == [2, 3]


def test_the_best_is_saved_when_it_is_found_and_patience_ends_the_run(tmp_path: Path, monkeypatch):
    losses = iter([5.0, 4.0, float("nan"), 4.5, 3.0])
    monkeypatch.setattr(validation.Validation, "loss_base2", property(lambda self: next(losses)))
    monkeypatch.setattr("lmtools.train.report.Reporter.validation", lambda *_: None)  # asks for the loss again
    flags = {"valid_subset": "valid", "validate_interval_updates": 1, "patience": 2, "max_update": 9}
    leg = train_a_leg({"save_dir": str(tmp_path), **flags})
    assert leg.progress["num_updates"] == 4
    assert (leg.progress["best_loss"], leg.progress["validations_since_best"]) == (4.0, 2)
    assert checkpoints(tmp_path) == ["checkpoint_1_1", "checkpoint_1_2", "checkpoint_1_4"]
    assert os.readlink(tmp_path / BEST) == "checkpoint_1_2"
    assert os.readlink(tmp_path / LAST) == "checkpoint_1_4", "the run's end is saved too"
    found = [read_record(tmp_path / name)["valid_loss"] for name in checkpoints(tmp_path)]
    assert found == [5.0, 4.0, 4.5]


def test_no_save_writes_none(tmp_path: Path):
    train_a_leg({"save_dir": str(tmp_path), "no_save": True, "max_update": 2, "save_interval_updates": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


# --- which are kept ---


def record(time: int, *, end_of_epoch: bool = False, valid_loss: float | None = None) -> dict[str, Any]:
    return {"time": time, "end_of_epoch": end_of_epoch, "valid_loss": valid_loss}


RECORDS = {
    "checkpoint_1_500": record(1),  # of a run before this one
    "checkpoint_1_10": record(2, valid_loss=3.0),
    "checkpoint_1_12": record(3, end_of_epoch=True, valid_loss=2.0),
    "checkpoint_2_20": record(4, valid_loss=1.0),
    "checkpoint_2_24": record(5, end_of_epoch=True),
    "checkpoint_3_30": record(6),
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, set()),
        ({"keep_interval_updates": 1}, {"checkpoint_1_500", "checkpoint_1_10", "checkpoint_2_20"}),
        ({"keep_interval_updates": 3}, {"checkpoint_1_500"}),
        ({"keep_last_epochs": 1}, {"checkpoint_1_12"}),
        ({"no_epoch_checkpoints": True}, {"checkpoint_1_12", "checkpoint_2_24"}),
        ({"keep_best_checkpoints": 1}, set()),
        (
            {"keep_interval_updates": 1, "keep_last_epochs": 1, "keep_best_checkpoints": 2},
            {"checkpoint_1_500", "checkpoint_1_10"},
        ),
    ],
)
def test_what_the_keep_options_leave(flags, expected):
    assert superfluous(RECORDS, tiny_run(**flags).train) == expected


def test_last_and_best_are_never_removed_nor_what_is_no_checkpoint(tmp_path: Path, monkeypatch):
    losses = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(validation.Validation, "loss_base2", property(lambda self: next(losses)))
    monkeypatch.setattr("lmtools.train.report.Reporter.validation", lambda *_: None)
    (tmp_path / "checkpoint_of_mine").mkdir()
    (tmp_path / "checkpoint_1_77").mkdir()
    flags = {"valid_subset": "valid", "validate_interval_updates": 1, "save_interval_updates": 1, "max_update": 5}
    train_a_leg({"save_dir": str(tmp_path), "keep_interval_updates": 1, **flags})
    assert checkpoints(tmp_path) == ["checkpoint_1_1", "checkpoint_1_5", "checkpoint_1_77"]
    assert (os.readlink(tmp_path / BEST), os.readlink(tmp_path / LAST)) == ("checkpoint_1_1", "checkpoint_1_5")
    assert (tmp_path / "checkpoint_of_mine").is_dir()


# --- saves that fail ---


def test_a_save_that_fails_is_told_and_training_goes_on(tmp_path: Path, monkeypatch, capfd):
    write_data = dcp.FileSystemWriter.write_data
    calls: list[int] = []

    def full_at_the_second_save(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write_data(*args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full_at_the_second_save)
    flags = {"save_interval_updates": 2, "max_update": 6, "log_format": "simple"}
    leg = train_a_leg({"save_dir": str(tmp_path), **flags})
    assert leg.progress["num_updates"] == 6
    assert checkpoints(tmp_path) == ["checkpoint_1_2", "checkpoint_1_6"]
    (warning,) = [line for line in said(capfd).splitlines() if line.startswith("warning")]
    expected = f"warning: {tmp_path / 'checkpoint_1_4'}: could not be written: [Errno 28] No space left on device; "
    assert warning == expected + "the last complete checkpoint is checkpoint_1_2, training goes on"


def train_and_be_full_at_the_end(folder: str, full_on_rank: int) -> str:
    def fill_the_disk(*_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))

    run = {"save_dir": folder, "dp": 2, "save_interval_updates": 2}
    train_a_leg(run | {"max_update": 2})
    if int(os.environ["RANK"]) == full_on_rank:
        fill_the_disk()
    with pytest.raises(CheckpointError) as caught:
        train_a_leg(run | {"max_update": 4})
    return str(caught.value)


def test_the_last_save_of_a_run_must_not_fail(tmp_path: Path):
    """On one of two ranks: both end, and both say why."""
    for message in run_ranks(2, train_and_be_full_at_the_end, str(tmp_path), 1):
        assert message == f"{tmp_path / 'checkpoint_1_4'}: could not be written: [Errno 27] File too large"
    assert os.readlink(tmp_path / LAST) == "checkpoint_1_2"
    assert train_a_leg({"save_dir": str(tmp_path), "max_update": 3}).origin.endswith("checkpoint_1_2")


def train_and_be_killed(folder: str, in_save: int) -> None:
    write_data = dcp.FileSystemWriter.write_data
    calls: list[int] = []

    def write_and_die(*args: Any) -> Any:
        calls.append(1)
        result = write_data(*args)
        if len(calls) == in_save:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    dcp.FileSystemWriter.write_data = write_and_die  # type: ignore[method-assign]
    train_a_leg({"save_dir": folder, "save_interval_updates": 2, "max_update": 9})


def test_a_run_that_is_killed_in_a_save_goes_on_from_the_one_before(tmp_path: Path):
    with pytest.raises(ChildProcessError, match="exit code -9"):
        run_ranks(1, train_and_be_killed, str(tmp_path / "killed"), 2)
    assert os.readlink(tmp_path / "killed" / LAST) == "checkpoint_1_2"
    assert (tmp_path / "killed" / ".checkpoint_1_4.tmp").is_dir()
    resumed = train_a_leg({"save_dir": str(tmp_path / "killed"), "max_update": 6})
    assert resumed.origin.endswith("checkpoint_1_2")
    at_once = train_a_leg({"save_dir": str(tmp_path / "at once"), "max_update": 6})
    assert all(torch.equal(resumed.tensors[name], tensor) for name, tensor in at_once.tensors.items())
    assert not list((tmp_path / "killed").glob(".checkpoint*")), "what the killed run has left is gone"


# --- what is saved ---


def names_after_validation(zero: int) -> tuple[set[str], set[str]]:
    run = tiny_run(dp=2, zero=zero, valid_subset="valid")
    mesh = cpu_mesh(run)
    data = open_data(run.train)
    state = state_of_noise(run, mesh, vocab_size=144, dtype=torch.float32)
    advance(run, data, state, mesh, 1)
    before = set(state.tensors())
    validation.validate(state.model, data.valid[0], run.train, mesh, StopSignal(), eos_index=2)
    # What FSDP has gathered for the forward pass is another object than the parameter that the optimizer knows.
    assert set(map(id, state.parameters.values())) == set(map(id, state.model.parameters()))
    return before, set(state.tensors())


@pytest.mark.parametrize("zero", [2, 3])
def test_a_save_after_validation_has_the_optimizers_state(zero: int):
    for before, after in run_ranks(2, names_after_validation, zero):
        assert after == before
        assert {name for name in after if name.endswith("exp_avg_sq")}


@pytest.mark.slow
def test_a_run_that_is_stopped_before_its_first_update_is_saved_whole(tmp_path: Path):
    """As when every update so far was skipped: the optimizer has made no state yet."""
    stop = StopSignal()
    stop.received = signal.SIGTERM
    flags = {"save_dir": str(tmp_path), "fp16": True, "fp16_init_scale": 2**30}
    leg = train_a_leg(flags, stop)
    assert (leg.received, leg.progress["num_updates"], leg.progress["num_skipped"]) == (signal.SIGTERM, 0, 1)
    assert tensor_shapes(tmp_path / LAST).keys() == leg.tensors.keys()
    again = train_a_leg(flags | {"max_update": 2})
    assert again.origin.endswith("checkpoint_1_0")
