"""`lmtools report`: runs and results as one page to read, keep and pass on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json
from lmtools.errors import ConfigError
from lmtools.files import STDIO

if TYPE_CHECKING:
    from lmtools.report.content import Content


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_RESULT...", help="Folders that train saved to, and JSON files that eval --output wrote."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    scores: Annotated[
        list[Path] | None, typer.Option(help="Scores of eval --scores, if not where the result says; may be repeated.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Folder of data, if not where the result says; may be repeated.")
    ] = None,
    manifests: Annotated[
        list[Path] | None,
        typer.Option(help="Folder with manifests of the steps before, if not around the data; may be repeated."),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Folder for the charts as PNG files too.")] = None,
    title: Annotated[str, typer.Option(help="At the top of the page.")] = "lmtools report",
    as_json: JsonOption = False,
) -> None:
    """Show perplexities with their counts, training curves, where the loss lies, and where each number comes from.

    The page is one file and needs no network. What cannot be shown is named on it, with how to get it.
    """
    if str(output) == STDIO:
        raise ConfigError("--output -: expected a file's name; --json prints on standard output")
    if png is not None and png.exists() and not png.is_dir():
        raise ConfigError(f"--png {png}: is a file, expected a folder")

    from lmtools.files import atomic_write, disk_errors
    from lmtools.report import png as pictures
    from lmtools.report.content import collect
    from lmtools.report.page import render

    content = collect(sources, scores=scores or [], data=data or [], manifests=manifests or [])
    drawn = {f"{chart.key}.png": pictures.draw(chart) for chart in content.charts} if png is not None else {}
    page = render(title, content)
    if png is not None:
        with disk_errors(png):
            png.mkdir(parents=True, exist_ok=True)
        for name, picture in drawn.items():
            with atomic_write(png / name) as stream:
                stream.write(picture)
    with atomic_write(output) as stream:
        stream.write(page)
    summary = _summary(content, output, [str(png / name) for name in drawn] if png is not None else [])
    if as_json:
        print_json(summary)
    else:
        _print(summary)


def _summary(content: Content, output: Path, pictures: list[str]) -> dict[str, Any]:
    return {
        "output": str(output),
        "png": pictures,
        "runs": [run.name for run in content.runs],
        "results": [
            {
                "name": section.evaluation.name,
                "perplexity": section.evaluation.result.perplexity,
                "word_perplexity": section.evaluation.result.word_perplexity,
                "tokens_scored": section.evaluation.result.tokens_scored,
                "has_breakdown": section.breakdown is not None,
            }
            for section in content.sections
        ],
        "missing": list(content.missing),
    }


def _print(summary: dict[str, Any]) -> None:
    for result in summary["results"]:
        typer.echo(f"{result['name']}: perplexity {result['perplexity']:,.2f} over {result['tokens_scored']:,} tokens")
    for sentence in summary["missing"]:
        typer.echo(f"not shown: {sentence}")
    for path in [*summary["png"], summary["output"]]:
        typer.echo(f"wrote {path}")
