"""Charts as SVG: well-formed, inside their frame, with every text escaped."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from lmtools.report import svg
from lmtools.report.charts import BarChart, Curve, LineChart

EVIL = '<script>alert("&")</script>'


def line_chart(*curves: Curve, **options) -> LineChart:
    return LineChart("key", options.pop("title", "title"), "updates", "bits", curves, **options)


def parsed(chart) -> ElementTree.Element:
    return ElementTree.fromstring(str(svg.draw(chart)))


def test_points_lie_inside_the_frame_in_order():
    curve = Curve("loss", np.array([0.0, 50.0, 100.0]), np.array([8.0, 4.0, 2.0]), 0)
    element = parsed(line_chart(curve, y_from_0=True))
    _, _, width, height = map(float, element.find("svg").get("viewBox").split())
    points = [tuple(map(float, pair.split(","))) for pair in element.find(".//polyline").get("points").split()]
    assert element.find(".//polyline/title").text == "loss", "colours repeat after six, so pointing at a curve names it"
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points), "the lower the loss the lower the point"
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2, abs=0.1)
    assert points[1][1] == pytest.approx(points[0][1] + (points[2][1] - points[0][1]) * 4 / 6, abs=0.1)


def test_bars_are_as_high_as_their_values():
    chart = BarChart("key", "title", "times", "bits", ["1–9", "10–99"], [("a", [6.0, None]), ("b", [3.0, 1.5])])
    bars = parsed(chart).findall(".//rect")
    assert [bar.get("class") for bar in bars] == ["k0", "k1", "k1"]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights == pytest.approx([heights[0], heights[0] / 2, heights[0] / 4], abs=0.2)
    assert parsed(chart).find("ul") is not None, "two need a legend"


def test_names_are_text_whatever_they_say():
    curves = [Curve(EVIL, np.array([1.0, 2.0]), np.array([1.0, 2.0]), colour, star=0) for colour in (0, 1)]
    for chart in (
        line_chart(*curves, title=EVIL, note=EVIL),
        BarChart(EVIL, EVIL, EVIL, EVIL, [EVIL], [(EVIL, [1.0]), (EVIL, [2.0])], note=EVIL),
    ):
        drawn = str(svg.draw(chart))
        assert "<script" not in drawn
        assert parsed(chart).find("figcaption").text == EVIL


@pytest.mark.parametrize("y", [[5.0], [5.0, 5.0], [0.0], [np.nan, 3.0], [np.inf, 3.0]])
def test_any_values_will_do(y):
    drawn = str(svg.draw(line_chart(Curve("a", np.arange(len(y), dtype=float), np.array(y), 0))))
    points = ElementTree.fromstring(drawn).find(".//polyline").get("points")
    assert "nan" not in drawn
    assert "inf" not in points


def test_the_star_is_named_in_the_legend():
    curves = [Curve("train", np.array([1.0, 2.0]), np.array([9.0, 8.0]), 0)]
    curves.append(Curve("valid", np.array([1.0, 2.0]), np.array([7.25, 8.0]), 0, dashed=True, star=0))
    legend = ["".join(item.itertext()) for item in parsed(line_chart(*curves)).findall(".//li")]
    assert legend == ["train", "valid, ★ best 7.250 at 1"]
