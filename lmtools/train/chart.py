"""Curves as text: dots of Braille characters, 2 by 4 in each, between two axes.

loss, bits per token
 8 ┤⡇
   │⢣
 6 ┤ ⠣⡀
   │  ⠈⠢⢄●⣀
 4 ┤       ⠉⠉★⠒⠒⠒⠒●
   └┬────────┬──────
    0       50  updates
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtools.train.curves import Floats

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in each of 4 rows and 2 columns of a Braille character."""

_ASCII = {"┤": "+", "│": "|", "└": "+", "┬": "+", "─": "-", "●": "o", "★": "*"}


@dataclass(frozen=True)
class Line:
    """A polyline.

    Attributes:
        x: rising, `(n,)`.
        y: `(n,)`; what is not finite is left out.
        colour: a number, the same for what belongs together.
        marks: a character for points to be marked with, in the order of `x`; "" marks none of them.
    """

    x: Floats
    y: Floats
    colour: int
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """From values to places: linear or logarithmic, over a range.

    Attributes:
        low: least value.
        high: largest value, above `low`.
        log: logarithmic.
        whole: there is nothing between whole numbers.
    """

    low: float
    high: float
    log: bool
    whole: bool = False

    @classmethod
    def over(
        cls, values: Sequence[Floats], *, log: bool, whole: bool = False, margin: float = 0.0, from_0: bool = False
    ) -> Axis:
        """The axis of all finite values (of the positive ones, if logarithmic), with a margin at both ends.

        `from_0` begins a linear one at 0.
        """
        joined = np.concatenate([*values, np.empty(0)])
        joined = joined[np.isfinite(joined) & ((joined > 0) | (not log))]
        low, high = (float(joined.min()), float(joined.max())) if len(joined) else (1.0, 2.0)
        if log:
            pad = (high / low) ** margin if high > low else 2.0
            return cls(low / pad, high * pad, log, whole)
        if from_0:
            return cls(0.0, high if high > 0 else 1.0, log, whole)
        pad = margin * (high - low) if high > low else max(abs(high) / 2, 0.5)
        return cls(low - pad, high + pad, log, whole)

    def place(self, values: Floats) -> Floats:
        """Where values stand: 0 at the low end, 1 at the high one; NaN for what has no place."""
        with np.errstate(invalid="ignore", divide="ignore"):
            if self.log:
                return np.asarray(np.log(values / self.low) / math.log(self.high / self.low))
            return np.asarray((values - self.low) / (self.high - self.low))

    def ticks(self, most: int) -> list[float]:
        """Round numbers in the range, at most so many: 1, 2 or 5 times a power of ten."""
        if self.log and self.high / self.low >= 20:
            return _log_ticks(self.low, self.high, most)
        step = _round_up((self.high - self.low) / max(most, 1))
        if self.whole:
            step = max(step, 1.0)
        first = math.ceil(self.low / step - 1e-9)
        ticks = [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return ticks if len(ticks) <= max(most, 1) else ticks[:: -(-len(ticks) // max(most, 1))]


def draw(
    lines: Sequence[Line], x_axis: Axis, y_axis: Axis, *, width: int, height: int, x_label: str, y_label: str
) -> list[list[tuple[str, int | None]]]:
    """Draw lines; what comes later covers what comes before.

    Args:
        lines: what is drawn.
        x_axis: from left to right.
        y_axis: from bottom to top.
        width: columns of the whole chart, labels included.
        height: rows of the whole chart, of which 3 are for labels.
        x_label: unit of x.
        y_label: unit of y.

    Returns:
        Rows of pieces: text, and the colour of the line that it belongs to, or None for axes and labels.
    """
    num_rows = max(height - 3, 3)
    y_ticks = {round((1 - place) * (num_rows - 1)): tick for tick, place in _placed(y_axis, num_rows // 2)}
    names = {row: format_number(tick) for row, tick in y_ticks.items()}
    margin = max(map(len, names.values()), default=0) + 1
    num_columns = max(width - margin - 1, 10)
    canvas = _Canvas(num_columns, num_rows)
    for line in lines:
        canvas.draw(x_axis.place(line.x), y_axis.place(line.y), line.colour, line.marks)

    rows: list[list[tuple[str, int | None]]] = [[(f"{' ' * margin}{y_label}", None)]]
    for row in range(num_rows):
        label = f"{names.get(row, ''):>{margin - 1}} {'┤' if row in names else '│'}"
        rows.append([(label, None), *canvas.row(row)])
    x_ticks = {round(place * (num_columns - 1)): tick for tick, place in _placed(x_axis, num_columns // 12)}
    axis = "".join("┬" if column in x_ticks else "─" for column in range(num_columns))
    rows.append([(f"{' ' * margin}└{axis}", None)])
    rows.append([(_below(x_ticks, x_label, margin + 1, margin + 1 + num_columns), None)])
    return rows


def to_ascii(text: str) -> str:
    """A chart's text for a terminal that has no Braille characters."""
    return "".join("." if 0x2800 < ord(char) < 0x2900 else _ASCII.get(char, char) for char in text)


def format_number(value: float) -> str:
    """A tick's label: `0.5`, `2,500`, `10k`, `1.5M`, `1e+20`."""
    if abs(value) >= 1e15:
        return f"{value:.4g}"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):,.6g}{suffix}"
    return f"{value:,.6g}"


class _Canvas:
    """Cells of 2 by 4 dots, or of a mark."""

    def __init__(self, num_columns: int, num_rows: int) -> None:
        self._num_columns, self._num_rows = num_columns, num_rows
        self._dots = [[0] * num_columns for _ in range(num_rows)]
        self._marks = [[""] * num_columns for _ in range(num_rows)]
        self._colours: list[list[int | None]] = [[None] * num_columns for _ in range(num_rows)]

    def draw(self, x: Floats, y: Floats, colour: int, marks: Sequence[str]) -> None:
        known = np.isfinite(x) & np.isfinite(y)
        columns = np.rint(x[known] * (2 * self._num_columns - 1)).astype(int)
        rows = (1 - y[known]) * (4 * self._num_rows - 1)
        # Of many points in one column of dots their mean.
        places, inverse = np.unique(columns, return_inverse=True)
        means = np.rint(np.bincount(inverse, rows) / np.bincount(inverse)) if len(rows) else rows
        dots = list(zip(places.tolist(), means.astype(int).tolist(), strict=True))
        for (x0, y0), (x1, y1) in zip(dots[:1] + dots, dots, strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(steps + 1):
                self._set(round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps), colour)
        for index in np.flatnonzero(known).tolist():
            if marks and marks[index]:
                row = round(float(1 - y[index]) * (4 * self._num_rows - 1)) // 4
                column = round(float(x[index]) * (2 * self._num_columns - 1)) // 2
                self._marks[row][column], self._colours[row][column] = marks[index], colour

    def _set(self, column: int, row: int, colour: int) -> None:
        self._dots[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        self._colours[row // 4][column // 2] = colour

    def row(self, row: int) -> list[tuple[str, int | None]]:
        cells = zip(self._dots[row], self._marks[row], self._colours[row], strict=True)
        return [(mark or (chr(_BRAILLE + dots) if dots else " "), colour) for dots, mark, colour in cells]


def _placed(axis: Axis, most: int) -> list[tuple[float, float]]:
    ticks = axis.ticks(most)
    return list(zip(ticks, axis.place(np.array(ticks, dtype=np.float64)).tolist(), strict=True))


def _below(ticks: dict[int, float], unit: str, left: int, width: int) -> str:
    """Labels under their ticks and the unit at the right end; a label that would touch another is left out."""
    text = ""
    for column, tick in sorted(ticks.items()):
        label = format_number(tick)
        start = left + column - (len(label) - 1) // 2
        if (start > len(text) or not text) and start + len(label) < width - len(unit):
            text = text.ljust(start) + label
    return text.ljust(width - len(unit)) + unit


def _round_up(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9)))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= max(most, 2):
            return ticks
    return ticks[:: -(-len(ticks) // max(most, 2))]
