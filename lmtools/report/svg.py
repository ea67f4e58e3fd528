"""Charts as SVG for a page: colours are the page's, text is escaped, and one drawing fits a phone and a desk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from lmtools.report.charts import BarChart, Chart, Curve, LineChart
from lmtools.train.chart import Axis, format_number

NUM_COLOURS = 6
"""The page's style sheet has `--c0` to `--c5`."""

_WIDTH, _HEIGHT = 380, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 10, 22, 38
_MOST_MARKS = 24
"""A curve of more points is drawn without dots."""


def draw(chart: Chart) -> Markup:
    """The chart as an `svg` element with title and legend around it."""
    body = _lines(chart) if isinstance(chart, LineChart) else _bars(chart)
    note = Markup("<small>{}</small>").format(chart.note) if chart.note else ""
    label = f"{chart.title}: {chart.y_label} by {chart.x_label}"
    return Markup(
        '<figure><figcaption>{}</figcaption><svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>{}{}</figure>'
    ).format(chart.title, _WIDTH, _HEIGHT, label, body, _legend(chart), note)


def _lines(chart: LineChart) -> Markup:
    x_axis = Axis.over([curve.x for curve in chart.curves], log=False, from_0=chart.x_label == "updates")
    y_axis = Axis.over([curve.y for curve in chart.curves], log=False, margin=0.04, from_0=chart.y_from_0)
    return _frame(chart, y_axis) + _x_ticks(x_axis) + _join([_curve(curve, x_axis, y_axis) for curve in chart.curves])


def _curve(curve: Curve, x_axis: Axis, y_axis: Axis) -> Markup:
    known = np.isfinite(curve.y)
    xs, ys = _x(x_axis.place(curve.x)), _y(y_axis.place(curve.y))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs[known].tolist(), ys[known].tolist(), strict=True))
    style = Markup('class="k{}{}"').format(curve.colour % NUM_COLOURS, " dashed" if curve.dashed else "")
    drawn = Markup('<polyline {} points="{}"><title>{}</title></polyline>').format(style, points, curve.name)
    if len(xs) <= _MOST_MARKS:
        dot = Markup('<circle {} cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}: {}</title></circle>')
        drawn += _join(
            [
                dot.format(style, xs[index], ys[index], format_number(float(curve.x[index])), f"{curve.y[index]:.4g}")
                for index in np.flatnonzero(known).tolist()
            ]
        )
    if curve.star is not None:
        text = best_of(curve)
        x, y = float(xs[curve.star]), float(ys[curve.star])
        star = Markup('<text class="star k{}" x="{:.1f}" y="{:.1f}">★<title>{}</title></text>')
        drawn += star.format(curve.colour % NUM_COLOURS, x, y + 5, text)
    return drawn


def _bars(chart: BarChart) -> Markup:
    values = np.array([value for _, row in chart.bars for value in row if value is not None], dtype=np.float64)
    y_axis = Axis.over([values * 1.08], log=False, from_0=True)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(chart.categories)
    width = min(slot * 0.8 / len(chart.bars), 46)
    drawn = []
    for index, category in enumerate(chart.categories):
        middle = _LEFT + (index + 0.5) * slot
        label = Markup('<text text-anchor="middle" x="{:.1f}" y="{}">{}</text>')
        drawn.append(label.format(middle, _HEIGHT - _BOTTOM + 15, category))
        for number, (name, row) in enumerate(chart.bars):
            value = row[index]
            if value is None:
                continue
            left = middle + (number - len(chart.bars) / 2) * width
            top = float(_y(y_axis.place(np.array([value])))[0])
            bar = Markup(
                '<rect class="k{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
            )
            height = max(_HEIGHT - _BOTTOM - top, 0.0)
            text = f"{name}, {category}: {value:.3f}"
            drawn.append(bar.format(number % NUM_COLOURS, left + 0.5, top, max(width - 1, 1), height, text))
            if len(chart.bars) == 1:
                above = Markup('<text text-anchor="middle" x="{:.1f}" y="{:.1f}">{:.2f}</text>')
                drawn.append(above.format(middle, top - 4, value))
    return _frame(chart, y_axis) + _join(drawn)


def _frame(chart: Chart, y_axis: Axis) -> Markup:
    """The horizontal lines with their numbers, and the names of both axes."""
    pieces = []
    ticks = y_axis.ticks(6)
    for tick, y in zip(ticks, _y(y_axis.place(np.array(ticks, dtype=np.float64))).tolist(), strict=True):
        line = Markup('<path class="grid" d="M{} {:.1f}H{}"/><text text-anchor="end" x="{}" y="{:.1f}">{}</text>')
        pieces.append(line.format(_LEFT, y, _WIDTH - _RIGHT, _LEFT - 5, y + 4, format_number(tick)))
    names = Markup('<text x="{}" y="12">{}</text><text text-anchor="end" x="{}" y="{}">{}</text>')
    return _join(pieces) + names.format(4, chart.y_label, _WIDTH - _RIGHT, _HEIGHT - 6, chart.x_label)


def _x_ticks(axis: Axis) -> Markup:
    ticks = axis.ticks(6)
    places = _x(axis.place(np.array(ticks, dtype=np.float64))).tolist()
    text = Markup('<text text-anchor="middle" x="{:.1f}" y="{}">{}</text>')
    baseline = Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT)
    return baseline + _join(
        [text.format(x, _HEIGHT - _BOTTOM + 15, format_number(tick)) for tick, x in zip(ticks, places, strict=True)]
    )


def best_of(curve: Curve) -> str:
    """What the star of a curve marks, in words."""
    return "" if curve.star is None else f"best {curve.y[curve.star]:.3f} at {curve.x[curve.star]:,.0f}"


def _legend(chart: Chart) -> Markup:
    if isinstance(chart, LineChart):
        rows = [(curve.name, curve.colour, curve.dashed, best_of(curve)) for curve in chart.curves]
    else:
        rows = [(name, number, False, "") for number, (name, _) in enumerate(chart.bars)]
    if len(rows) < 2:
        return Markup("")
    item = Markup('<li><i class="k{}{}"></i>{}{}</li>')
    items = [
        item.format(colour % NUM_COLOURS, " dashed" if dashed else "", name, f", ★ {best}" if best else "")
        for name, colour, dashed, best in rows
    ]
    return Markup('<ul class="legend">{}</ul>').format(_join(items))


def _x(places: np.ndarray) -> np.ndarray:
    return _LEFT + places * (_WIDTH - _LEFT - _RIGHT)


def _y(places: np.ndarray) -> np.ndarray:
    return _TOP + (1 - places) * (_HEIGHT - _TOP - _BOTTOM)


def _join(pieces: Sequence[Markup]) -> Markup:
    return Markup("").join(pieces)
