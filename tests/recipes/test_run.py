"""A step's command ends before the recipe does, whenever that is told to end."""

from __future__ import annotations

import signal
import subprocess

import pytest

from lmtools.recipes.run import ending_first
from tests.support.signals import signalled_in_popen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_that_comes_while_the_command_is_started(monkeypatch: pytest.MonkeyPatch, number) -> None:
    def nobody_handles_it(*_: object) -> None:
        pytest.fail("no handler")

    started = signalled_in_popen(monkeypatch, number)
    before = signal.signal(number, nobody_handles_it)
    try:
        with ending_first(["sleep", "300"]) as command:
            assert command.wait(60) == -number
        assert signal.getsignal(number) is nobody_handles_it
    finally:
        signal.signal(number, before)
        for command in started:
            command.kill()


def test_what_is_ignored_the_command_ignores_too() -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_first(["sh", "-c", "kill -HUP $$; echo still there"], stdout=subprocess.PIPE) as command:
            assert command.communicate()[0] == b"still there\n"
    finally:
        signal.signal(signal.SIGHUP, before)
