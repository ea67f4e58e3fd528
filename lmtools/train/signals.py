"""Being asked to save and end: SIGTERM, SIGINT, SIGUSR1."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lmtools.parallel.launch import has_launcher


class StopSignal:
    """Remembers the first signal; the loop looks at it once in an update.

    Attributes:
        received: its number, 0 while there was none.
    """

    def __init__(self) -> None:
        self.received = 0

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received:  # asked twice: at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number


@contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Catch the signals that ask a run to save and end, for as long as the block lasts.

    Under lmtools' own launcher the launcher catches what the user sends, and tells its workers by SIGUSR1; the Ctrl-C
    that a terminal sends to them too is ignored, and SIGTERM ends them at once.
    """
    stop = StopSignal()
    asked_by = [signal.SIGUSR1] if has_launcher() else [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, stop._receive) for number in asked_by}
    if has_launcher():
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
