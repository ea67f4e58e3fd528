"""Of several failed ranks, the one that failed first is named, whatever the others say."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmtools.errors import CheckpointError
from lmtools.parallel.failures import Failure, report, worker_error
from tests.support.ranks import run_ranks

LOST = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def ended(rank: int, exit_code: int, error: Exception | None = None, *, at: float = 0.0) -> Failure:
    left: dict[str, Any] = {"message": "<NONE>"}  # what elastic makes of a file that is not there
    return Failure(rank, exit_code, left if error is None else report(error) | {"time": at})


def killed(rank: int, number: signal.Signals) -> Failure:
    return ended(rank, -number)


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        pytest.param(
            [ended(0, 1, LOST, at=1.0), killed(2, signal.SIGKILL), killed(1, signal.SIGTERM)],
            "rank 2 was killed by SIGKILL (out of memory?)",
            id="killed, before those who lost it",
        ),
        pytest.param(
            [ended(0, 1, LOST, at=2.0), ended(1, -signal.SIGTERM, CheckpointError("part 3 is missing"), at=1.0)],
            "rank 1: part 3 is missing",
            id="an error, even of a rank that the launcher had to end",
        ),
        pytest.param(
            [ended(0, 1, LOST), ended(1, 7)],
            "rank 1 exited with code 7 and left no message",
            id="left without a word",
        ),
        pytest.param(
            [ended(0, 1, CheckpointError("later"), at=2.0), ended(1, 1, CheckpointError("sooner"), at=1.0)],
            "rank 1: sooner",
            id="the sooner of two errors",
        ),
        pytest.param(
            [killed(0, signal.SIGABRT), ended(1, 1, ValueError("first"))],
            "rank 1: ValueError: first",
            id="an error, before those that NCCL's watchdog aborts",
        ),
        pytest.param([killed(1, signal.SIGABRT), ended(0, 1, LOST)], "rank 1 was killed by SIGABRT", id="aborted"),
        pytest.param(
            [killed(2, signal.SIGTERM), killed(0, signal.SIGTERM), ended(1, 1, LOST)],
            "rank 2 was killed by SIGTERM",
            id="ended by someone else, before the launcher noticed",
        ),
        pytest.param(
            [ended(1, 1, LOST), killed(0, signal.SIGTERM)],
            f"rank 1: RuntimeError: {LOST}",
            id="a lost connection, when nobody else has a reason",
        ),
    ],
)
def test_the_cause_is_named(failures: list[Failure], message: str) -> None:
    assert str(worker_error(failures)) == message


def test_only_a_bug_carries_its_traceback() -> None:
    try:
        raise KeyError("layers.0.fc1")
    except KeyError as error:
        bug = error
    assert "in test_only_a_bug_carries_its_traceback" in worker_error([ended(0, 1, bug)]).traceback
    assert worker_error([ended(0, 1, CheckpointError("part 3 is missing"))]).traceback == ""


def test_a_report_is_one_line_of_json_that_elastic_can_read() -> None:
    left = json.loads(json.dumps(report(RuntimeError("shape mismatch:\n  (2, 3)\n  (3, 2)"))))
    assert left["message"] == "RuntimeError: shape mismatch:"
    assert isinstance(left["timestamp"], int)
    assert report(AssertionError())["message"] == "AssertionError: (no message)"


def _reduce_without_the_last_rank() -> str:
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.all_reduce(torch.ones(1))
        return "left"
    dist.all_reduce(torch.ones(1))
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(report(error)["kind"])
    return "nothing noticed"


def test_gloos_own_error_is_taken_for_a_lost_connection() -> None:
    assert run_ranks(3, _reduce_without_the_last_rank) == ["connection", "connection", "left"]


def test_torchs_own_error_is_taken_for_a_lost_connection() -> None:
    assert report(dist.DistNetworkError("the store has gone"))["kind"] == "connection"
    assert report(RuntimeError("a bug"))["kind"] == "bug"
