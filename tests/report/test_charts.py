"""What charts show: values, not looks."""

from __future__ import annotations

import numpy as np
import pytest

from lmtools.evaluate.breakdown import Group
from lmtools.report.charts import (
    count_chart,
    count_range,
    position_chart,
    thinned,
    tokens_per_second,
    training_charts,
)
from lmtools.train.curves import Series, read_runs
from tests.support.results import write_metrics


def series(num_points: int, seconds_per_update: float = 2.0) -> Series:
    updates = np.arange(1.0, num_points + 1)
    seconds = updates * seconds_per_update
    return Series(updates, updates * 100, seconds, seconds, 1 / updates, np.full(num_points, 100.0))


@pytest.mark.parametrize("num_points", [1, 2, 399, 400, 401, 5000])
def test_thinned_curves_keep_their_last_point(num_points):
    kept = thinned(series(num_points))
    assert len(kept.loss) <= 400
    assert kept.updates[-1] == num_points
    assert len(kept.loss) == num_points or num_points > 400


def test_speed_is_tokens_by_seconds_of_each_stretch():
    updates, rates = tokens_per_second(series(100), num_points=4)
    assert updates.tolist() == [25, 50, 75, 100]
    assert rates == pytest.approx([50, 50, 50, 50])
    assert len(tokens_per_second(series(1))[1]) == 0
    assert len(tokens_per_second(series(5, seconds_per_update=0.0))[1]) == 0, "a clock that stood still"


def test_training_has_a_colour_for_each_run_and_a_star_for_the_best(tmp_path):
    one = write_metrics(tmp_path / "one", losses=[9, 8, 7], valid={1: 9, 2: 7.5, 3: 8})
    two = write_metrics(tmp_path / "two", losses=[9, 8], valid={})
    loss, speed = training_charts(read_runs([one, two]))
    assert [(curve.name, curve.colour, curve.dashed, curve.star) for curve in loss.curves] == [
        ("one: train", 0, False, None),
        ("one: valid", 0, True, 1),
        ("two: train", 1, False, None),
    ]
    assert loss.curves[1].y.tolist() == [9, 7.5, 8]
    assert [curve.y.tolist() for curve in speed.curves] == [pytest.approx([1000 / 60] * 2), pytest.approx([1000 / 60])]


def test_positions_that_hardly_any_token_has_are_left_out_and_said():
    groups = [Group(0, 1, 2, 40.0), Group(2, 3, 400, 800.0), Group(4, 4, 4, 4.0)]
    chart = position_chart([("a", groups)])
    assert chart.curves[0].x.tolist() == [2.5, 4.0]
    assert chart.curves[0].y.tolist() == [2.0, 1.0]
    assert chart.note.startswith("2 tokens at positions")


def test_frequencies_of_several_evaluations_share_their_categories():
    chart = count_chart([("a", [Group(0, 0, 1, 9.0)]), ("b", [Group(0, 0, 1, 8.0), Group(1, 9, 2, 6.0)])], "times")
    assert chart.categories == ["0", "1–9"]
    assert chart.bars == [("a", [9.0, None]), ("b", [8.0, 3.0])]


def test_ranges_of_counts_are_short():
    powers = [(10**power, 10 ** (power + 1) - 1) for power in range(7)]
    assert [count_range(*bounds) for bounds in powers] == ["1–9", "10–99", "100–999", "1,000+", "10k+", "100k+", "1M+"]
    assert count_range(0, 0) == "0"
