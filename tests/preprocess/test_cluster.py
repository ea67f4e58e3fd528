"""The text stages on a Dask cluster: real scheduler, real workers, some of which die."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from lmtools.artifacts import read_manifest
from lmtools.errors import ConfigError, DataError, LmtoolsError, WorkerError
from lmtools.preprocess import cluster as cluster_module
from lmtools.preprocess.binarize import BinarizeJob, DictionaryRules, binarize
from lmtools.preprocess.bpe import bpe_encode
from lmtools.preprocess.cluster import Cluster, Expected, dask_cluster, fault, look
from lmtools.preprocess.detok import detok
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary
from lmtools.preprocess.workers import run_ordered
from tests.support import tasks
from tests.support.dask_cluster import DaskProcesses, dask_processes

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskProcesses]:
    """A scheduler with two workers; a test that kills one starts another."""
    with dask_processes(tmp_path_factory.mktemp("dask")) as dask:
        for _ in range(2):
            dask.start_worker()
        yield dask


@pytest.fixture
def text(golden: Path, tmp_path: Path) -> Path:
    """Enough of it for several pieces."""
    path = tmp_path / "a.raw"
    line = (golden / "train.txt").read_bytes()
    path.write_bytes(line * (600_000 // len(line)))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_stages(folder: Path, text: Path, between: Callable[[], None], cluster: Cluster | None = None) -> None:
    """All three stages into a folder; `between` is called when the first piece of each is done."""
    folder.mkdir(exist_ok=True)
    detokenized, ids = str(folder / "a.detok"), str(folder / "a.bpe")
    stages: list[Callable[..., object]] = [
        partial(detok, str(text), detokenized),
        partial(bpe_encode, [detokenized], [ids], vocabulary=find_vocabulary(None, None)),
        partial(binarize, BinarizeJob({"train": ids, "valid": ids}, folder / "bin", ids, DictionaryRules())),
    ]
    for stage in stages:
        calls: list[int] = []

        def progress(num_bytes: int, calls: list[int] = calls) -> None:
            calls.append(num_bytes)
            if len(calls) == 1:
                between()

        stage(workers=2, executor=cluster.executor if cluster else None, progress=progress)
        assert len(calls) > 4


@pytest.mark.slow
def test_same_bytes_as_here_though_a_worker_is_killed_in_each_stage(
    dask: DaskProcesses, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtools.preprocess.detok._PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("lmtools.preprocess.bpe._PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("lmtools.preprocess.binarize._MIN_RANGE_BYTES", 1 << 16)
    here, there = tmp_path / "here", tmp_path / "there"
    run_stages(here, text, lambda: None)

    def kill_one() -> None:
        dask.start_worker()
        dask.kill(dask.processes[1])

    with dask_cluster(dask.address, reads=[str(text)], writes=[str(there / "a.detok")]) as cluster:
        run_stages(there, text, kill_one, cluster)
    assert files(there) == files(here)


def test_the_task_of_a_killed_worker_is_run_again(dask: DaskProcesses, tmp_path: Path) -> None:
    with dask_cluster(dask.address, reads=[], writes=[]) as cluster:
        [ran] = run_ordered(tasks.die_once, [tmp_path / "died"], workers=1, executor=cluster.executor)
    assert ran == "again"
    dask.start_worker()


def test_the_command_on_a_cluster(dask: DaskProcesses, golden: Path, tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes((golden / "train.txt").read_bytes())
    for command in (
        "detok a.raw a.detok",
        "bpe-encode --inputs a.detok --outputs a.bpe",
        "binarize --trainpref a.bpe --testpref a.bpe --destdir bin",
    ):
        command_line = [sys.executable, "-m", "lmtools", *command.split(), "--scheduler", dask.address]
        ran = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert ran.returncode == 0, ran.stderr
        assert re.fullmatch(rf"{dask.address}: [12] tasks at a time\n", ran.stderr)
    assert (tmp_path / "a.detok").read_bytes() == (golden / "train.detok").read_bytes()
    manifest = read_manifest(tmp_path / "bin" / "test")
    assert manifest is not None
    assert manifest.original is not None
    assert sorted(files(tmp_path)) == [
        *("a.bpe", "a.bpe.meta.json", "a.detok", "a.detok.meta.json", "a.raw"),
        *("bin/dict.txt", "bin/dict.txt.meta.json"),
        *("bin/test.bin", "bin/test.idx", "bin/test.meta.json"),
        *("bin/train.bin", "bin/train.idx", "bin/train.meta.json"),
    ]


def test_the_first_error_in_order_is_raised_and_nothing_is_left(dask: DaskProcesses, tmp_path: Path) -> None:
    text, output = tmp_path / "a.raw", tmp_path / "a.detok"
    text.write_bytes(b"a line\n" * 100_000 + b"\xff\n")
    output.write_bytes(b"as it was")
    with (
        pytest.raises(DataError, match=r"a\.raw:100001: not UTF-8"),
        dask_cluster(dask.address, reads=[str(text)], writes=[str(output)]) as cluster,
    ):
        detok(str(text), str(output), workers=2, executor=cluster.executor)
    assert files(tmp_path) == {"a.raw": text.read_bytes(), "a.detok": b"as it was"}


def test_a_bug_brings_its_traceback(dask: DaskProcesses) -> None:
    with (
        dask_cluster(dask.address, reads=[], writes=[]) as cluster,
        pytest.raises(WorkerError, match=r"^a worker failed with ZeroDivisionError: division by zero") as caught,
    ):
        list(run_ordered(tasks.divide, [0], workers=2, executor=cluster.executor))
    assert "tasks.py" in caught.value.traceback


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_leaves_nothing(dask: DaskProcesses, text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmtools", "detok", "a.raw", "a.detok", "--scheduler", dask.address]
    text.write_bytes(text.read_bytes() * 20)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as client:
        end = time.monotonic() + 60
        while not list(tmp_path.glob(".a.detok.*/0*")):
            assert time.monotonic() < end
            assert client.poll() is None
            time.sleep(0.05)
        client.send_signal(signal.SIGINT)
        assert client.wait(timeout=30) == 130
        assert client.stderr is not None
        assert "Traceback" not in client.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["a.raw"]
    with dask_cluster(dask.address, reads=[], writes=[]) as cluster:  # its tasks do not go on
        assert list(run_ordered(tasks.square_slowly, [3], workers=1, executor=cluster.executor)) == [9]


@pytest.mark.parametrize("error", [CommClosedError("Stream is closed"), FutureCancelledError("key", "unknown")])
def test_a_result_that_is_under_way_at_the_end_is_no_traceback(
    dask: DaskProcesses, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fetching, ended, told = threading.Event(), threading.Event(), threading.Event()
    records: list[logging.LogRecord] = []

    async def gather_until_the_end(*_: Any, **__: Any) -> Any:
        fetching.set()
        while not ended.is_set():
            await asyncio.sleep(0.01)
        told.set()
        raise error

    monkeypatch.setattr(Client, "_gather", gather_until_the_end)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("tornado.application")
    logger.addHandler(handler)
    try:
        with dask_cluster(dask.address, reads=[], writes=[]) as cluster:
            future = cluster.executor.submit(tasks.square_slowly, 3)
            assert fetching.wait(60)
            assert future.cancel()
            ended.set()
            assert told.wait(60)
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


@pytest.mark.slow
def test_a_task_that_ends_every_worker_is_an_error(tmp_path: Path) -> None:
    with dask_processes(tmp_path) as dask:
        for _ in range(5):
            dask.start_worker()
        with (
            pytest.raises(WorkerError, match="a task ended every worker that it was given to, the last at tcp://"),
            dask_cluster(dask.address, reads=[], writes=[]) as cluster,
        ):
            list(run_ordered(tasks.die, [0], workers=1, executor=cluster.executor))


@pytest.mark.slow
def test_workers_that_all_go_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_NO_WORKERS_SECONDS", 0.5)
    monkeypatch.setattr(cluster_module, "_WATCH_SECONDS", 0.2)
    with dask_processes(tmp_path) as dask:
        worker = dask.start_worker()

        def lose_the_worker() -> None:
            with dask_cluster(dask.address, reads=[], writes=[]) as cluster:
                dask.kill(worker)
                list(run_ordered(tasks.square_slowly, [3], workers=1, executor=cluster.executor))

        with pytest.raises(WorkerError, match="the scheduler or all its workers were lost; start them and run again"):
            lose_the_worker()


def test_a_task_that_comes_when_all_workers_have_gone_is_one_too(dask: DaskProcesses) -> None:
    """As when a text is read from a slow pipe meanwhile."""

    def go_on_without_workers() -> None:
        with dask_cluster(dask.address, reads=[], writes=[]) as cluster:
            cluster.executor.shutdown(cancel_futures=True)  # what the watch does
            list(run_ordered(tasks.square_slowly, [3], workers=1, executor=cluster.executor))

    with pytest.raises(WorkerError, match="the scheduler or all its workers were lost; start them and run again"):
        go_on_without_workers()


@pytest.mark.slow
def test_a_scheduler_that_goes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_NO_WORKERS_SECONDS", 0.5)
    monkeypatch.setattr(cluster_module, "_WATCH_SECONDS", 0.2)
    with dask_processes(tmp_path) as dask:
        dask.start_worker()

        def lose_the_scheduler() -> None:
            with dask_cluster(dask.address, reads=[], writes=[]) as cluster:
                dask.kill(dask.processes[0])
                list(run_ordered(tasks.square_slowly, [3], workers=1, executor=cluster.executor))

        with pytest.raises(WorkerError, match="the scheduler or all its workers were lost; start them and run again"):
            lose_the_scheduler()


@pytest.mark.slow
def test_a_scheduler_without_workers_or_none_at_all_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_CONNECT_SECONDS", 1)
    with dask_processes(tmp_path) as dask:
        address = dask.address
        with pytest.raises(WorkerError, match=r"no workers; start some with `dask worker tcp://"):
            connect(address)
    with pytest.raises(WorkerError, match=rf"^{address}: no Dask scheduler answers"):
        connect(address)


@pytest.mark.parametrize("address", ["nonsense://x", "host", "host:port", ""])
def test_what_is_no_address_is_an_error(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Said before there is a client: one that fails over its address waits for 40 seconds when the program ends."""
    monkeypatch.setattr("distributed.Client", lambda *_, **__: pytest.fail("a client was made"))
    with pytest.raises(ConfigError, match=rf"--scheduler {address}: .*expected an address such as tcp://host:8786"):
        connect(address)


def test_without_dask_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"pip install 'lmtools\[dask\]'"):
        connect("tcp://localhost:1")


def test_an_output_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    for name in ("-", "/dev/null"):
        with pytest.raises(ConfigError, match=f"^{name}: --scheduler needs an output that is a file"):
            connect("tcp://localhost:1", writes=[name])


def connect(address: str, writes: list[str] | None = None) -> None:
    with dask_cluster(address, reads=[], writes=writes or []):
        pytest.fail("connected")


def test_workers_that_see_other_files_are_an_error(
    dask: DaskProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two disks under one name: what this process sees is not what they see."""
    text = tmp_path / "a.raw"
    text.write_bytes(b"a line\n")
    monkeypatch.setattr(cluster_module, "look", lambda name: "another")
    with (
        pytest.raises(WorkerError, match=r"^worker tcp://\S+ found .*a\.raw to be: 7 bytes, sha256 .* one file system"),
        dask_cluster(dask.address, reads=[str(text)], writes=[str(tmp_path / "a.detok")]),
    ):
        pytest.fail("connected")
    assert files(tmp_path) == {"a.raw": b"a line\n"}


def test_what_a_worker_may_lack(tmp_path: Path) -> None:
    text = tmp_path / "a.raw"
    missing = Expected(cluster_module.__version__, ((str(text), "7 bytes"),))
    assert fault(missing).startswith(f"found {text} to be: no such file or directory, expected 7 bytes; --scheduler")
    text.write_bytes(b"a line\n")
    assert fault(Expected(cluster_module.__version__, ((str(text), look(str(text))),))) == ""
    assert "expected 0.0.0; install one version" in fault(Expected("0.0.0", ()))


def test_a_worker_without_lmtools_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other" / "lmtools").mkdir(parents=True)  # is found first, and has nothing
    (tmp_path / "other" / "lmtools" / "__init__.py").touch()
    with dask_processes(tmp_path) as dask:
        dask.start_worker(PYTHONPATH=str(tmp_path / "other"))
        with pytest.raises(WorkerError, match=r"^worker tcp://\S+ cannot run lmtools: ModuleNotFoundError.*install"):
            connect(dask.address)


def test_a_worker_that_joins_later_is_asked_too(dask: DaskProcesses, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"x")
    with dask_cluster(dask.address, reads=[str(token)], writes=[]) as cluster:
        token.write_bytes(b"another disk's")
        with pytest.raises(LmtoolsError, match=r"^a worker found .*token to be: 14 bytes"):
            list(run_ordered(tasks.square_slowly, [3], workers=1, executor=cluster.executor))
