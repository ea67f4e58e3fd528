"""Rates are those of training alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmtools.report.charts import tokens_per_second
from lmtools.train import loop, report
from lmtools.train.checkpoints import Keeper
from lmtools.train.curves import read_runs
from lmtools.train.loop import UpdateResult
from lmtools.train.precision import LossScaler
from lmtools.train.report import Reporter, _Line
from lmtools.train.state import Progress, TrainState
from lmtools.train.validation import Validation
from tests.support.training import cpu_mesh, tiny_run, train_a_leg

UPDATE = UpdateResult(
    loss_sum=640.0, num_tokens=64, gradient_norm=1.0, learning_rate=0.1, skipped=None, stop_signal=0, num_written=0,
    seconds=0.0,
)  # fmt: skip


@pytest.mark.parametrize("validates_after", [[], [5], [6, 9], [10], range(1, 20)])
def test_neither_validation_nor_its_place_changes_the_rate(tmp_path: Path, monkeypatch, capsys, validates_after):
    """Updates take 2 s each; a validation 100 s."""
    clock = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    run = tiny_run(log_interval=4, log_format="json", save_dir=str(tmp_path))
    reporter = Reporter(run, cpu_mesh(run), vocab_size=144)
    progress = Progress()
    state = TrainState(torch.nn.Linear(1, 1), None, LossScaler.of(run.train), progress)
    monkeypatch.setattr("lmtools.train.utilisation.matmul_flops_per_second", lambda *_: 1e12)
    reporter.begin(progress, "new", 1, torch.float32)
    for _ in range(20):
        clock[0] += 2
        progress.num_updates += 1
        reporter.update(UPDATE, state, epoch=1)
        if progress.num_updates in validates_after:
            clock[0] += 100
            reporter.validation([Validation("valid", 100.0, 50, None)], progress)
        reporter.next_update()
    reporter.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    rates = [(line["updates_per_second"], line["tokens_per_second"]) for line in lines if line["kind"] == "log"]
    assert rates == [(0.5, 32.0)] * 6, "after the first update and after every fourth"


def test_a_reports_speed_is_that_of_the_updates_alone(tmp_path: Path, monkeypatch):
    """A whole run: an update takes 2 s, a validation 100 s, and what a checkpoint keeps it waiting 50 s."""
    clock = [0.0]

    def takes(seconds, function):
        def run(*args, **options):
            clock[0] += seconds
            return function(*args, **options)

        return run

    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("lmtools.train.utilisation.matmul_flops_per_second", lambda *_: 1e12)
    monkeypatch.setattr(loop, "make_update", takes(2, loop.make_update))
    monkeypatch.setattr(loop, "validate", takes(100, loop.validate))
    monkeypatch.setattr(Keeper, "save_if_due", takes(50, Keeper.save_if_due))
    train_a_leg({"save_dir": str(tmp_path), "no_save": True, "max_update": 6, "valid_subset": "valid",
                 "validate_interval_updates": 2})  # fmt: skip

    [run] = read_runs([tmp_path])
    assert run.train.seconds.tolist() == [0, 52, 204, 256, 408, 460], "the run's age"
    assert run.train.training_seconds.tolist() == [2, 4, 6, 8, 10, 12]
    updates, rates = tokens_per_second(run.train)
    assert (updates.tolist(), rates.tolist()) == ([2, 3, 4, 5, 6], (run.train.weights[1:] / 2).tolist())


def test_the_peak_is_measured_only_where_a_share_of_it_is_shown(tmp_path: Path, monkeypatch, capsys):
    measured: list[object] = []
    monkeypatch.setattr("lmtools.train.utilisation.matmul_flops_per_second", lambda *_: measured.append(1) or 1e12)
    flags = {"no_save": True, "max_update": 2}
    train_a_leg(flags | {"save_dir": str(tmp_path / "none"), "log_format": "none"})
    assert (measured, capsys.readouterr().err) == ([], "")
    train_a_leg(flags | {"save_dir": str(tmp_path / "json"), "log_format": "json"})
    assert (len(measured), capsys.readouterr().err.count("flop_utilisation")) == (1, 1)
    train_a_leg(flags | {"save_dir": str(tmp_path / "board"), "tensorboard_logdir": str(tmp_path / "board")})
    assert len(measured) == 2


@pytest.mark.parametrize("num_columns", [40, 80, 200])
def test_on_a_terminal_of_any_width_all_of_the_line_is_there_and_the_bar_too(monkeypatch, capfd, num_columns):
    monkeypatch.setenv("COLUMNS", str(num_columns))
    text = " | ".join(f"a value {number}" for number in range(12))
    line = _Line(total=150, done=0)
    line.update(75)
    line.describe(text)
    line.close()
    shown = capfd.readouterr().err
    assert " ".join(shown.split()).startswith(text)
    assert " 75/150 " in shown.splitlines()[-1]
