"""Which of several failed ranks is to blame, and what to say of it.

The rank that fails first takes the others with it: some lose their connection to it and fail too, within milliseconds,
and the launcher ends the rest with SIGTERM. One error is the cause, the others hide it.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtools.errors import LmtoolsError, WorkerError


@dataclass(frozen=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: its global rank.
        exit_code: as in subprocess: negative is minus the number of the signal that killed it.
        report: what `report` made of its exception; without "kind" when it could leave none.
    """

    rank: int
    exit_code: int
    report: Mapping[str, Any]


def report(error: Exception) -> dict[str, Any]:
    """What a rank leaves behind of the exception that ends it, as JSON: elastic reads `message` and `timestamp`."""
    text = str(error).strip() or "(no message)"
    if isinstance(error, LmtoolsError):
        kind, message = "error", text
    else:
        kind = "connection" if _is_lost_connection(error) else "bug"
        message = f"{type(error).__name__}: {text.splitlines()[0]}"
    now = time.time()
    return {
        "kind": kind,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)) if kind == "bug" else "",
        "exit_code": error.exit_code if isinstance(error, LmtoolsError) else 1,
        "time": now,
        "timestamp": int(now),
    }


def worker_error(failures: Sequence[Failure]) -> WorkerError:
    """The one error that tells why a run failed.

    Args:
        failures: every rank that did not end well, in the order in which that was noticed.
    """

    def likelihood(item: tuple[int, Failure]) -> tuple[int, float]:
        position, failure = item
        return _distance_from_cause(failure, noticed_first=position == 0), failure.report.get("time", 0.0)

    _, cause = min(enumerate(failures), key=likelihood)
    if "kind" not in cause.report:
        return WorkerError(_last_words(cause))
    return WorkerError(
        f"rank {cause.rank}: {cause.report['message']}",
        traceback=cause.report["traceback"],
        exit_code=cause.report["exit_code"],
    )


def _distance_from_cause(failure: Failure, *, noticed_first: bool) -> int:
    """How far from the cause of the whole failure this rank's end is likely to be: 0 is the cause itself."""
    match failure.report.get("kind"):
        case "error" | "bug":
            return 1
        case "connection":
            return 3
    if failure.exit_code == -signal.SIGABRT:
        return 2  # NCCL's watchdog aborts a process that has lost a peer; glibc, one that has spoiled its heap
    if failure.exit_code == -signal.SIGTERM and not noticed_first:
        return 4  # the launcher's doing
    return 0


def _last_words(failure: Failure) -> str:
    """What can be said of a rank that left no report."""
    if failure.exit_code >= 0:
        return f"rank {failure.rank} exited with code {failure.exit_code} and left no message"
    killer = signal.Signals(-failure.exit_code)
    hint = " (out of memory?)" if killer == signal.SIGKILL else ""
    return f"rank {failure.rank} was killed by {killer.name}{hint}"


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because a peer is gone or does not answer."""
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    # Gloo's errors are plain RuntimeErrors that begin with a place in its source.
    return isinstance(error, DistError) or "gloo/transport/" in str(error)
