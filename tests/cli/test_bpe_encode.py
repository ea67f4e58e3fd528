"""`lmtools bpe-encode` as a user types it, and as things go wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Lmtools
from tests.support.processes import all_processes, group_members, wait_until

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two texts of the same number of lines."""
    (tmp_path / "a").write_text("Hello world\n\nHello\n")
    (tmp_path / "b").write_text("one\ntwo\nthree\n")
    return tmp_path


def test_one_file(lmtools: Lmtools, golden: Path, tmp_path: Path) -> None:
    ran = lmtools("bpe-encode", "--inputs", golden / "train.txt", "--outputs", tmp_path / "ids")
    expected = (golden / "train.bpe").read_bytes()
    assert ran.code == 0
    assert (tmp_path / "ids").read_bytes() == expected
    lines, tokens = expected.count(b"\n"), len(expected.split())
    assert f"{lines:,} lines, {tokens:,} tokens ({lines + tokens:,} with an end of sentence for each line)" in ran.out
    assert ran.err == ""


@pytest.mark.parametrize("spread", [True, False])
def test_fairseqs_command_line_with_several_values_after_a_flag(lmtools: Lmtools, texts: Path, spread: bool) -> None:
    a, b = texts / "a", texts / "b"
    names = (
        ("--inputs", a, b, "--outputs", f"{a}.ids", f"{b}.ids")
        if spread
        else ("--inputs", a, "--outputs", f"{a}.ids", "--inputs", b, "--outputs", f"{b}.ids")
    )
    ran = lmtools("bpe-encode", *names, "--keep-empty", "--workers", 2)
    assert ran.code == 0, ran.err
    assert (texts / "a.ids").read_text() == "15496 995\n\n15496\n"
    assert (texts / "b.ids").read_text() == "505\n11545\n15542\n"


def test_the_result_as_json(lmtools: Lmtools, texts: Path) -> None:
    ran = lmtools("bpe-encode", "--inputs", texts / "a", "--outputs", texts / "ids", "--json")
    counts = {"lines": 2, "tokens": 3, "dropped_lines": 1, "lost_lines": 0, "tokens_with_eos": 5}
    assert json.loads(ran.out) == {"outputs": [{"path": str(texts / "ids"), **counts}], "skipped": False}


def test_lines_with_text_that_are_left_out_are_a_warning(lmtools: Lmtools, texts: Path) -> None:
    a, b = texts / "a", texts / "b"
    ran = lmtools("bpe-encode", "--inputs", a, b, "--outputs", f"{a}.ids", f"{b}.ids")
    assert ran.code == 0
    [line] = ran.err.splitlines()
    assert f"warning: {b}.ids: 1 lines of {b} with text are left out, being empty in another input" in line


def test_more_workers_than_cores_is_said_once(lmtools: Lmtools, texts: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ran = lmtools("bpe-encode", "--inputs", texts / "a", "--outputs", texts / "ids", "--workers", 1000)
    assert ran.code == 0
    assert ran.err == f"--workers 1000: {cores} are used, one for each core\n"


def test_what_is_unchanged_is_skipped(lmtools: Lmtools, texts: Path) -> None:
    command = ("bpe-encode", "--inputs", texts / "a", "--outputs", texts / "ids", "--skip-unchanged")
    first = lmtools(*command)
    written = (texts / "ids").stat().st_mtime_ns
    second = lmtools(*command)
    assert second.out == first.out
    assert second.err == f"{texts / 'ids'}: unchanged, skipped\n"
    assert (texts / "ids").stat().st_mtime_ns == written

    third = lmtools(*command, "--keep-empty")
    assert third.err == ""
    assert (texts / "ids").stat().st_mtime_ns != written


def test_a_filter(start_lmtools: Start) -> None:
    with start_lmtools("bpe-encode", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(b"Hello world\n\nHello\n")
    assert (process.returncode, out) == (0, b"15496 995\n15496\n")
    assert err.startswith(b"-: 2 lines, 3 tokens")  # not among the data


def test_a_reader_that_goes_away_is_no_error(start_lmtools: Start, texts: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with start_lmtools("bpe-encode", "--inputs", texts / "a", stdout=write) as process:
        os.close(write)
        assert process.communicate()[1] == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--inputs", "nowhere", "--outputs", "ids"], 1, "lmtools: nowhere: no such file\n"),
        (["--inputs", "a", "b", "--outputs", "ids"], 2, "2 input(s) (a, b) and 1 output(s) (ids)"),
        (["--inputs", "a", "--outputs", "nowhere/ids"], 1, "nowhere/ids: the folder nowhere does not exist\n"),
        (["--inputs", "a", "--outputs", "ids", "--vocab-bpe", "a"], 2, "--vocab-bpe belong together: give both"),
        (["--inputs", "bad", "--outputs", "ids"], 1, "lmtools: bad:2: not UTF-8 (byte 0xff at byte 1 of the line)"),
        (["--inputs", "a", "--json"], 2, "standard output has the data already; name a file"),
        (["--inputs", "--outputs", "ids"], 2, "unexpected extra argument(s) (ids)"),
        (["a", "ids"], 2, "unexpected extra argument(s) (a ids)"),
    ],
)
def test_wrong_usage_is_one_line(
    lmtools: Lmtools,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(texts)
    (texts / "bad").write_bytes(b"good\n\xff\n")
    ran = lmtools("bpe-encode", *arguments)
    assert ran.code == code
    assert message in ran.err
    assert ran.out == ""
    assert ran.err.count("\n") == 1 or ran.err.startswith("Usage: ")
    assert sorted(path.name for path in texts.iterdir()) == ["a", "b", "bad"]


# --- while it runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """A text that takes some seconds: its words are all different."""
    path = tmp_path / "text"
    path.write_text("".join(f"{n} {n * 7919}x\n" for n in range(400_000)))
    return path


def is_encoding(output: Path) -> bool:
    """Whether workers have written something, which is long before the text's end."""
    try:
        return any(part.stat().st_size > 0 for part in output.parent.glob(".ids.*.tmp/*"))
    except FileNotFoundError:  # it has got its own name meanwhile: it is written
        return True


def workers_of(pid: int) -> list[int]:
    """The children of its children: workers are forked from a server."""
    processes = all_processes()
    servers = [process.pid for process in processes if process.parent == pid]
    return [process.pid for process in processes if process.parent in servers]


@pytest.mark.parametrize(
    ("signal_number", "code"),
    [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_run_that_is_ended_leaves_the_old_output_and_no_process(
    start_lmtools: Start, long_text: Path, signal_number: signal.Signals, code: int
) -> None:
    output = long_text.with_name("ids")
    output.write_bytes(b"old\n")
    with start_lmtools("bpe-encode", "--inputs", long_text, "--outputs", output, "--workers", 2) as process:
        wait_until(lambda: is_encoding(output))
        process.send_signal(signal_number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == code
    assert output.read_bytes() == b"old\n"
    wait_until(lambda: group_members(process.pid) == [])
    if signal_number != signal.SIGKILL:
        assert b"Traceback" not in err
        assert sorted(path.name for path in output.parent.iterdir()) == ["ids", "text"]


def test_a_killed_worker_is_one_line(start_lmtools: Start, long_text: Path) -> None:
    output = long_text.with_name("ids")
    with start_lmtools("bpe-encode", "--inputs", long_text, "--outputs", output, "--workers", 2) as process:
        wait_until(lambda: is_encoding(output))
        os.kill(workers_of(process.pid)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.startswith(b"lmtools: worker process ")
    assert err.endswith(b"was killed (SIGKILL), perhaps for lack of memory; run again with fewer --workers\n")
    assert sorted(path.name for path in output.parent.iterdir()) == ["text"]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_full_disk_is_one_line_and_leaves_nothing(start_lmtools: Start, long_text: Path, workers: int) -> None:
    output = long_text.with_name("ids")
    with start_lmtools(
        *("bpe-encode", "--inputs", long_text, "--outputs", output, "--workers", workers),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    ) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == f"lmtools: {output}: larger than this file system or process may write\n".encode()
    assert sorted(path.name for path in output.parent.iterdir()) == ["text"]
