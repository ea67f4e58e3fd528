"""`lmtools plot`: the training and validation curves of runs, on the terminal or as a picture."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from lmtools.train.curves import RunCurves


class XAxis(str, Enum):
    """What the horizontal axis counts."""

    updates = "updates"
    tokens = "tokens"
    seconds = "seconds"


class YAxis(str, Enum):
    """What the vertical axis shows."""

    loss = "loss"
    ppl = "ppl"


_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
_MOST_MARKS = 24
"""With more validations than this, they are drawn as a line alone."""
_Y_LABELS = {YAxis.loss: "loss, bits per token", YAxis.ppl: "perplexity per token"}


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `lmtools train` saved to, or their metrics.jsonl.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw to this .png, .pdf or .svg file, not to the terminal.")
    ] = None,
    x: Annotated[XAxis, typer.Option("--x", help="What the horizontal axis counts.")] = XAxis.updates,
    y: Annotated[YAxis, typer.Option("--y", help="Loss (base 2) or perplexity.")] = YAxis.loss,
    smooth: Annotated[
        int | None,
        typer.Option(
            min=1, help="Updates that the training loss is averaged over; a hundredth of the run if not given."
        ),
    ] = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="Logarithmic horizontal axis.")] = False,
    log_y: Annotated[
        bool | None, typer.Option("--log-y/--no-log-y", help="Logarithmic vertical axis; it is for --y ppl.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the training and validation curves of one or several runs; the best validation is marked."""
    from lmtools.train.curves import default_window, read_runs

    curves = read_runs(runs)
    windows = [smooth or default_window(len(run.train.loss)) for run in curves]
    log_y = y is YAxis.ppl if log_y is None else log_y
    x_label, x_scale = _unit(x, max(float(run.train.x(x.value)[-1]) for run in curves))
    if output is not None:
        from lmtools.files import atomic_write
        from lmtools.train.figure import draw_figure

        picture = draw_figure(
            curves,
            x=x.value,
            y=y.value,
            x_label=x_label,
            y_label=_Y_LABELS[y],
            x_scale=x_scale,
            windows=windows,
            log_x=log_x,
            log_y=log_y,
            file_format=output.suffix[1:].lower(),
        )
        with atomic_write(output) as stream:
            stream.write(picture)
    elif not as_json:
        _print_chart(curves, windows, x, y, x_label, x_scale, log_x=log_x, log_y=log_y)
    summaries = [_summary(run, window) for run, window in zip(curves, windows, strict=True)]
    if as_json:
        print_json({"runs": summaries})
    else:
        _print_legend(summaries, y, lettered=output is None and len(curves) > 1)


def _unit(x: XAxis, largest: float) -> tuple[str, float]:
    """Seconds as what a person would say."""
    if x is not XAxis.seconds:
        return x.value, 1.0
    scales = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next((name, scale) for name, scale in scales if largest >= 2 * scale or scale == 1.0)


def _print_chart(
    runs: Sequence[RunCurves],
    windows: Sequence[int],
    x: XAxis,
    y: YAxis,
    x_label: str,
    x_scale: float,
    *,
    log_x: bool,
    log_y: bool,
) -> None:
    from lmtools.train.chart import Axis, Line, draw

    trains, valids = [], []
    for number, (run, window) in enumerate(zip(runs, windows, strict=True)):
        smooth = run.train.smoothed(window)
        letter = [""] * (len(smooth.loss) - 1) + [_letter(number)] if len(runs) > 1 else ()
        trains.append(Line(smooth.x(x.value) / x_scale, smooth.y(y.value), 2 * number, letter))
        for order, valid in enumerate(run.valid.values()):
            marks = ["●" if len(valid.loss) <= _MOST_MARKS else ""] * len(valid.loss)
            if order == 0 and run.best is not None:
                marks[run.best] = "★"
            valids.append(Line(valid.x(x.value) / x_scale, valid.y(y.value), 2 * number + 1, marks))
    lines = [*trains, *valids]
    width, height = shutil.get_terminal_size((80, 24))
    rows = draw(
        lines,
        Axis.over([line.x for line in lines], log=log_x, whole=x is XAxis.updates, from_0=True),
        Axis.over([line.y for line in lines], log=log_y, margin=0.02),
        width=min(max(width, 40), 160) - 1,
        height=min(max(height - 2 - 2 * len(runs), 12), 36),
        x_label=x_label,
        y_label=_Y_LABELS[y],
    )
    _print_rows([[(text, _style(colour, len(runs))) for text, colour in row] for row in rows])


def _print_legend(summaries: Sequence[dict[str, Any]], y: YAxis, *, lettered: bool) -> None:
    rows = []
    for number, run in enumerate(summaries):
        train, valid = (_style(2 * number + which, len(summaries)) for which in (0, 1))
        letter = f"{_letter(number)} " if lettered else ""
        length = f"{run['num_updates']:,} updates, {run['num_tokens']:,} tokens, {_time(run['seconds'])}"
        rows.append([(f"{letter}{run['name']}", train), (f"  {length}", "")])
        losses = [("  ⠤⠤ ", train), (f"train {_value(run['train_loss_base2'], y)}", "")]
        for subset, loss in run["valid_loss_base2"].items():
            losses += [("   ● ", valid), (f"{subset} {_value(loss, y)}", "")]
        if run["best"] is not None:
            best = f"best {_value(run['best']['loss_base2'], y)} at update {run['best']['num_updates']:,}"
            losses += [("   ★ ", valid), (best, "")]
        rows.append(losses)
    _print_rows(rows)


def _print_rows(rows: Sequence[Sequence[tuple[str, str]]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from lmtools.train.chart import to_ascii

    console = Console()
    for row in rows:
        plain = "".join(text for text, _ in row)
        try:
            plain.encode(console.encoding)
        except UnicodeEncodeError:
            row = [(to_ascii(text), style) for text, style in row]
        console.print(Text.assemble(*row), soft_wrap=True, highlight=False)


def _style(colour: int | None, num_runs: int) -> str:
    """Of a single run training and validation differ in colour, of several the runs do."""
    if colour is None:
        return ""
    number, is_valid = divmod(colour, 2)
    if num_runs == 1:
        return "bold yellow" if is_valid else "cyan"
    return f"{'bold ' if is_valid else ''}{_COLOURS[number % len(_COLOURS)]}"


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else str(number)


def _value(loss: float, y: YAxis) -> str:
    return f"{loss:.3f}" if y is YAxis.loss else f"{2**loss:,.2f}" if loss < 1024 else "inf"


def _time(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.0f} s"


def _summary(run: RunCurves, window: int) -> dict[str, Any]:
    """Where a run stands: its last losses, and its best validation."""
    valid = {subset: float(series.loss[-1]) for subset, series in run.valid.items() if len(series.loss)}
    best = None
    if run.best is not None:
        subset, series = next(iter(run.valid.items()))
        best = {
            "subset": subset,
            "num_updates": int(series.updates[run.best]),
            "loss_base2": float(series.loss[run.best]),
        }
    return {
        "name": run.name,
        "num_updates": int(run.train.updates[-1]),
        "num_tokens": int(run.train.tokens[-1]),
        "seconds": float(run.train.seconds[-1]),
        "train_loss_base2": float(run.train.smoothed(window).loss[-1]),
        "valid_loss_base2": valid,
        "best": best,
    }
