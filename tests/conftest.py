"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Models here are tiny: a second thread has nothing to do but wait for the first. Before torch is imported, which reads
# this once, and for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests send Ctrl-C to commands that they start; a shell that starts the tests in the background has them, and these
# commands, ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example may take says more about the machine than about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

from tests.support.processes import MARKER, kill_processes_with  # noqa: E402 - after the threads are set
from tests.support.ranks import processes_with_torch  # noqa: E402

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def golden() -> Path:
    """What genuine fairseq wrote from text and models of our own; see tests/golden/README.md."""
    return REPOSITORY / "tests" / "golden"


def _shared(name: str) -> Path:
    folder = REPOSITORY.parent / "shared" / name
    if not folder.is_dir():
        message = f"the genuine WikiText files are not at {folder}"
        if os.environ.get("LMTOOLS_REQUIRE_SHARED"):
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture
def shared_golden() -> Path:
    """What genuine fairseq wrote from WikiText, beside the checkout."""
    return _shared("golden")


@pytest.fixture
def shared_data() -> Path:
    """WikiText itself, beside the checkout."""
    return _shared("data")


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A value that every process of the test has in its environment; whoever is left at the end is killed."""
    processes_with_torch()  # the server of other tests shall not have it
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, value)
    yield value
    kill_processes_with(value)
