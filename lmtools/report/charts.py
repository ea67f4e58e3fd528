"""What the charts of a report show, however they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from lmtools.evaluate.breakdown import Group
from lmtools.train.chart import format_number
from lmtools.train.curves import Floats, RunCurves, Series, default_window

_PER_RARE = 100
_MOST_POINTS = 400
"""A curve has no more than this: the page stays small, and no eye sees the rest."""


@dataclass(frozen=True)
class Curve:
    """A line through points.

    Attributes:
        name: in the legend.
        x: rising, `(n,)`.
        y: `(n,)`.
        colour: a number, the same for what belongs together.
        dashed: validation, which is set off from training.
        star: the point to mark, or None.
    """

    name: str
    x: Floats
    y: Floats
    colour: int
    dashed: bool = False
    star: int | None = None


@dataclass(frozen=True)
class LineChart:
    """Curves between two axes.

    Attributes:
        key: tells it from the other charts of a page; its picture's file name.
        title: over it.
        x_label: unit of x.
        y_label: unit of y.
        curves: at least one.
        y_from_0: whether the vertical axis begins at 0.
        note: what must be known to read it, under it.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    y_from_0: bool = False
    note: str = ""


@dataclass(frozen=True)
class BarChart:
    """Bars beside each other for each category, from 0.

    Attributes:
        key: tells it from the other charts of a page; its picture's file name.
        title: over it.
        x_label: what the categories are.
        y_label: unit of the values.
        categories: at least one.
        bars: for each name in the legend a value of each category, None where there is none.
        note: what must be known to read it, under it.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    categories: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float | None]]]
    note: str = ""


Chart = LineChart | BarChart


def training_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Loss and speed in the course of runs."""
    losses, speeds = [], []
    for colour, run in enumerate(runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        window = default_window(len(run.train.loss))
        train = thinned(run.train.smoothed(window))
        losses.append(Curve(f"{prefix}train", train.updates, train.loss, colour))
        for order, (subset, valid) in enumerate(run.valid.items()):
            star = run.best if order == 0 else None
            losses.append(Curve(f"{prefix}{subset}", valid.updates, valid.loss, colour, dashed=True, star=star))
        updates, rates = tokens_per_second(run.train)
        if len(rates):
            speeds.append(Curve(run.name, updates, rates, colour))
    charts: list[Chart] = [LineChart("training", "Loss in training", "updates", "bits per token", losses)]
    if speeds:
        charts.append(LineChart("speed", "Training speed", "updates", "tokens per second", speeds, y_from_0=True))
    return charts


def thinned(series: Series) -> Series:
    """Every so many points of a series, the last one included, so that they are few enough to draw."""
    step = -(-len(series.loss) // _MOST_POINTS)
    kept = np.arange(len(series.loss) - 1, -1, -max(step, 1))[::-1]
    return Series(*(getattr(series, field.name)[kept] for field in fields(series)))


def tokens_per_second(series: Series, *, num_points: int = 40) -> tuple[Floats, Floats]:
    """Speed over stretches of a run.

    Returns:
        The number of updates at the end of each stretch, and the tokens per second of its updates: validation and
        checkpoints between them take none of the time.
    """
    ends = np.unique(np.linspace(0, len(series.loss) - 1, num_points + 1).astype(int))
    tokens, seconds = np.diff(series.tokens[ends]), np.diff(series.training_seconds[ends])
    timed = seconds > 0
    return series.updates[ends[1:]][timed], tokens[timed] / seconds[timed]


def position_chart(groups: Sequence[tuple[str, Sequence[Group]]]) -> LineChart:
    """Loss by position in the window, a curve for each named evaluation.

    With a context window only the first window scores what others only see: a handful of tokens at each position,
    whose mean says nothing. Positions with less than a hundredth of the tokens that others have are left out.
    """
    curves, num_left_out = [], 0
    for colour, (name, of_one) in enumerate(groups):
        most = max(group.num_tokens for group in of_one)
        shown = [group for group in of_one if _PER_RARE * group.num_tokens >= most]
        num_left_out += sum(group.num_tokens for group in of_one if group not in shown)
        middles = np.array([(group.first + group.last) / 2 for group in shown], dtype=np.float64)
        curves.append(Curve(name, middles, np.array([group.mean_bits for group in shown]), colour))
    note = f"{num_left_out:,} tokens at positions that few others have are left out." if num_left_out else ""
    title = "Loss by position in the window"
    return LineChart("position", title, "tokens before it", "bits per token", curves, note=note)


def count_chart(groups: Sequence[tuple[str, Sequence[Group]]], source: str) -> BarChart:
    """Loss by token frequency, bars for each named evaluation."""
    bounds = sorted({(group.first, group.last) for _, of_one in groups for group in of_one})
    bars = []
    for name, of_one in groups:
        means = {(group.first, group.last): group.mean_bits for group in of_one}
        bars.append((name, [means.get(bound) for bound in bounds]))
    categories = [count_range(first, last) for first, last in bounds]
    return BarChart("frequency", "Loss by token frequency", source, "bits per token", categories, bars)


def count_range(first: int, last: int) -> str:
    """A range of counts in a few characters: `0`, `1–9`, `10–99`, `1k–10k`."""
    if first == last:
        return format_number(first)
    if first < 1000:
        return f"{first}–{last}"
    return f"{format_number(first)}+" if first >= 10_000 else f"{first:,}+"
