"""What the benchmarks of text stages share: options, the texts, and the report's shape."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from commands import TABLE_HEAD, command_line, machine, versions


def options(description: str | None, *, text: str) -> argparse.ArgumentParser:
    """The options that all have.

    Args:
        description: what the benchmark does.
        text: what --text is.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help=text)
    parser.add_argument("--repeat", type=int, default=100, help="how many times over it is written")
    parser.add_argument("--workers", type=int, default=2, help="of lmtools")
    parser.add_argument("--runs", type=int, default=3, help="of each command of lmtools; the medians count")
    parser.add_argument("--fairseq-python", help="a Python with fairseq; without it there is no such row")
    parser.add_argument("--scratch", type=Path, help="folder for the texts")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    return parser


def main(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, Path], str]) -> None:
    """Run a benchmark, which is given an empty folder, and print the report that it returns."""
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        report = run(arguments, Path(folder))
    print(report)
    if arguments.output:
        arguments.output.write_text(report)


class Texts(NamedTuple):
    """A text many times over, and what shows how the time depends on its size."""

    whole: Path
    tenth: Path
    empty: Path


def write_texts(arguments: argparse.Namespace, scratch: Path) -> Texts:
    """Write the text `--repeat` times over, a tenth of that, and nothing at all."""
    content = arguments.text.read_bytes()
    texts = Texts(scratch / "text", scratch / "tenth", scratch / "empty")
    # Piece by piece: what this process once held, Linux counts as its children's memory too.
    for path, num_times in ((texts.whole, arguments.repeat), (texts.tenth, max(arguments.repeat // 10, 1))):
        with open(path, "wb") as stream:
            for _ in range(num_times):
                stream.write(content)
    texts.empty.touch()
    return texts


def report(
    title: str,
    arguments: argparse.Namespace,
    texts: Texts,
    *,
    load_before: float,
    packages: Sequence[str],
    rows: Sequence[str],
    findings: Sequence[str],
    table_head: str = TABLE_HEAD,
) -> str:
    """The report as Markdown."""
    lines = [
        f"# {title}",
        "",
        f"- text: {arguments.text.name}, {arguments.repeat} times over, {texts.whole.stat().st_size:,} bytes",
        f"- machine: {machine()}; load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after",
        f"- versions: {versions('lmtools', *packages)}",
        f"- command: `{command_line()}`; medians of {arguments.runs} runs, the commands in turn",
        "",
        table_head,
        *rows,
        "",
        *findings,
        "",
    ]
    return "\n".join(lines)
