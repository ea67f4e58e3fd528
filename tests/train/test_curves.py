"""From metrics.jsonl to curves: what is read, what is averaged, what is best, and where it is drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import DataError
from lmtools.train.chart import Axis, Line, draw, format_number, to_ascii
from lmtools.train.curves import Series, default_window, read_runs


def update(number: int, loss: float | None, *, num_tokens: int = 100, skipped: str | None = None) -> dict[str, Any]:
    line = {"kind": "update", "num_updates": number, "loss_base2": loss, "num_tokens": num_tokens, "skipped": skipped}
    return line | {"seconds": number * 0.5, "epoch": 1, "lr": 0.1}


def valid(number: int, loss: float | None, subset: str = "valid") -> dict[str, Any]:
    line = {"kind": "valid", "num_updates": number, "loss_base2": loss, "num_tokens": 1000, "subset": subset}
    return line | {"seconds": number * 0.5}


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_updates_and_validations_are_told_apart_and_placed_on_each_axis(tmp_path):
    lines = [
        update(1, 8.0, num_tokens=100),
        update(2, 7.0, num_tokens=50),
        valid(2, 7.5),
        update(3, 6.0),
        valid(3, 6.5),
    ]
    [run] = read_runs([write(tmp_path / "run", lines)])
    assert run.name == "run"
    assert run.train.loss.tolist() == [8, 7, 6]
    assert run.train.x("updates").tolist() == [1, 2, 3]
    assert run.train.x("tokens").tolist() == [100, 150, 250]
    assert run.train.x("seconds").tolist() == [0.5, 1.0, 1.5]
    assert run.valid["valid"].x("tokens").tolist() == [150, 250], "trained on, not validated on"
    assert run.valid["valid"].y("ppl").tolist() == [2**7.5, 2**6.5]


def test_updates_time_is_theirs_and_a_run_of_before_has_the_clocks(tmp_path):
    lines = [update(1, 8.0), update(2, 7.0), valid(2, 7.5), update(3, None, skipped="overflow"), update(3, 6.0)]
    timed = [line | {"update_seconds": 0.25} if line["kind"] == "update" else line for line in lines]
    runs = read_runs([write(tmp_path / "old", lines), write(tmp_path / "new", timed)])
    assert [run.train.training_seconds.tolist() for run in runs] == [[0.5, 1.0, 1.5], [0.25, 0.5, 1.0]]
    assert runs[1].valid["valid"].training_seconds.tolist() == [0.5]


def test_a_run_is_named_by_its_folder_or_its_file(tmp_path):
    folder = write(tmp_path / "a", [update(1, 1.0)])
    (folder / "metrics.jsonl").rename(tmp_path / "other.jsonl")
    assert [run.name for run in read_runs([tmp_path / "other.jsonl"])] == ["other"]


def test_names_are_as_long_as_it_takes_to_tell_runs_apart(tmp_path):
    paths = [write(tmp_path / name, [update(1, 1.0)]) for name in ("one/checkpoints", "two/checkpoints", "two/last")]
    assert [run.name for run in read_runs(paths)] == ["one/checkpoints", "two/checkpoints", "two/last"]
    assert [run.name for run in read_runs([paths[2], paths[2]])] == ["last", "last"], "the same run twice"


def test_what_was_skipped_or_not_finite_is_not_drawn(tmp_path):
    lines = [
        update(1, 8.0),
        update(1, None, skipped="nan"),
        update(2, None),
        update(3, 7.0),
        valid(3, None),
        valid(4, 6.0),
    ]
    [run] = read_runs([write(tmp_path, lines)])
    assert run.train.updates.tolist() == [1, 3]
    assert run.train.tokens.tolist() == [100, 300]
    assert run.valid["valid"].updates.tolist() == [4]


def test_the_best_is_the_first_splits_lowest(tmp_path):
    losses = [5.0, 4.0, 4.5]
    lines = [update(1, 5.0)]
    lines += [line for n, loss in enumerate(losses, 1) for line in (valid(n, loss), valid(n, loss / 9, "other"))]
    [run] = read_runs([write(tmp_path, lines)])
    assert list(run.valid) == ["valid", "other"]
    assert run.best == 1


def test_a_run_without_validation_has_no_best(tmp_path):
    assert read_runs([write(tmp_path / "none", [update(1, 5.0)])])[0].best is None
    assert read_runs([write(tmp_path / "nan", [update(1, 5.0), valid(1, None)])])[0].best is None


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    write(tmp_path, [update(1, 5.0), update(2, 4.0)])
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"kind": "upd')
    assert len(read_runs([tmp_path])[0].train.loss) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "metrics.jsonl: no update was made yet"),
        (json.dumps(update(1, None)) + "\n", "metrics.jsonl: of no update is the loss a finite number"),
        ('{"kind": "update"}\n', r"metrics.jsonl:1: not a line of metrics.jsonl \(KeyError\('skipped'\)\)"),
        (json.dumps(update(1, 5.0)) + '\n{"loss": 1}\n', r"metrics.jsonl:2: not a line"),
        (json.dumps(update(1, 5.0) | {"loss_base2": "x"}) + "\n", r"metrics.jsonl:1: not a line"),
        ("{]\n", "metrics.jsonl:1: not JSON"),
    ],
)
def test_what_is_no_metrics_is_one_line_that_says_where(tmp_path, content, message):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        read_runs([tmp_path])


def test_a_folder_without_metrics_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file; expected the --save-dir of a run"):
        read_runs([tmp_path])


# Smoothing.


def series(losses: list[float], weights: list[float]) -> Series:
    counts = np.arange(1.0, len(losses) + 1)
    return Series(counts, counts, counts, counts, np.array(losses), np.array(weights))


WEIGHTED = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 10**6)), min_size=1, max_size=30)


@given(points=WEIGHTED, window=st.integers(1, 40))
def test_a_smoothed_loss_is_the_mean_per_token_of_the_updates_around_it(points, window):
    losses, weights = (list(column) for column in zip(*points, strict=True))
    smooth = series(losses, weights).smoothed(window).loss
    for index in range(len(losses)):
        around = slice(max(index - (window - 1) // 2, 0), index + window // 2 + 1)
        expected = np.average(losses[around], weights=weights[around])
        assert smooth[index] == pytest.approx(expected, rel=1e-9, abs=1e-8)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_loss_beyond_measure_leaves_those_after_it_as_they_are(window):
    smooth = series([5.0, 1e25, 3.0, 2.0, 4.0, 6.0], [1.0] * 6).smoothed(window).loss
    assert smooth[-1] == pytest.approx(6.0 if window == 1 else [6.0, 5.0][window - 2])


def test_a_window_of_one_changes_nothing():
    assert series([3.0, 1.0, 2.0], [1, 2, 3]).smoothed(1).loss.tolist() == pytest.approx([3, 1, 2])


def test_the_window_grows_with_the_run():
    assert [default_window(n) for n in (1, 99, 100, 1000, 300_000)] == [1, 1, 1, 10, 3000]


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert series([1.0, 2000.0], [1, 1]).y("ppl").tolist() == [2.0, math.inf]


# The chart on a terminal.


@given(
    low=st.floats(-1e9, 1e9),
    length=st.floats(1e-3, 1e9),
    most=st.integers(1, 20),
    log=st.booleans(),
    whole=st.booleans(),
)
def test_ticks_are_in_range_in_order_and_not_too_many(low, length, most, log, whole):
    low = abs(low) + 1e-3 if log else low
    axis = Axis(low, low + length, log, whole)
    ticks = axis.ticks(most)
    slack = 1e-6 * (abs(axis.low) + length)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= max(most, 2)
    if whole and not log:
        assert all(float(tick).is_integer() for tick in ticks)


def test_an_axis_holds_all_that_is_finite():
    axis = Axis.over([np.array([1.0, math.inf]), np.array([3.0, math.nan])], log=False, margin=0.5)
    assert (axis.low, axis.high) == (0.0, 4.0)
    logarithmic = Axis.over([np.array([0.0, 1.0, 100.0])], log=True)
    assert (logarithmic.low, logarithmic.high) == (1.0, 100.0), "0 has no place on it"
    assert Axis.over([np.array([5.0])], log=False, from_0=True).low == 0.0


@pytest.mark.parametrize("values", [[], [3.0], [0.0], [3.0, 3.0], [math.nan]])
@pytest.mark.parametrize("log", [False, True])
def test_a_range_is_never_empty(values, log):
    axis = Axis.over([np.array(values, dtype=float)], log=log)
    assert axis.low < axis.high
    assert axis.ticks(5)


def test_numbers_are_short():
    numbers = [0, 0.25, 7, 2500, 10_000, 1_500_000, 3e9, 2e13, -20_000]
    assert [format_number(n) for n in numbers] == ["0", "0.25", "7", "2,500", "10k", "1.5M", "3G", "20T", "-20k"]


def chart(*lines: Line, width: int = 40, height: int = 11, log: bool = False) -> list[str]:
    x_axis = Axis.over([line.x for line in lines], log=False, from_0=True)
    y_axis = Axis.over([line.y for line in lines], log=log)
    rows = draw(lines, x_axis, y_axis, width=width, height=height, x_label="updates", y_label="loss")
    return ["".join(text for text, _ in row) for row in rows]


def test_a_falling_line_with_its_best_marked():
    x = np.linspace(0, 100, 11)
    drawn = chart(Line(x, 10 - x / 20, 0), Line(x[5:6], np.array([9.0]), 1, ["★"]))
    assert drawn == [
        "   loss",
        "10 ┤⠉⠒⠤⣀⡀                               ",
        "   │    ⠈⠑⠢⠤⣀         ★                 ",
        "   │         ⠉⠒⠢⢄⡀                      ",
        " 8 ┤             ⠈⠉⠢⠤⡀                  ",
        "   │                 ⠈⠉⠒⠤⣀⡀             ",
        "   │                      ⠈⠑⠢⠤⣀         ",
        " 6 ┤                           ⠉⠒⠢⢄⡀    ",
        "   │                               ⠈⠉⠒⠤⣀",
        "   └┬─────────────────┬────────────────┬",
        "    0                 50         updates",
    ]


def test_every_row_is_as_wide_as_asked():
    x = np.linspace(1, 3000, 3000)
    for width in (40, 80, 132):
        drawn = chart(Line(x, 1e5 / x, 0), width=width, log=True)
        assert {len(row) for row in drawn[1:]} == {width}


def test_many_points_in_a_column_are_drawn_as_their_mean():
    x = np.repeat([0.0, 1.0], 100)
    y = np.tile([0.0, 2.0], 100)
    drawn = chart(Line(x, y, 0), Line(np.array([0.0, 1.0]), np.array([1.0, 1.0]), 1), width=30, height=12)
    dotted = [row for row in drawn if any(0x2800 < ord(char) < 0x2900 for char in row)]
    assert len(dotted) == 1


def test_what_is_not_finite_leaves_no_dot():
    drawn = chart(Line(np.array([0.0, 1.0]), np.array([math.nan, math.inf]), 0, ["●", "●"]))
    assert not any("●" in row or any(0x2800 < ord(char) < 0x2900 for char in row) for row in drawn)


def test_a_terminal_without_braille_gets_ascii():
    x = np.linspace(0, 100, 50)
    drawn = [to_ascii(row) for row in chart(Line(x, x, 0, ["●"] * 49 + ["★"]))]
    assert all(row.isascii() for row in drawn)
    assert any("o" in row for row in drawn)
    assert "*" in "".join(drawn)
