"""What goes wrong on one rank is one decision of all: none of them goes on alone, and nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtools.errors import ConfigError, DataError, LmtoolsError
from lmtools.train import loop
from lmtools.train.checkpoints import LAST
from lmtools.train.data import open_data
from lmtools.train.optimizer import local_grad
from lmtools.train.signals import StopSignal, stop_signals
from tests.support.ranks import run_ranks
from tests.support.training import Leg, metrics, tiny_run, train_a_leg


def spoil_update(number: int, *, rank: int, spoil: Callable[[torch.nn.Module], float]) -> None:
    """On one rank, after the backward pass of an update, add to the loss what `spoil` returns, given the model."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    calls = itertools.count(1)
    forward_backward = loop.forward_backward

    def spoiled(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        loss, memories = forward_backward(model, *args, **kwargs)
        return (loss + spoil(model) if next(calls) == number else loss), memories

    loop.forward_backward = spoiled


def nan_in_loss(model: torch.nn.Module) -> float:
    return float("nan")


def inf_in_gradient(model: torch.nn.Module) -> float:
    with torch.no_grad():
        for parameter in list(model.parameters())[-1:]:
            local_grad(parameter).view(-1)[0] = float("inf")
    return 0.0


# --- not a number ---


def train_with_a_spoiled_update(
    flags: dict[str, Any], spoil: Callable[[torch.nn.Module], float], rank: int = 1
) -> Leg | str:
    spoil_update(3, rank=rank, spoil=spoil)
    try:
        return train_a_leg(flags)
    except DataError as error:
        return str(error)


def test_a_run_that_saves_nothing_does_not_say_that_it_did(tmp_path: Path):
    flags = {"save_dir": str(tmp_path), "no_save": True}
    (message,) = run_ranks(1, train_with_a_spoiled_update, flags, nan_in_loss, 0)
    assert "blocks " in message
    assert "saved" not in message


@pytest.mark.parametrize("spoil", [nan_in_loss, pytest.param(inf_in_gradient, marks=pytest.mark.slow)])
def test_a_loss_that_is_no_number_stops_all_after_saving_the_state_before_it(tmp_path: Path, spoil):
    flags = {"dp": 2, "save_dir": str(tmp_path), "max_update": 5}
    messages = run_ranks(2, train_with_a_spoiled_update, flags, spoil)
    assert messages[0] == messages[1]
    assert messages[0].startswith("update 3 of epoch 1: loss ")
    batches = open_data(tiny_run().train).batches(1)
    ids = ", ".join(str(block) for number in (4, 5) for block in batches[number])
    assert f"expected finite numbers; blocks {ids}; the state before it is saved; " in messages[0]
    assert os.readlink(tmp_path / LAST) == "checkpoint_1_2"
    assert json.loads((tmp_path / LAST / "lmtools.json").read_text())["progress"]["position"]["num_batches"] == 4
    # Without the fault the run goes on as if nothing had happened.
    resumed = run_ranks(2, train_a_leg, flags)
    at_once = run_ranks(2, train_a_leg, flags | {"save_dir": str(tmp_path / "at once")})
    assert all(torch.equal(resumed[0].tensors[name], tensor) for name, tensor in at_once[0].tensors.items())


def test_or_it_is_skipped_by_all(tmp_path: Path):
    flags = {"dp": 2, "mp": 2, "save_dir": str(tmp_path), "max_update": 4, "nan": "skip"}
    legs = run_ranks(4, train_with_a_spoiled_update, flags, nan_in_loss)
    for leg in legs:
        assert isinstance(leg, Leg)
        assert (leg.progress["num_updates"], leg.progress["num_skipped"]) == (4, 1)
        assert leg.progress["position"].items() >= {"num_batches": 10}.items(), "five updates' batches are done"
        assert all(torch.equal(leg.tensors[name], tensor) for name, tensor in legs[0].tensors.items())
        assert all(tensor.isfinite().all() for tensor in leg.tensors.values())
    lines = metrics(tmp_path)
    assert [line["skipped"] for line in lines] == [None, None, "nan", None, None]
    assert (lines[2]["loss_sum"], lines[2]["loss_base2"]) == (None, None), "null, which JSON has, unlike NaN"


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, zero: int):
    flags = {"dp": 2, "zero": zero, "fp16": True, "save_dir": str(tmp_path), "max_update": 4}
    legs = run_ranks(2, train_with_a_spoiled_update, flags, inf_in_gradient)
    for leg in legs:
        assert isinstance(leg, Leg)
        assert leg.progress["num_skipped"] == 1
        assert leg.loss_scaler["scale"] == 2**7 / 2
        assert all(torch.equal(leg.tensors[name], tensor) for name, tensor in legs[0].tensors.items())
    assert [line["loss_scale"] for line in metrics(tmp_path)] == [128, 128, 64, 64, 64]
    assert metrics(tmp_path)[2]["skipped"] == "overflow"


@pytest.mark.slow
def test_a_loss_scale_at_its_floor_ends_the_run_with_its_state_saved(tmp_path: Path):
    flags = {"fp16": True, "fp16_init_scale": 2**30, "min_loss_scale": 2.0**28, "save_dir": str(tmp_path)}
    with pytest.raises(LmtoolsError, match="gradients overflow at loss scale"):
        train_a_leg(flags)
    assert (tmp_path / LAST / "lmtools.json").is_file()


# --- clocks and signals ---


def train_with_a_clock_that_leaps(flags: dict[str, Any], rank: int) -> Leg:
    """On one rank, an hour passes between any two looks at the clock."""
    if int(os.environ["RANK"]) == rank:
        hours = itertools.count()
        loop.time = type("Clock", (), {"monotonic": lambda: next(hours) * 3600.0})  # type: ignore[assignment]
    return train_a_leg(flags)


@pytest.mark.parametrize(("rank", "num_updates"), [(0, 2), (1, 5)])
def test_the_time_limit_is_told_by_rank_0s_clock_for_all(tmp_path: Path, rank: int, num_updates: int):
    flags = {"dp": 2, "stop_time_hours": 1.5, "max_update": 5, "save_dir": str(tmp_path)}
    for leg in run_ranks(2, train_with_a_clock_that_leaps, flags, rank, timeout_seconds=40):
        assert leg.progress["num_updates"] == num_updates
    assert os.readlink(tmp_path / LAST) == f"checkpoint_1_{num_updates}"


def train_and_signal_one_rank(flags: dict[str, Any], rank: int) -> Leg:
    stop = StopSignal()
    if int(os.environ["RANK"]) == rank:
        spoil_update(3, rank=rank, spoil=lambda model: setattr(stop, "received", signal.SIGTERM) or 0.0)
    return train_a_leg(flags, stop)


def test_a_signal_to_one_rank_ends_all_after_the_same_update(tmp_path: Path):
    flags = {"dp": 2, "save_dir": str(tmp_path), "valid_subset": "valid"}
    for leg in run_ranks(2, train_and_signal_one_rank, flags, 1):
        assert (leg.received, leg.progress["num_updates"]) == (signal.SIGTERM, 3)
    assert os.readlink(tmp_path / LAST) == "checkpoint_1_3"
    assert not [line for line in metrics(tmp_path) if line["kind"] == "valid"], "there may be no time for it"


def signals_seen(*, launched: bool) -> dict[str, int]:
    """What happens to a process that gets each signal within `stop_signals`: its number where it is remembered."""
    if launched:
        os.environ["LMTOOLS_LAUNCHER_PID"] = str(os.getppid())
    seen = {}
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        with stop_signals() as stop:
            if signal.getsignal(number) != signal.SIG_DFL:
                os.kill(os.getpid(), number)
                time.sleep(0)
            seen[signal.Signals(number).name] = int(stop.received)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "as before"
    return seen


def test_which_signals_ask_a_process_to_save():
    """Under lmtools' launcher only SIGUSR1, which the launcher makes of the others."""
    assert run_ranks(1, signals_seen, launched=False) == [{"SIGUSR1": 10, "SIGINT": 2, "SIGTERM": 15}]
    assert run_ranks(1, signals_seen, launched=True) == [{"SIGUSR1": 10, "SIGINT": 0, "SIGTERM": 0}]


def ask_twice() -> None:
    with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)


def test_asked_twice_it_does_not_save():
    with pytest.raises(ChildProcessError, match="exit code -15"):
        run_ranks(1, ask_twice)


# --- two at once ---


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path, monkeypatch):
    """The second one is refused while the first is at work, and changes nothing of it."""
    refused = []

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        if not refused:
            with pytest.raises(LmtoolsError) as caught:
                run_ranks(1, train_a_leg, {"save_dir": str(tmp_path), "max_update": 1, "resume": "never"})
            refused.append(str(caught.value))
            assert (tmp_path / LAST).exists()
            assert len(metrics(tmp_path)) == 2
        return make_update(*args, **kwargs)

    train_a_leg({"save_dir": str(tmp_path), "max_update": 2})
    make_update = loop.make_update
    monkeypatch.setattr(loop, "make_update", meanwhile)
    train_a_leg({"save_dir": str(tmp_path), "max_update": 4})
    assert refused == [
        f"{tmp_path / 'metrics.jsonl'}: another run is writing to this folder; choose another --save-dir"
    ]
    assert len(metrics(tmp_path)) == 4
    assert os.readlink(tmp_path / LAST) == "checkpoint_1_4"
    train_a_leg({"save_dir": str(tmp_path), "max_update": 5})


def test_a_full_disk_costs_lines_of_the_metrics_but_not_the_run(tmp_path: Path, monkeypatch, capfd):
    pwrite = os.pwrite
    calls = itertools.count(1)

    def full_for_a_while(descriptor: int, line: bytes, place: int) -> int:
        number = next(calls)
        if number == 2:
            return pwrite(descriptor, line[:10], place)  # room for a piece of it
        if number == 3:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, line, place)

    monkeypatch.setattr(os, "pwrite", full_for_a_while)
    train_a_leg({"save_dir": str(tmp_path), "max_update": 5, "log_format": "simple"})
    assert [line["num_updates"] for line in metrics(tmp_path)] == [1, 4, 5]
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    path = tmp_path / "metrics.jsonl"
    assert warnings == [
        f"warning: {path}: no space left on the disk; free some space and run again; training goes on without its lines"
    ]


def test_data_that_name_no_folder():
    with pytest.raises(DataError, match=r"^DATA ':': names no folder, expected that of"):
        open_data(tiny_run(data=":").train)


def test_a_batch_that_holds_no_block_is_refused_before_the_run_starts():
    """What a folder has is taken out of a new run's way when it starts: nothing may stop it then."""
    with pytest.raises(ConfigError, match=r"^--max-tokens 15: block 0 has 16 tokens; allow as many, or "):
        open_data(tiny_run(max_tokens=15).train)
    open_data(tiny_run(max_tokens=16).train)
