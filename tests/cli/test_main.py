"""What `lmtools` itself promises, whatever the command: help, version, exit codes, one line for an error."""

from __future__ import annotations

import errno
import io
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
import torch
import typer

import lmtools
from lmtools.cli import app, main
from lmtools.cli.commands import COMMANDS
from lmtools.cli.options import progress_bar
from lmtools.errors import CheckpointError, ConfigError, DataError, DownloadError, LmtoolsError, WorkerError


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command line in this process."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["lmtools", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ran]) -> Callable[[BaseException], Ran]:
    """A command that raises."""

    def fail(error: BaseException) -> Ran:
        def command(**_: object) -> None:
            raise error

        monkeypatch.setattr("lmtools.cli.app", command)
        return run()

    return fail


def test_version(run):
    ran = run("--version")
    assert (ran.code, ran.err) == (0, "")
    device = r"cpu|\d+ x .+"
    python = platform.python_version()
    expected = (
        rf"lmtools {lmtools.__version__}\ntorch {re.escape(torch.__version__)}, python {python}, device ({device})\n"
    )
    assert re.fullmatch(expected, ran.out)


def test_completion_knows_commands_options_and_values():
    """As bash, zsh and fish ask for it."""

    def complete(line: str) -> list[str]:
        words = line.split(" ")
        environment = {
            **os.environ,
            "_LMTOOLS_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
        command = [sys.executable, "-m", "lmtools"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.split()

    assert complete("lmtools bpe-") == ["bpe-decode", "bpe-encode"]
    assert complete("lmtools eval --gen") == ["--gen-subset"]
    assert complete("lmtools eval --dtype b") == ["bfloat16"]
    assert complete("lmtools train --optimizer ad") == ["adam", "adafactor"]
    assert complete("lmtools train --arch transformer_lm_megatron_1") == ["transformer_lm_megatron_11b"]
    assert complete("lmtools train --restore-file ") == [], "the shell's own: files"
    assert complete("lmtools download gpt2-b") == ["gpt2-bpe"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(tmp_path, shell):
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "lmtools", "--install-completion", shell]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    [script] = [path for path in tmp_path.rglob("*lmtools*") if path.is_file()]
    assert "_LMTOOLS_COMPLETE=complete_" in script.read_text()


def test_help_has_a_whole_line_for_every_command(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    listed = re.findall(r"^  ([a-z-]+)  +(.+)$", ran.out.partition("Commands:")[2], flags=re.MULTILINE)
    assert listed == [(name, command.says) for name, command in COMMANDS.items() if command.says]
    assert list(COMMANDS) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_80_columns(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "…" not in ran.out, "an option's name is cut off"
    assert re.findall(r"\S+-$", ran.out, flags=re.MULTILINE) == [], "an option's name is broken at a hyphen"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_does(command):
    parameters = typer.main.get_command(app).get_command(None, command).params
    assert [parameter.name for parameter in parameters if not (parameter.help or parameter.hidden)] == []


def test_no_command_shows_the_help(run):
    ran = run()
    assert ran.code == 2
    assert "Commands:" in ran.out + ran.err


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["renorm-ppl", "--nonsense"], ["renorm-ppl", "x"]])
def test_wrong_usage_exits_2_and_leaves_stdout_empty(run, arguments):
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: " in ran.err


@pytest.mark.parametrize("kind", [LmtoolsError, DataError, CheckpointError, DownloadError, WorkerError])
def test_an_error_is_one_line_and_exits_1(fail, kind):
    assert fail(kind("dict.txt:3: what is wrong")) == Ran(1, "", "lmtools: dict.txt:3: what is wrong\n")


def test_options_that_cannot_work_together_exit_2(fail):
    ran = fail(ConfigError("--context-window 64: expected 0 to 63"))
    assert ran == Ran(2, "", "lmtools: --context-window 64: expected 0 to 63\n")


def test_a_bug_of_a_worker_keeps_its_traceback(fail):
    ran = fail(WorkerError("rank 3: ValueError: x", traceback="Traceback of rank 3\n"))
    assert ran == Ran(1, "", "Traceback of rank 3\nlmtools: rank 3: ValueError: x\n")


def test_an_error_in_a_rank_says_which(fail, monkeypatch):
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    assert fail(DataError("test.bin: cut short")) == Ran(1, "", "lmtools: rank 3: test.bin: cut short\n")


@pytest.mark.parametrize("bug", [ValueError("x"), AssertionError(), OSError(errno.EIO, "Input/output error")])
def test_a_bug_is_not_caught(fail, bug):
    with pytest.raises(type(bug)):
        fail(bug)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "permission denied"),
        (errno.ENAMETOOLONG, "file name too long"),
        (errno.EIO, "input/output error"),
    ],
)
def test_what_the_file_system_refuses_is_one_line(fail, number, says):
    """Of whatever file, wherever it was opened: who knows its name can mend it."""
    assert fail(OSError(number, os.strerror(number), "parts/0.pt")) == Ran(1, "", f"lmtools: parts/0.pt: {says}\n")


TOO_MUCH: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.zeros(10**15),
    "numpy": lambda: np.arange(10**15),
    "python": lambda: bytearray(2**62),
}
NO_SIZE: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.zeros(10**25),
    "torch's product": lambda: torch.zeros(10**13, 10**13),
    "torch's scalar": lambda: torch.zeros(1).clamp(max=10**400),
    "numpy": lambda: np.arange(10**25),
    "numpy's scalar": lambda: np.int64(1) * 10**25,
    "python": lambda: len(range(10**25)),
}


def raised(cause: Callable[[], object]) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError, OverflowError, TypeError, ValueError)) as caught:
        cause()
    return caught.value


@pytest.mark.parametrize("name", TOO_MUCH)
def test_memory_that_cannot_be_had_is_one_line(fail, name):
    code, out, err = fail(raised(TOO_MUCH[name]))
    assert (code, out) == (1, "")
    assert re.fullmatch(r"lmtools: out of memory( \([\d.]+ \w+ were asked for at once\))?; use a smaller [^\n]+\n", err)


def test_memory_that_a_gpu_has_not_is_one_line(fail):
    said = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 7.79 GiB\nof which"
    line = "lmtools: out of memory (20.00 GiB were asked for at once); use a smaller --batch-size or model; "
    assert fail(torch.OutOfMemoryError(said)) == (1, "", f"{line}`lmtools plan` says what one needs\n")


def test_sizes_that_were_given_are_named(run, monkeypatch):
    def command(**_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("lmtools.cli.app", command)
    arguments = ["eval", "data", "--batch-size=64", "--gen-subset", "test", "--mem-len", "4000", "--json"]
    line = "lmtools: out of memory; use a smaller --batch-size 64 or --mem-len 4000\n"
    assert run(*arguments) == (1, "", line)


@pytest.mark.parametrize("name", NO_SIZE)
def test_a_number_that_no_size_can_be_is_one_line(fail, name):
    line = "lmtools: a size is too large to compute with; use a smaller --batch-size or model; "
    assert fail(raised(NO_SIZE[name])) == (1, "", f"{line}`lmtools plan` says what one needs\n")


def test_a_bug_ends_with_its_traceback():
    """As the shell sees it; nothing shortens or decorates it."""
    break_a_command = "import sys, lmtools.cli as cli; cli.app = lambda **_: {}['bug']; cli.main()"
    ran = subprocess.run([sys.executable, "-c", break_a_command], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Traceback (most recent call last):")
    assert ran.stderr.endswith("KeyError: 'bug'\n")


def test_ctrl_c_exits_130(run, monkeypatch):
    def command() -> None:
        raise KeyboardInterrupt

    interrupted = typer.Typer(rich_markup_mode=None)
    interrupted.command()(command)
    monkeypatch.setattr("lmtools.cli.app", interrupted)
    ran = run()
    assert (ran.code, ran.out) == (130, "")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_being_told_to_end_leaves_no_temporary_file(run, monkeypatch, tmp_path, number, code):
    """Blocks are left as by Ctrl-C; a second signal ends at once; what was before is there again afterwards."""
    actions = []

    def command(**_: object) -> None:
        with TemporaryDirectory(dir=tmp_path):
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            finally:
                actions.append(signal.getsignal(number))

    monkeypatch.setattr("lmtools.cli.app", command)

    def nobody_handles_it(*_: object) -> None:
        pytest.fail("no handler")

    before = signal.signal(number, nobody_handles_it)
    try:
        assert run() == Ran(code, "", "")
        assert signal.getsignal(number) is nobody_handles_it
    finally:
        signal.signal(number, before)
    assert list(tmp_path.iterdir()) == []
    assert actions == [signal.SIG_DFL]


def test_what_a_process_was_told_to_ignore_it_ignores(run, monkeypatch):
    """As under `nohup`; and a worker ends at SIGTERM without being asked."""
    actions = []
    monkeypatch.setattr("lmtools.cli.app", lambda **_: actions.append([signal.getsignal(number) for number in ended]))
    monkeypatch.setattr("os._exit", sys.exit)
    ended = (signal.SIGTERM, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run()
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [hup for _, hup in actions] == [signal.SIG_IGN] * 2
    assert callable(actions[0][0])
    assert actions[1][0] is signal.getsignal(signal.SIGTERM)


PRINTS = [sys.executable, "-m", "lmtools", "renorm-ppl", "8.46", "--new-tokens", "2", "--orig-tokens", "1"]


@pytest.fixture(params=["buffered", "unbuffered"])
def environment(request) -> dict[str, str]:
    """Python writes what is printed when a buffer is full and at the end, or at once."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return variables | ({"PYTHONUNBUFFERED": "1"} if request.param == "unbuffered" else {})


def test_a_reader_that_stops_reading_is_no_error(environment):
    """`lmtools ... | head` must not end in a traceback."""
    with subprocess.Popen(PRINTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_output_that_cannot_be_written_is_one_line(environment):
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(PRINTS, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    assert ran.stderr == "lmtools: standard output: No space left on device; what was printed is not whole\n"
    assert ran.returncode == 1


def test_closed_standard_output_is_one_line():
    ran = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *PRINTS],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert ran.stderr == "lmtools: standard output: Bad file descriptor; what was printed is not whole\n"
    assert ran.returncode == 1


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", rb"\xfc \udce9"), ("utf-8", "\u00fc".encode() + rb" \udce9")]
)
def test_what_standard_output_has_no_bytes_for_is_escaped(encoding, written):
    """A letter that its encoding has not, and a byte of a file's name that is no text."""
    printing = r"import lmtools.cli as cli; cli.app = lambda **_: print('\u00fc \udce9'); cli.main()"
    ran = subprocess.run(
        [sys.executable, "-c", printing],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, written + b"\n", b"")


def test_messages_do_not_go_to_standard_output_when_standard_error_is_closed():
    command = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-m", "lmtools", "detok", "nonsense", "x"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stdout) == (1, b"")


def test_module_and_script_are_one_program():
    ran = subprocess.run([sys.executable, "-m", "lmtools", "--help"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("Usage: lmtools [OPTIONS] COMMAND [ARGS]...\n")


def test_a_progress_bar_of_unknown_length_ends_complete(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("load", total=None) as advance:
        advance(1)
        time.sleep(0.01)
        advance(2)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue().rpartition("load")[2])
    assert re.search(r" 3/3 bytes [\d.]+ (bytes|kB)/s ", last)
