"""`lmtools crosscheck` without fairseq: one line. With it: tests/parity/test_crosscheck.py."""

from __future__ import annotations

import os
import signal

import pytest


@pytest.fixture
def without_fairseq(tmp_path):
    """An interpreter that looks for fairseq and does not find it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    return python


def test_without_fairseq_it_says_how_to_install_it(lmtools, golden, without_fairseq, monkeypatch):
    expected = (
        f"lmtools: crosscheck: {without_fairseq} has no fairseq; run `pip install 'lmtools[fairseq]'` with Python "
        "3.11, or name an interpreter that has it with --fairseq-python or LMTOOLS_FAIRSEQ_PYTHON\n"
    )
    command = ["crosscheck", golden / "bin", "--path", golden / "mp4"]
    assert lmtools(*command, "--fairseq-python", without_fairseq) == (2, "", expected)
    monkeypatch.setenv("LMTOOLS_FAIRSEQ_PYTHON", str(without_fairseq))
    assert lmtools(*command) == (2, "", expected)


def test_interpreter_that_does_not_run(lmtools, golden, tmp_path):
    ran = lmtools("crosscheck", golden / "bin", "--path", golden / "mp4", "--fairseq-python", tmp_path / "none")
    assert ran.code == 2
    assert ran.err == f"lmtools: --fairseq-python {tmp_path}/none: does not run (No such file or directory)\n"


def test_program_of_fairseq_that_fails_says_its_last_line(lmtools, golden, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && echo '{}' || { echo first >&2; echo no such module >&2; exit 5; }\n")
    python.chmod(0o755)
    command = ["crosscheck", golden / "bin", "--path", golden / "mp4", "--raw", golden / "train.txt"]
    ran = lmtools(*command, "--fairseq-python", python)
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == "lmtools: fairseq's detok failed (exit 5): no such module"


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), pytest.param("INT", 130, marks=pytest.mark.slow)])
def test_told_to_end_it_leaves_no_folder_and_no_program(lmtools, golden, tmp_path, monkeypatch, name, code):
    """While fairseq's detok is at work: what was copied and merged may be as large as the checkpoint."""
    python, pid, scratch = (tmp_path / name for name in ("python", "pid", "scratch"))
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    work = f"echo $$ > {pid}; ls {scratch} > {tmp_path}/seen; kill -{name} $PPID; exec sleep 60"
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] && echo '{{}}' || {{ {work}; }}\n")
    python.chmod(0o755)
    command = ["crosscheck", golden / "bin", "--path", golden / "mp4", "--raw", golden / "train.txt"]
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody handles it"))
    try:
        ran = lmtools(*command, "--fairseq-python", python)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ran.code, ran.out) == (code, "")
    assert (tmp_path / "seen").read_text().startswith("lmtools-crosscheck-")
    assert list(scratch.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
