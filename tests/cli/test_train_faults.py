"""A training run that is stopped, killed or refused: what was trained is kept, and nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmtools.errors import ConfigError
from lmtools.parallel import mesh
from tests.support.agents import run_on_two_agents
from tests.support.commands import Running, start_command
from tests.support.processes import processes_with

MODEL = ["--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32]
MODEL += ["--decoder-attention-heads", 4, "--arch", "transformer_lm_megatron"]
RUN = ["--tokens-per-sample", 32, "--batch-size", 2, "--lr", 1e-3, "--log-format", "none", "--seed", 3]
ENDLESS = ["--max-update", 1_000_000]

TINY_TAIL = ["--arch", "transformer_xl", "--task", "truncated_bptt_lm", "--n-layer", 1, "--d-model", 16]
TINY_TAIL += ["--n-head", 4, "--d-head", 4, "--d-inner", 16, "--cutoffs", 139]
"""A Transformer-XL whose second cluster has the last 5 of 144 types."""

Start = Callable[..., Running]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start(marker: str, golden: Path, folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `lmtools train` of a tiny model, with more options."""
    started: list[Running] = []

    def start_train(*options: object) -> Running:
        arguments = ["train", golden / "bin", "--save-dir", folder, *MODEL, *RUN, *options]
        started.append(start_command(arguments, tmp_path))
        return started[-1]

    yield start_train
    for running in started:
        running.process.kill()
        running.process.join()


def updates(folder: Path) -> list[dict[str, Any]]:
    """The run's updates, as far as whole lines of its metrics go."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "update"]


def num_saved(folder: Path) -> int:
    return int(os.readlink(folder / "checkpoint_last").rpartition("_")[2])


# --- stopped ---


@pytest.mark.parametrize(
    ("number", "exit_code", "mp"),
    [
        pytest.param(signal.SIGTERM, 143, 2, marks=pytest.mark.slow),
        (signal.SIGINT, 130, 1),
        pytest.param(signal.SIGUSR1, 138, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_then_ends_and_the_same_command_goes_on(
    start: Start, folder: Path, marker: str, number, exit_code, mp
):
    running = start("--mp", mp, *ENDLESS)
    running.wait_until(lambda: len(updates(folder)) > 5)
    os.kill(running.pid, number)
    ended, out, errors = running.result(60)
    assert (ended, out) == (exit_code, ""), errors
    assert processes_with(marker) == []
    trained = len(updates(folder))
    assert num_saved(folder) == trained, "the update that was under way is finished, and saved"

    assert start("--mp", mp, "--max-update", trained + 3).result(120)[0] == 0
    assert [line["num_updates"] for line in updates(folder)] == list(range(1, trained + 4))
    assert num_saved(folder) == trained + 3


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_reaches_all_processes_and_saves_once(start: Start, folder: Path, marker: str):
    running = start("--mp", 2, *ENDLESS)
    running.wait_until(lambda: len(updates(folder)) > 5)
    os.killpg(running.pid, signal.SIGINT)
    assert running.result(60)[0] == 130
    assert processes_with(marker) == []
    assert num_saved(folder) == len(updates(folder))


def test_a_signal_ends_ranks_at_once_until_they_have_found_each_other(lmtools, golden: Path, folder: Path, monkeypatch):
    """A rank that only remembers it would wait for one that it has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}

    @contextmanager
    def open_mesh(**_: object) -> Iterator[None]:
        assert {number: signal.getsignal(number) for number in before} == before
        raise ConfigError("as far as this")
        yield

    monkeypatch.setattr(mesh, "open_mesh", open_mesh)
    ran = lmtools("train", golden / "bin", "--save-dir", folder, *MODEL, *RUN, "--max-update", 1)
    assert ran.err == "lmtools: as far as this\n"


# --- killed ---


def rank_1(marker: str) -> list[int]:
    return [process.pid for process in processes_with(marker) if process.environment.get("RANK") == "1"]


@pytest.mark.slow
def test_a_killed_rank_ends_all_in_time(start: Start, folder: Path, marker: str):
    running = start("--mp", 2, "--save-interval-updates", 4, *ENDLESS)
    running.wait_until(lambda: (folder / "checkpoint_last").exists())
    os.kill(rank_1(marker)[0], signal.SIGKILL)
    assert running.result(10) == (1, "", "lmtools: rank 1 was killed by SIGKILL (out of memory?)\n")
    assert processes_with(marker) == []
    assert num_saved(folder) >= 4


@pytest.mark.slow
def test_restarts_go_on_from_the_last_checkpoint(start: Start, folder: Path, marker: str):
    running = start("--mp", 2, "--restarts", 1, "--save-interval-updates", 4, *ENDLESS)
    running.wait_until(lambda: (folder / "checkpoint_last").exists())
    [victim] = rank_1(marker)
    os.kill(victim, signal.SIGKILL)
    running.wait_until(lambda: rank_1(marker) not in ([], [victim]))
    saved = num_saved(folder)
    running.wait_until(lambda: num_saved(folder) > saved)
    os.kill(running.pid, signal.SIGTERM)
    exit_code, _, errors = running.result(60)
    assert exit_code == 143, errors
    trained = num_saved(folder)
    assert [line["num_updates"] for line in updates(folder)] == list(range(1, trained + 1))
    assert processes_with(marker) == []


# --- refused before any worker starts ---


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--mp", 3], 2, "heads"),
        (["--mp", 4, *TINY_TAIL], 2, "--mp 4: leaves a rank without any of the vocabulary of 5; use fewer"),
        (["--train-subset", "none-such"], 1, "none-such"),
        (["--restore-file", "none-such"], 1, "none-such"),
        (["--lr-scheduler", "inverse_sqrt", "--warmup-updates", -1], 2, "warmup"),
        (["--tokens-per-sample", 0], 2, "tokens-per-sample"),
    ],
)
def test_what_cannot_work_is_one_line(lmtools, golden: Path, folder: Path, options, exit_code, message):
    model = [] if "--arch" in options else MODEL
    ran = lmtools("train", golden / "bin", "--save-dir", folder, *model, *RUN, "--max-update", 1, *options)
    assert (ran.code, ran.out) == (exit_code, "")
    assert message in ran.err
    assert ran.err.startswith("lmtools: ")
    assert ran.err.count("\n") == 1
    assert not folder.exists()


# --- two machines ---


@pytest.mark.slow
def test_two_agents_train_as_one_launcher(start: Start, golden: Path, folder: Path, tmp_path: Path):
    """torchrun twice, as on two machines: the mesh spans both, and the losses are those of one machine."""
    options = ["--dp", 2, "--max-update", 4]
    assert start(*options).result(120)[0] == 0
    train = ["train", golden / "bin", "--save-dir", tmp_path / "agents", *MODEL, *RUN, *options]
    run_on_two_agents(train, tmp_path)
    found, expected = updates(tmp_path / "agents"), updates(folder)
    assert len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss_base2"] == theirs["loss_base2"]
        assert ours["gradient_norm"] == theirs["gradient_norm"]
