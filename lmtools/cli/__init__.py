"""The command line: one file per command, and the one place where errors become a line on stderr.

`commands.py` has the table of all commands. A command's module must be cheap to import (no numpy, no torch): everything
heavy is imported inside the command, so that `lmtools COMMAND --help` and the text stages start at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from lmtools import __version__
from lmtools.cli.commands import CommandTable
from lmtools.cli.memory_errors import memory_errors
from lmtools.cli.standard_streams import checked_standard_streams
from lmtools.errors import LmtoolsError, WorkerError
from lmtools.files import file_errors
from lmtools.parallel.launch import is_worker, prefix_of_rank, worker

app = typer.Typer(
    name="lmtools",
    cls=CommandTable,
    help="Train and evaluate sharded language models, from raw text to a perplexity you can trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug keeps its plain traceback
    rich_markup_mode=None,  # boxes cut long option names off, and loading rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import platform

        import torch

        gpus = torch.cuda.device_count()
        device = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "cpu"
        typer.echo(f"lmtools {__version__}")
        typer.echo(f"torch {torch.__version__}, python {platform.python_version()}, device {device}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions and the device, and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 an LmtoolsError (one line on stderr), 2 wrong usage, 130 Ctrl-C.

    SIGTERM and SIGHUP exit with 143 and 129. A ConfigError is wrong usage too: options that were understood one by one,
    and cannot work together.
    """
    with checked_standard_streams():
        try:
            with worker(), _ended_in_order(), file_errors(), memory_errors():
                app(prog_name="lmtools")  # not `python -m lmtools`, for completion
        except LmtoolsError as error:
            if isinstance(error, WorkerError):
                sys.stderr.write(error.traceback)  # a bug keeps its traceback, in a worker too
            print(f"lmtools: {prefix_of_rank()}{error}", file=sys.stderr)
            sys.exit(error.exit_code)
        sys.exit(0)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end a command as Ctrl-C does, by an exception: temporary files go, children are ended.

    A second one ends it at once. What a process was told to ignore (`nohup`) it ignores. Workers keep the default
    action, which needs no answer from a rank that hangs in a collective; their launcher cleans up.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for handled in before:
            signal.signal(handled, signal.SIG_DFL)
        raise SystemExit(128 + number)

    numbers = () if is_worker() else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
