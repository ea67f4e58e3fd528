"""Workers end well together, or all of them end and one line says why.

`fates.py` is the command: it goes through the real command line, launcher and processes. Its workers do not import
torch unless a test is about collectives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lmtools.errors import ConfigError, WorkerError
from lmtools.parallel.launch import is_worker, prefix_of_rank, process_group, run_workers, worker

FATES = Path(__file__).parent.parent / "support" / "fates.py"
MARKER = "LMTOOLS_TEST_MARKER"

WRITE_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([dict(os.environ), sys.argv]))
"""


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A value that every process of the test has in its environment; whoever is left at the end is killed."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield value
    for pid in processes_with(value):
        os.kill(pid, signal.SIGKILL)


def processes_with(marker: str) -> list[int]:
    """Living processes, other than this one, that were started with the marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> float:
    """Seconds until the condition held; fails when it takes too long."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited too long"
        time.sleep(0.05)
    return time.monotonic() - start


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [sys.executable, str(FATES), "fates", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process id of each rank."""
    workers = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = dict(each.partition(b"=")[::2] for each in (folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if parent == process.pid and b"RANK" in environment:
            workers[int(environment[b"RANK"])] = int(folder.name)
    return workers


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


def test_a_worker_that_leaves_without_a_word_is_named(marker: str) -> None:
    assert str(fail("0=exit")) == "rank 0 exited with code 7 and left no message"


def test_all_workers_start_again_when_asked(marker: str) -> None:
    command = (sys.executable, str(FATES), "fates", "2")
    run_workers(["0=succeed_after_restart", "1=succeed_after_restart"], num_workers=2, command=command, max_restarts=1)
    assert str(fail("0=succeed_after_restart")) == "rank 0 exited with code 1 and left no message"


# --- the command line ---


def test_the_command_prints_one_line_for_all_ranks_and_exits_with_1(marker: str) -> None:
    process = start("3", "0=error", "1=error", "2=error")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    assert stderr in {f"lmtools: rank {rank}: wiki.test.bpe:7: not a number\n" for rank in range(3)}


def test_the_command_prints_a_bugs_traceback_once(marker: str) -> None:
    process = start("2", "1=bug")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.count("Traceback (most recent call last)") == 1
    assert stderr.endswith("\nlmtools: rank 1: ZeroDivisionError: the bug's own words\n")


def test_success_is_silent(marker: str) -> None:
    process = start("2", "0=end", "1=end")
    assert process.communicate(timeout=60) == ("all ended well\n", "")
    assert process.returncode == 0


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


def test_a_rank_killed_in_a_collective_takes_all_with_it_in_time_and_is_named(tmp_path: Path, marker: str) -> None:
    process = start("3", *(f"{rank}=collective:{tmp_path / str(rank)}" for rank in range(3)))
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), seconds=90)
    os.kill(workers_of(process)[1], signal.SIGKILL)

    killed_at = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert processes_with(marker) == []
    assert time.monotonic() - killed_at < 10
    assert (process.returncode, stderr) == (1, "lmtools: rank 1 was killed by SIGKILL (out of memory?)\n")


@pytest.mark.parametrize("to_the_whole_group", [True, False], ids=["as from a terminal", "to the launcher alone"])
def test_ctrl_c_leaves_no_process_and_no_noise(to_the_whole_group: bool, marker: str) -> None:
    process = start("2", "0=sleep")
    wait_until(lambda: len(workers_of(process)) == 2)
    (os.killpg if to_the_whole_group else os.kill)(process.pid, signal.SIGINT)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 130
    assert processes_with(marker) == []


def test_two_runs_at_once_do_not_meet_and_sigterm_ends_one_of_them(marker: str) -> None:
    runs = [start("2", "0=sleep"), start("2", "0=sleep")]
    wait_until(lambda: all(len(workers_of(run)) == 2 for run in runs))
    ports = {
        variable
        for run in runs
        for pid in workers_of(run).values()
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if variable.startswith(b"MASTER_PORT=")
    }
    assert len(ports) == 2
    for run, others in zip(runs, [3, 0], strict=True):
        run.send_signal(signal.SIGTERM)
        assert run.communicate(timeout=10) == ("", "")
        assert run.returncode == 143
        assert len(processes_with(marker)) == others


def test_workers_follow_a_launcher_that_is_killed(marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it cannot remove any more
    process = start("2", "0=sleep")
    wait_until(lambda: len(workers_of(process)) == 2)
    process.kill()
    process.communicate(timeout=10)
    wait_until(lambda: processes_with(marker) == [], seconds=5)


def test_workers_that_handle_the_stop_signal_have_time_to_save(tmp_path: Path, marker: str) -> None:
    saved = [tmp_path / str(rank) for rank in range(2)]
    process = start("2", *(f"{rank}=save:{path}" for rank, path in enumerate(saved)), "--save-on-stop")
    wait_until(lambda: all(path.exists() for path in saved))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 143
    assert [path.read_text() for path in saved] == ["saved", "saved"]


def test_a_second_signal_does_not_wait_for_workers_that_save(tmp_path: Path, marker: str) -> None:
    ready = tmp_path / "ready"
    process = start("2", f"1=never_done_saving:{ready}", "--save-on-stop")
    wait_until(ready.exists)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 130
    assert processes_with(marker) == []


# --- the worker's side ---


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
