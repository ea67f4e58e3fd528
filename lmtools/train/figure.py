"""Curves as a picture, by matplotlib: an extra, so it is imported here and nowhere else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from lmtools.errors import ConfigError, LmtoolsError
from lmtools.train.chart import format_number
from lmtools.train.curves import RunCurves, XAxis, YAxis

FORMATS = ("png", "pdf", "svg")

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart."""
_GRID = "#e4e4e4"
_MOST_MARKS = 60


def draw_figure(
    runs: Sequence[RunCurves],
    *,
    x: XAxis,
    y: YAxis,
    x_label: str,
    y_label: str,
    x_scale: float,
    windows: Sequence[int],
    log_x: bool,
    log_y: bool,
    file_format: str,
) -> bytes:
    """Draw training and validation curves.

    Args:
        runs: what is drawn, one colour each.
        x: the horizontal axis.
        y: the vertical axis.
        x_label: its name.
        y_label: its name.
        x_scale: x is divided by it.
        windows: for each run, over how many updates its training loss is averaged.
        log_x: logarithmic.
        log_y: logarithmic.
        file_format: one of `FORMATS`.

    Returns:
        The file's bytes.

    Raises:
        LmtoolsError: matplotlib is not installed.
        ConfigError: an unknown format.
    """
    if file_format not in FORMATS:
        raise ConfigError(f"--output: expected a name that ends in .{', .'.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LmtoolsError(
            "--output: a picture needs matplotlib, pip install 'lmtools[plot]'; without --output the curves are text"
        ) from error

    figure = Figure(figsize=(9, 5.4), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for number, (run, window) in enumerate(zip(runs, windows, strict=True)):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        _draw_run(axes, run, window, x, y, x_scale, _COLOURS[number % len(_COLOURS)], prefix)
    axes.set(xlabel=x_label, ylabel=y_label)
    _set_scale(axes.xaxis, axes.set_xscale, log=log_x)
    _set_scale(axes.yaxis, axes.set_yscale, log=log_y)
    if not log_x:
        axes.set_xlim(left=0)
    axes.grid(which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format)
    return buffer.getvalue()


def _draw_run(
    axes: Any, run: RunCurves, window: int, x: XAxis, y: YAxis, x_scale: float, colour: str, prefix: str
) -> None:
    train = run.train.smoothed(window)
    if window > 1:
        axes.plot(run.train.x(x) / x_scale, run.train.y(y), color=colour, alpha=0.15, linewidth=0.8, rasterized=True)
    label = f"{prefix}train" + (f", mean of {window:,} updates" if window > 1 else "")
    axes.plot(train.x(x) / x_scale, train.y(y), color=colour, linewidth=1.4, label=label)
    for order, (subset, valid) in enumerate(run.valid.items()):
        axes.plot(
            valid.x(x) / x_scale,
            valid.y(y),
            color=colour,
            linestyle=("--", ":", "-.")[order % 3],
            linewidth=1.4,
            marker="o" if len(valid.loss) <= _MOST_MARKS else "",
            markersize=4.5,
            markerfacecolor="white",
            label=f"{prefix}{subset}",
        )
        if order == 0 and run.best is not None:
            place = valid.x(x)[run.best] / x_scale, valid.y(y)[run.best]
            label = f"{prefix}best {subset}, {place[1]:,.4g} at update {valid.updates[run.best]:,.0f}"
            star = {"color": colour, "marker": "*", "markersize": 15, "markeredgecolor": "white", "linestyle": ""}
            axes.plot([place[0]], [place[1]], label=label, zorder=5, **star)


def _set_scale(axis: Any, set_scale: Any, *, log: bool) -> None:
    """Numbers as people write them; between powers of ten too, where a logarithmic axis has few of these."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    numbers = FuncFormatter(lambda value, _: format_number(value))
    if log:
        set_scale("log")
        low, high = axis.get_view_interval()
        axis.set_minor_formatter(numbers if high < 30 * low else NullFormatter())
    axis.set_major_formatter(numbers)
