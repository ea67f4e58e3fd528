"""Workers end well together, or all of them end and one line says why.

`fates.py` is the command: it goes through the real command line, launcher and processes. Its workers do not import
torch unless a test is about collectives.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmtools.errors import ConfigError, WorkerError
from lmtools.parallel.launch import is_worker, prefix_of_rank, process_group, run_workers, worker
from tests.support.processes import all_processes, look_at, processes_with, wait_until
from tests.support.ranks import processes_with_torch

FATES = Path(__file__).parent.parent / "support" / "fates.py"

WRITE_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([dict(os.environ), sys.argv]))
"""


@pytest.fixture
def marker(marker: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commands of this file have it, and as many threads as they choose."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return marker


@dataclass(frozen=True)
class Command:
    """A running `fates.py`, in a session and process group of its own."""

    process: BaseProcess
    output: Path
    errors: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def has_ended(self, seconds: float = 0.0) -> bool:
        self.process.join(seconds)
        return self.process.exitcode is not None

    def result(self, seconds: float = 10.0) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        assert self.has_ended(seconds), "the command did not end in time"
        return self.process.exitcode, self.output.read_text(), self.errors.read_text()


Start = Callable[..., Command]


@pytest.fixture
def start(marker: str, tmp_path: Path) -> Iterator[Start]:
    """Starts the command in a process that has torch imported already: 2 s less for each test."""
    commands: list[Command] = []

    def start_command(*arguments: str) -> Command:
        output, errors = tmp_path / f"output{len(commands)}", tmp_path / f"errors{len(commands)}"
        process = processes_with_torch().Process(
            target=_be_the_command, args=(arguments, dict(os.environ), output, errors)
        )
        process.start()
        commands.append(Command(process, output, errors))
        return commands[-1]

    yield start_command
    for command in commands:
        command.process.kill()
        command.process.join()


def _be_the_command(arguments: Sequence[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    os.setsid()
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(FATES), "fates", *arguments]
    runpy.run_path(str(FATES), run_name="__main__")


def workers_of(command: Command) -> dict[int, int]:
    """Process id of each rank."""
    return {
        int(process.environment["RANK"]): process.pid
        for process in all_processes()
        if process.parent == command.pid and "RANK" in process.environment
    }


# --- what a worker sees ---


def test_workers_get_torchruns_environment_and_the_arguments_as_they_were(tmp_path: Path, marker: str) -> None:
    arguments = [str(tmp_path), "", "costs $$5", "${local_rank}", "two words", "--flag"]
    before = dict(os.environ), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    run_workers(arguments, num_workers=3, command=(sys.executable, "-c", WRITE_ENVIRONMENT))

    environments = []
    for rank in range(3):
        environment, argv = json.loads((tmp_path / str(rank)).read_text())
        assert argv[1:] == arguments
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        environments.append(environment)
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in environments}) == 1
    assert all(int(each["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3) for each in environments)
    os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # elastic's
    assert (dict(os.environ), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]) == before


def test_what_the_user_has_set_stays(tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    run_workers([str(tmp_path)], num_workers=2, command=(sys.executable, "-c", WRITE_ENVIRONMENT))
    environment, _ = json.loads((tmp_path / "1").read_text())
    assert (environment["OMP_NUM_THREADS"], environment["GLOO_SOCKET_IFNAME"]) == ("5", "eth7")


def test_more_processes_than_the_machine_can_hold_are_refused_before_any_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"^100000 processes need 12,500 GiB of memory before they hold anything"):
        run_workers([str(tmp_path)], num_workers=100_000, command=(sys.executable, "-c", WRITE_ENVIRONMENT))
    assert not list(tmp_path.iterdir())


def test_job_variables_that_count_machines_do_not_make_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    assert (is_worker(), prefix_of_rank()) == (False, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (is_worker(), prefix_of_rank()) == (True, "rank 0: ")


# --- who is named when it fails ---


def fail(*fates: str, num_workers: int = 3, max_restarts: int = 0) -> WorkerError:
    command = (sys.executable, str(FATES), "fates", str(num_workers))
    with pytest.raises(WorkerError) as caught:
        run_workers(fates, num_workers=num_workers, command=command, max_restarts=max_restarts)
    return caught.value


def test_an_error_of_a_worker_is_raised_here(marker: str) -> None:
    error = fail("2=error")
    assert (str(error), error.traceback) == ("rank 2: wiki.test.bpe:7: not a number", "")
    assert processes_with(marker) == []


def test_a_bug_keeps_its_traceback(marker: str) -> None:
    error = fail("0=end", "1=bug")
    assert str(error) == "rank 1: ZeroDivisionError: the bug's own words"
    assert 'raise ZeroDivisionError("the bug\'s own words")' in error.traceback


def test_a_killed_worker_is_named_with_its_signal(marker: str) -> None:
    assert str(fail("1=killed")) == "rank 1 was killed by SIGKILL (out of memory?)"


@pytest.mark.slow
def test_a_killed_worker_is_named_though_its_peers_know_of_it_first(tmp_path: Path, marker: str) -> None:
    """A busy system closes its connections, and only after a while tells its parent that it has ended."""
    lost = tmp_path / "lost"
    error = fail(f"0=lose_a_peer:{lost}", f"1=killed_a_little_later:{lost}")
    assert str(error) == "rank 1 was killed by SIGKILL (out of memory?)"
    assert str(fail(f"0=lose_a_peer:{lost}")).startswith("rank 0: RuntimeError: [third_party/gloo/")


def test_a_worker_that_leaves_without_a_word_is_named(marker: str) -> None:
    assert str(fail("0=exit")) == "rank 0 exited with code 7 and left no message"


@pytest.mark.slow
def test_all_workers_start_again_when_asked(marker: str) -> None:
    command = (sys.executable, str(FATES), "fates", "2")
    run_workers(["0=succeed_after_restart", "1=succeed_after_restart"], num_workers=2, command=command, max_restarts=1)
    assert str(fail("0=succeed_after_restart")) == "rank 0 exited with code 1 and left no message"


@pytest.mark.slow
def test_workers_find_each_other_though_their_agents_have_counted_other_restarts() -> None:
    """As after a failure on one of two machines."""
    fates = ["0=restarted_by_its_agent_alone", "1=restarted_by_its_agent_alone"]
    run_workers(fates, num_workers=2, command=(sys.executable, str(FATES), "fates", "2"))


# --- the command line ---


def test_the_command_prints_one_line_for_all_ranks_and_exits_with_1(start: Start) -> None:
    exit_code, output, errors = start("3", "0=error", "1=error", "2=error").result()
    assert (exit_code, output) == (1, "")
    assert errors in {f"lmtools: rank {rank}: wiki.test.bpe:7: not a number\n" for rank in range(3)}


def test_wrong_usage_exits_with_2_also_when_a_worker_finds_it(start: Start) -> None:
    assert start("2", "1=usage").result() == (2, "", "lmtools: rank 1: --mp 3: does not divide the heads\n")


@pytest.mark.slow
def test_the_command_prints_a_bugs_traceback_once(start: Start) -> None:
    exit_code, _, errors = start("2", "1=bug").result()
    assert exit_code == 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.endswith("\nlmtools: rank 1: ZeroDivisionError: the bug's own words\n")


def test_success_is_silent_and_ends_before_teardown_can_spoil_it(marker: str) -> None:
    process = subprocess.run(  # not `start`: for once, from nothing, as a user does
        [sys.executable, str(FATES), "fates", "2", "0=end", "1=end_and_abort_in_teardown"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "all ended well\n", "")


@pytest.mark.slow
def test_under_torchrun_the_failing_rank_prints_the_line_itself(marker: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    process = subprocess.run(
        [*torchrun, str(FATES), "fates", "2", "0=end", "1=error"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 1
    assert "lmtools: rank 1: wiki.test.bpe:7: not a number\n" in process.stderr
    assert "all ended well" not in process.stdout


# --- nobody is left behind ---


def test_a_rank_killed_in_a_collective_takes_all_with_it_in_time_and_is_named(
    start: Start, tmp_path: Path, marker: str
) -> None:
    command = start("3", *(f"{rank}=collective:{tmp_path / str(rank)}" for rank in range(3)))
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), seconds=90)
    os.kill(workers_of(command)[1], signal.SIGKILL)
    assert command.result(10) == (1, "", "lmtools: rank 1 was killed by SIGKILL (out of memory?)\n")
    assert processes_with(marker) == []


@pytest.mark.parametrize("to_the_whole_group", [True, False], ids=["as from a terminal", "to the launcher alone"])
def test_ctrl_c_leaves_no_process_and_no_noise(start: Start, to_the_whole_group: bool, marker: str) -> None:
    command = start("2", "0=sleep")
    wait_until(lambda: len(workers_of(command)) == 2)
    (os.killpg if to_the_whole_group else os.kill)(command.pid, signal.SIGINT)
    assert command.result() == (130, "", "")
    assert processes_with(marker) == []


@pytest.fixture
def start_one_then(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Lets something happen between the start of the first worker and that of the second."""
    started: list[subprocess.Popen[bytes]] = []

    def install(action: Callable[[], None]) -> None:
        def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
            if started:
                action()
            started.append(subprocess.Popen(*args, **kwargs))
            return started[-1]

        module = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        monkeypatch.setattr(importlib.import_module(module), "Popen", popen)

    yield install
    assert len(started) == 1
    started[0].wait()


def test_a_signal_between_the_starts_of_workers_leaves_none(start_one_then, marker: str) -> None:
    start_one_then(lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        run_workers([str(FATES), "fates", "2", "0=sleep"], num_workers=2, command=(sys.executable,))
    assert caught.value.code == 143
    assert processes_with(marker) == []


@pytest.mark.parametrize("number", [errno.EAGAIN, pytest.param(errno.ENOMEM, marks=pytest.mark.slow)])
def test_a_worker_that_cannot_be_started_leaves_none(start_one_then, marker: str, number: int) -> None:
    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    start_one_then(refuse)
    with pytest.raises(
        ConfigError, match=r"^2 processes cannot be started \(.*\); choose smaller --mp and --dp, or allow"
    ):
        run_workers([str(FATES), "fates", "2", "0=sleep"], num_workers=2, command=(sys.executable,))
    assert processes_with(marker) == []


def test_two_runs_at_once_do_not_meet_and_sigterm_ends_one_of_them(start: Start, marker: str) -> None:
    runs = [start("2", "0=sleep"), start("2", "0=sleep")]
    wait_until(lambda: all(len(workers_of(run)) == 2 for run in runs))
    ports = {look_at(pid).environment["MASTER_PORT"] for run in runs for pid in workers_of(run).values()}
    assert len(ports) == 2
    for run, others in zip(runs, [2, 0], strict=True):
        os.kill(run.pid, signal.SIGTERM)
        assert run.result() == (143, "", "")
        assert len(processes_with(marker)) == others


@pytest.mark.parametrize("killed", ["launcher", "rank"])
def test_what_workers_were_writing_goes_with_them(start: Start, tmp_path: Path, killed: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = start("2", *(f"{rank}=write:{folder / str(rank)}" for rank in range(2)))
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    if killed == "launcher":
        os.kill(command.pid, signal.SIGTERM)
    else:
        os.kill(workers_of(command)[1], signal.SIGKILL)
    assert command.result()[0] == (143 if killed == "launcher" else 1)
    assert list(folder.iterdir()) == []


def test_workers_follow_a_launcher_that_is_killed(
    start: Start, tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for what it cannot remove any more
    command = start("2", "0=sleep")
    wait_until(lambda: len(workers_of(command)) == 2)
    command.process.kill()
    wait_until(lambda: processes_with(marker) == [], seconds=5)


def test_workers_that_handle_the_stop_signal_have_time_to_save(start: Start, tmp_path: Path) -> None:
    saved = [tmp_path / str(rank) for rank in range(2)]
    command = start("2", *(f"{rank}=save:{path}" for rank, path in enumerate(saved)), "--save-on-stop")
    wait_until(lambda: all(path.exists() for path in saved))
    os.kill(command.pid, signal.SIGTERM)
    assert command.result() == (143, "", "")
    assert [path.read_text() for path in saved] == ["saved", "saved"]


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_workers_that_save(start: Start, tmp_path: Path, marker: str) -> None:
    ready = tmp_path / "ready"
    command = start("2", f"1=never_done_saving:{ready}", "--save-on-stop")
    wait_until(ready.exists)
    os.kill(command.pid, signal.SIGINT)
    assert not command.has_ended(seconds=1)
    os.kill(command.pid, signal.SIGINT)
    assert command.result() == (130, "", "")
    assert processes_with(marker) == []


# --- the worker's side ---


@pytest.mark.parametrize(("fate", "exit_code"), [("end", 0), ("end_and_abort_in_teardown", 0), ("exit", 7)])
def test_a_worker_without_our_launcher_ends_the_same_way(fate: str, exit_code: int) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(FATES), "fates", "2", f"1={fate}"]
    assert subprocess.run(command, env={**os.environ, **ranks}, timeout=60, check=False).returncode == exit_code


def test_outside_a_launchers_worker_an_error_passes_through() -> None:
    with pytest.raises(ConfigError, match="as it is"), worker():
        raise ConfigError("as it is")


def test_a_world_of_one_needs_no_process_group() -> None:
    with process_group("cpu", timeout=timedelta(seconds=1)) as device:
        assert device == torch.device("cpu")
        assert not dist.is_initialized()


def test_a_rank_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="process 3 on this machine has no GPU, 2 found"), process_group("cuda"):
        pass
