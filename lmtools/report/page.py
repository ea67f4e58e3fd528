"""The page itself: everything that was read and worked out, through one template."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lmtools import __version__
from lmtools.report import svg
from lmtools.report.breakdowns import PASSAGE_TOKENS, frequency_table
from lmtools.report.comparison import comparability, compare, rounded
from lmtools.report.content import Content
from lmtools.report.passages import BITS_PER_SHADE, NUM_SHADES
from lmtools.train.curves import RunCurves


def render(title: str, content: Content) -> bytes:
    """The page, in UTF-8; it needs nothing that is not in it."""
    environment = Environment(
        loader=PackageLoader("lmtools.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"rounded": rounded, "duration": duration, "count": counted}
    evaluations = [section.evaluation for section in content.sections]
    page = environment.get_template("page.html").render(
        title=title,
        version=__version__,
        style=Markup(files("lmtools.report").joinpath("style.css").read_text(encoding="utf-8")),
        sections=content.sections,
        runs=[run_row(run) for run in content.runs],
        comparison=compare(evaluations) if len(evaluations) > 1 else [],
        comparability=comparability(evaluations),
        training=[svg.draw(chart) for chart in content.charts if chart.key in ("training", "speed")],
        breakdown_charts=[svg.draw(chart) for chart in content.charts if chart.key not in ("training", "speed")],
        frequency_table=frequency_table,
        passage_tokens=PASSAGE_TOKENS,
        shades=[f"{shade * BITS_PER_SHADE}" for shade in range(NUM_SHADES)],
        missing=content.missing,
    )
    return page.encode("utf-8", "replace")  # a path may have bytes that are no text


def run_row(run: RunCurves) -> dict[str, Any]:
    """A run in numbers."""
    subset, valid = next(iter(run.valid.items()), (None, None))
    best = None
    if valid is not None and run.best is not None:
        loss = float(valid.loss[run.best])
        best = {"subset": subset, "updates": int(valid.updates[run.best]), "loss": loss}
        best["perplexity"] = rounded(2**loss) if loss < 1024 else "∞"
    tokens, training_seconds = float(run.train.tokens[-1]), float(run.train.training_seconds[-1])
    return {
        "name": run.name,
        "updates": int(run.train.updates[-1]),
        "tokens": int(tokens),
        "training_seconds": training_seconds,
        "best": best,
        "tokens_per_second": tokens / training_seconds if training_seconds > 0 else None,
    }


def counted(value: object) -> str:
    """A count with commas; anything else that a manifest may hold as it is."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def duration(seconds: float) -> str:
    """A time as a person would say it."""
    for name, scale in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {name}"
    return f"{seconds:.1f} s"
