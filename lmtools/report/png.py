"""Charts as PNG, by matplotlib: an extra, so it is imported here alone and only when pictures are wanted."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from lmtools.errors import LmtoolsError
from lmtools.report.charts import BarChart, Chart, LineChart
from lmtools.train.chart import format_number

_COLOURS = ("#0b6bb5", "#c9510c", "#087a57", "#a8487f", "#8a6a00", "#4b57c9")
"""The page's, on paper."""


def draw(chart: Chart) -> bytes:
    """The chart as the bytes of a PNG.

    Raises:
        LmtoolsError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise LmtoolsError("--png: a picture needs matplotlib, pip install 'lmtools[plot]'") from error

    figure = Figure(figsize=(7, 4.3), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    numbers = FuncFormatter(lambda value, _: format_number(value))
    axes.yaxis.set_major_formatter(numbers)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
        axes.xaxis.set_major_formatter(numbers)
    else:
        _draw_bars(axes, chart)
    axes.set_title(chart.title, loc="left", fontsize=11, parse_math=False)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        for text in axes.legend(framealpha=0.9, edgecolor="none", fontsize=9).get_texts():
            text.set_parse_math(False)  # a name may have a $
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_lines(axes: Any, chart: LineChart) -> None:
    for curve in chart.curves:
        colour = _COLOURS[curve.colour % len(_COLOURS)]
        style = "--" if curve.dashed else "-"
        marker = "o" if len(curve.x) <= 24 else ""
        axes.plot(curve.x, curve.y, style, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=curve.name)
        if curve.star is not None:
            place = curve.x[[curve.star]], curve.y[[curve.star]]
            axes.plot(*place, "*", color=colour, markersize=13, markeredgecolor="white", zorder=5)
    if chart.y_from_0:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Any, chart: BarChart) -> None:
    places = np.arange(len(chart.categories))
    width = 0.8 / len(chart.bars)
    for number, (name, values) in enumerate(chart.bars):
        heights = [np.nan if value is None else value for value in values]
        left = places + (number + 0.5) * width - 0.4
        axes.bar(left, heights, width=0.95 * width, color=_COLOURS[number % len(_COLOURS)], label=name)
    axes.set_xticks(places, chart.categories)
