"""The page in a browser: on a phone and on a desk, by day and by night."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmtools.report.content import collect
from lmtools.report.page import render
from tests.support.browser import NAMES, find_browser, measure, screenshot
from tests.support.results import write_data, write_metrics, write_result

WIDTHS = [320, 390, 768, 1200]

LOOK = (Path(__file__).parent / "look.js").read_text()


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    if path is None:
        pytest.skip(f"no browser is installed; looked for {', '.join(NAMES)}")
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs and two results with everything that they can show, and names that are long."""
    folder = tmp_path_factory.mktemp("page")
    data = write_data(folder)
    files = [folder / "result.json", folder / ("a_result_with_a_very_long_name" * 3 + ".json")]
    for file in files:
        write_result(file, data, file.with_suffix(".npy"), path="checkpoints/" + "deep/" * 20 + "model.pt")
    runs = [
        write_metrics(folder / name, losses=[9 - n / 50 for n in range(300)], valid={100: 8.5, 300: 7.25})
        for name in ("run", "other-run")
    ]
    path = folder / "report.html"
    path.write_bytes(render("A report", collect([*runs, *files])))
    return path


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_it_fits_and_can_be_read(browser, page, tmp_path, dark):
    found = measure(browser, page, LOOK, widths=WIDTHS, dark=dark, folder=tmp_path)
    for width, look in found.items():
        assert look["width"] == width
        assert look["scrollWidth"] == width, f"nothing moves sideways: {look['beyond'][:3]}"
        assert look["beyond"] == []
        assert look["pale"] == [], "4.5 to 1 at least, as WCAG asks for text"
        assert look["smallest"] >= (8 if width < 390 else 9.5), "pixels"
        assert (look["page"] < 0.05) if dark else (look["page"] > 0.9)
    assert {width: look["columns"] for width, look in found.items()} == {320: 1, 390: 1, 768: 1, 1200: 2}


@pytest.mark.parametrize(
    ("width", "dark"),
    [(390, True), pytest.param(1200, False, marks=pytest.mark.slow)],
    ids=["phone, dark", "desk, light"],
)
def test_a_screenshot_shows_charts_in_both_colours(browser, page, tmp_path, width, dark):
    """On a background of one colour, curves in the style sheet's first two, and nothing that is left unstyled."""
    from matplotlib.image import imread

    screenshot(browser, page, tmp_path / "page.png", width=width, height=6000, dark=dark)
    picture = (imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert picture.shape == (6000, width, 3)
    colours = variables(page, dark=dark)
    assert tuple(picture[2, 2]) == colours["page"]
    for name, least in (("page", 0.1), ("card", 0.1), ("c0", 0.001), ("c1", 0.001)):
        assert (picture == colours[name]).all(axis=2).mean() > least, name


def variables(page, *, dark):
    """Colours of the style sheet, by name."""
    light, night = re.findall(r":root \{(.*?)\}", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"--(\w+): #(\w+);", night if dark else light)
    wide = {name: digits if len(digits) == 6 else "".join(2 * digit for digit in digits) for name, digits in found}
    return {name: tuple(bytes.fromhex(digits)) for name, digits in wide.items()}
