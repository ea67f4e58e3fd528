"""A share of the peak is never more than all of it."""

from __future__ import annotations

import pytest
import torch

from lmtools.train.utilisation import PeakFlops, matmul_flops_per_second


@pytest.fixture
def measured(monkeypatch) -> list[float]:
    """What a rank will measure, one time after the other."""
    values: list[float] = []
    monkeypatch.setattr("lmtools.train.utilisation.matmul_flops_per_second", lambda *_: values.pop(0))
    return values


def peak(num_ranks: int = 1) -> PeakFlops:
    return PeakFlops(torch.device("cpu"), torch.float32, num_ranks)


def test_of_all_ranks(measured):
    measured += [100.0]
    assert peak(num_ranks=4).share(100.0) == 0.25


def test_a_peak_that_is_surpassed_is_measured_again(measured):
    measured += [100.0, 250.0]
    of_machine = peak()
    assert of_machine.share(50.0) == 0.5
    assert of_machine.share(200.0) == 0.8
    assert of_machine.share(50.0) == 0.2
    assert measured == []


def test_a_peak_that_stays_below_what_a_run_reaches_tells_nothing(measured):
    measured += [100.0, 50.0, 400.0]
    of_machine = peak()
    assert of_machine.share(200.0) is None
    assert of_machine.share(100.0) == 1.0, "the lower measurement is not believed"
    assert of_machine.share(200.0) == 0.5


def test_a_machine_multiplies():
    assert matmul_flops_per_second(torch.device("cpu"), torch.float32) > 1e8
