"""Programs that crosscheck starts: none outlives it."""

from __future__ import annotations

import signal

import pytest

from lmtools.crosscheck.programs import _run
from tests.support.signals import signalled_in_popen


def test_a_program_that_is_just_started_when_a_signal_comes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise SystemExit(143)

    started = signalled_in_popen(monkeypatch, signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            _run("a program", ["sleep", "300"], None)
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
        for program in started:
            program.kill()
    assert [program.returncode for program in started] == [-signal.SIGKILL]
