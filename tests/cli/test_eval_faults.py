"""An evaluation that is killed, robbed of its disk or started twice: nothing is lost, left behind or wrong.

Commands run in processes of their own that have torch imported already; their workers, where they have some, start from
nothing, as always.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lmtools.evaluate.journal import ScoreJournal
from tests.support.ranks import processes_with_torch

MARKER = "LMTOOLS_TEST_MARKER"
OF_THE_RUN = ("seconds", "tokens_per_second", "tokens_resumed")
"""What two runs of one evaluation may say differently."""


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A value that every process of the test has in its environment; whoever is left at the end is killed."""
    processes_with_torch()  # the server of other tests shall not have it
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, value)
    yield value
    for pid, _ in processes_with(value):
        os.kill(pid, signal.SIGKILL)


def processes_with(marker: str) -> list[tuple[int, dict[str, str]]]:
    """Living processes with the marker, other than this one, and their environments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        if environment.get(MARKER) == marker and int(folder.name) != os.getpid():
            found.append((int(folder.name), environment))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited too long"
        time.sleep(0.005)


@dataclass(frozen=True)
class Running:
    """`lmtools eval`, in a process group of its own."""

    process: BaseProcess
    output: Path
    errors: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def result(self, seconds: float = 90.0) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "the command did not end in time"
        return self.process.exitcode, self.output.read_text(), self.errors.read_text()


Start = Callable[..., Running]


@pytest.fixture
def start(marker: str, golden: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `lmtools eval` of the golden model, window by window, with more options."""
    started: list[Running] = []

    def start_eval(*options: object, largest_file: int = -1, batch_size: int = 1) -> Running:
        output, errors = tmp_path / f"stdout{len(started)}", tmp_path / f"stderr{len(started)}"
        arguments = ["eval", golden / "bin", "--path", golden / "mp4", "--context-window", 24]
        arguments += ["--batch-size", batch_size, *options]
        process = processes_with_torch().Process(
            target=_be_lmtools, args=([*map(str, arguments)], dict(os.environ), output, errors, largest_file)
        )
        process.start()
        started.append(Running(process, output, errors))
        return started[-1]

    yield start_eval
    for running in started:
        running.process.kill()
        running.process.join()


def _be_lmtools(
    arguments: Sequence[str], environment: dict[str, str], output: Path, errors: Path, largest_file: int
) -> None:
    os.setsid()
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["lmtools", *arguments]

    import torch

    from lmtools.cli import main

    torch.set_num_threads(1)
    main()


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
    running = start(*options)
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
    held = ScoreJournal.create(journal, {})
    outcome = start("--output", result).result()
    held.close()
    assert outcome == (
        2,
        "",
        f"lmtools: {journal}: another evaluation is writing it; wait for its end, or choose another --output\n",
    )


# --- many processes ---


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
    assert outputs[0] == outputs[1]
    assert (outputs[0]["mp"], outputs[0]["dp"], outputs[0]["num_parts"]) == (2, 1, 4)
    assert len(outputs[0]["checkpoint_sha256"]) == 4, "of all parts, whoever hashed them"
    assert (tmp_path / "lmtools.npy").read_bytes() == (tmp_path / "torchrun.npy").read_bytes()


def test_a_killed_rank_ends_all_in_time_and_its_run_is_resumed_on_fewer(
    start: Start, result: Path, journal: Path, marker: str
):
    running = start("--output", result, "--mp", 2)
    wait_until(lambda: has_scored(journal, 100), seconds=120)
    [victim] = [pid for pid, environment in processes_with(marker) if environment.get("RANK") == "1"]
    os.kill(victim, signal.SIGKILL)
    assert running.result(10) == (1, "", "lmtools: rank 1 was killed by SIGKILL (out of memory?)\n")
    assert processes_with(marker) == []
    assert not result.exists()

    assert start("--output", result, "--resume", batch_size=50).result()[0] == 0
    outcome = json.loads(result.read_text())
    assert outcome["tokens_resumed"] >= 100 - 50 * 8
    assert outcome["loss_base2"] == pytest.approx(1.7151482105, rel=1e-5)


@pytest.mark.parametrize("mp", [1, 2])
def test_ctrl_c_leaves_nobody(start: Start, result: Path, journal: Path, marker: str, mp):
    running = start("--output", result, "--mp", mp)
    wait_until(lambda: has_scored(journal, 100), seconds=120)
    os.killpg(running.pid, signal.SIGINT)
    exit_code, out, _ = running.result(10)
    assert (exit_code, out) == (130, "")
    assert processes_with(marker) == []
    assert not result.exists()
    assert journal.exists(), "to be resumed"
