"""An evaluation that is killed, robbed of its disk or started twice: nothing is lost, left behind or wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtools.evaluate.journal import ScoreJournal, Scores
from tests.support.commands import Running, start_command
from tests.support.processes import processes_with, wait_until

OF_THE_RUN = ("seconds", "tokens_per_second", "tokens_resumed")
"""What two runs of one evaluation may say differently."""


Start = Callable[..., Running]


@pytest.fixture
def start(marker: str, golden: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `lmtools eval` of the golden model, window by window, with more options."""
    started: list[Running] = []

    def start_eval(*options: object, largest_file: int = -1, batch_size: int = 1, endless: bool = False) -> Running:
        arguments = ["eval", golden / "bin", "--path", golden / "mp4", "--context-window", 24]
        arguments += ["--batch-size", batch_size, *options]
        prepare = never_score_the_last_tokens if endless else None
        started.append(start_command(arguments, tmp_path, largest_file=largest_file, prepare=prepare))
        return started[-1]

    yield start_eval
    for running in started:
        running.process.kill()
        running.process.join()


def never_score_the_last_tokens() -> None:
    """In a command of one process: it is at work until somebody ends it."""
    append, num_scored = ScoreJournal.append, 0

    def append_or_wait(journal: ScoreJournal, scores: Scores) -> None:
        nonlocal num_scored
        num_scored += len(scores)
        if num_scored > 5000:
            time.sleep(300)
        append(journal, scores)

    ScoreJournal.append = append_or_wait  # type: ignore[method-assign]


@pytest.fixture
def result(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "result.json.test.partial"


def has_scored(journal: Path, num_tokens: int) -> bool:
    return journal.exists() and len(journal.read_bytes().partition(b"\n")[2]) >= 4 * num_tokens


def number(path: Path) -> dict[str, Any]:
    """A result without what belongs to the run that made it."""
    document = json.loads(path.read_text())
    return {key: value for key, value in document.items() if key not in OF_THE_RUN}


# --- killed, and resumed ---


def test_a_killed_run_resumes_to_the_same_bits(start: Start, result: Path, journal: Path, tmp_path: Path):
    scores = tmp_path / "scores.npy"
    options = ["--output", result, "--scores", scores, "--batch-size", 3]
    running = start(*options, endless=True)
    wait_until(lambda: has_scored(journal, 300))
    os.kill(running.pid, signal.SIGKILL)
    assert running.result()[0] == -signal.SIGKILL
    assert not result.exists()
    assert not scores.exists()
    with open(journal, "ab") as stream:
        stream.write(b"\x00\x00\x80\xbf\x00")  # one score of an unfinished batch, and a byte of the next

    other = start(*options, "--resume", "--add-bos-token", "--context-window", 0)
    assert other.result() == (
        2,
        "",
        f"lmtools: {journal}: is of an evaluation with add_bos_token False, this one has True; run it with the same, "
        "or without --resume to start over\n",
    )

    assert start(*options, "--resume").result()[0] == 0
    resumed, resumed_scores = number(result), scores.read_bytes()
    assert 300 <= json.loads(result.read_text())["tokens_resumed"] < 5184
    assert json.loads(result.read_text())["tokens_resumed"] % 24 == 0, "whole batches, as the first run had made them"
    assert not journal.exists()
    assert start(*options).result()[0] == 0
    assert number(result) == resumed
    assert scores.read_bytes() == resumed_scores


def test_resuming_nothing_starts(start: Start, result: Path, journal: Path):
    assert start("--output", result, "--resume", batch_size=100).result()[0] == 0
    journal.touch()  # as a process leaves it that is killed before its first word
    first = number(result)
    assert start("--output", result, "--resume", batch_size=100).result()[0] == 0
    assert number(result) == first
    assert not journal.exists()


def test_what_starting_over_throws_away_is_said(lmtools, golden, result, journal):
    arguments = ["eval", golden / "bin", "--path", golden / "mp4", "--batch-size", 200, "--output", result]
    assert lmtools(*arguments, "--scores", "/dev/full").code == 1
    assert has_scored(journal, 5184)
    ran = lmtools(*arguments)
    assert (ran.code, ran.err) == (
        0,
        f"{journal}: 5,184 tokens that an unfinished run had scored are discarded; --resume would have kept them\n",
    )
    assert json.loads(result.read_text())["tokens_resumed"] == 0
    assert lmtools(*arguments).err == "", "a run that ended left nothing to discard"


# --- the disk ---


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(start: Start, result: Path, journal: Path):
    result.write_text("of an earlier run")
    exit_code, out, errors = start("--output", result, largest_file=10_000).result()
    assert (exit_code, out) == (1, "")
    assert errors == f"lmtools: {journal}: larger than this file system or process may write\n"
    assert result.read_text() == "of an earlier run"
    assert start("--output", result, "--resume", batch_size=100).result()[0] == 0
    outcome = json.loads(result.read_text())
    assert 0 < outcome["tokens_resumed"] < 2500
    assert outcome["loss_base2"] == pytest.approx(1.7151482105, rel=1e-5)


# --- twice at once ---


def test_one_run_at_a_time_has_an_output(start: Start, result: Path, journal: Path):
    held = ScoreJournal.create(journal, {}, pytest.fail)
    outcome = start("--output", result).result()
    held.close()
    assert outcome == (
        2,
        "",
        f"lmtools: {journal}: another evaluation is writing it; wait for its end, or choose another --output\n",
    )


# --- many processes ---


@pytest.mark.slow
def test_torchrun_and_lmtools_start_the_same_evaluation(start: Start, golden: Path, tmp_path: Path):
    """Also: a result goes to standard output once."""
    arguments = ["--mp", "2", "--json", "--scores"]
    started = start(*arguments, tmp_path / "lmtools.npy", batch_size=100)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lmtools", "eval"]
    command += [str(golden / "bin"), "--path", str(golden / "mp4"), "--context-window", "24", "--batch-size", "100"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, *arguments, str(tmp_path / "torchrun.npy")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    exit_code, out, errors = started.result()
    assert (exit_code, errors) == (0, "")
    outputs = [json.loads(text) for text in (out, ran.stdout)]
    for output in outputs:
        for key in OF_THE_RUN:
            del output[key]
        del output["scores"]["path"]
    assert outputs[0] == outputs[1]
    assert (outputs[0]["mp"], outputs[0]["dp"], outputs[0]["num_parts"]) == (2, 1, 4)
    assert len(outputs[0]["checkpoint_sha256"]) == 4, "of all parts, whoever hashed them"
    assert (tmp_path / "lmtools.npy").read_bytes() == (tmp_path / "torchrun.npy").read_bytes()


@pytest.mark.slow
def test_a_killed_rank_ends_all_in_time_and_its_run_is_resumed_on_fewer(
    start: Start, result: Path, journal: Path, marker: str
):
    running = start("--output", result, "--mp", 2)
    wait_until(lambda: has_scored(journal, 100), seconds=120)
    [victim] = [process.pid for process in processes_with(marker) if process.environment.get("RANK") == "1"]
    os.kill(victim, signal.SIGKILL)
    assert running.result(10) == (1, "", "lmtools: rank 1 was killed by SIGKILL (out of memory?)\n")
    assert processes_with(marker) == []
    assert not result.exists()

    assert start("--output", result, "--resume", batch_size=50).result()[0] == 0
    outcome = json.loads(result.read_text())
    assert outcome["tokens_resumed"] >= 100 - 50 * 8
    assert outcome["loss_base2"] == pytest.approx(1.7151482105, rel=1e-5)


@pytest.mark.parametrize("mp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_nobody(start: Start, result: Path, journal: Path, marker: str, mp):
    running = start("--output", result, "--mp", mp, endless=mp == 1)
    wait_until(lambda: has_scored(journal, 100), seconds=120)
    os.killpg(running.pid, signal.SIGINT)
    exit_code, out, _ = running.result(10)
    assert (exit_code, out) == (130, "")
    assert processes_with(marker) == []
    assert not result.exists()
    assert journal.exists(), "to be resumed"
