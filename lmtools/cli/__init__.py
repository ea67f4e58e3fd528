"""The command line: one file per command, and the one place where errors become a line on stderr.

A command's module must be cheap to import (no numpy, no torch): everything heavy is imported inside the command,
so that `lmtools --help` and the text stages start at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from lmtools import __version__
from lmtools.cli.binarize import binarize
from lmtools.cli.bpe_decode import bpe_decode
from lmtools.cli.bpe_encode import bpe_encode
from lmtools.cli.detok import detok
from lmtools.cli.download import download
from lmtools.cli.eval import evaluate
from lmtools.cli.many_values import ManyValuesCommand
from lmtools.cli.quickstart import quickstart
from lmtools.cli.renorm_ppl import renorm_ppl
from lmtools.cli.train import command as train
from lmtools.errors import LmtoolsError, WorkerError
from lmtools.parallel.launch import prefix_of_rank, worker

app = typer.Typer(
    name="lmtools",
    help="Train and evaluate sharded language models, from raw text to a perplexity you can trust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug keeps its plain traceback
    rich_markup_mode=None,  # boxes cut long option names off, and loading rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmtools {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


# Without a short_help, --help shows the beginning of the docstring, cut off at the width of the terminal.
app.command("binarize", short_help="Turn text into .bin and .idx splits, as fairseq-preprocess does.")(binarize)
app.command("bpe-decode", cls=ManyValuesCommand)(bpe_decode)
app.command("bpe-encode", cls=ManyValuesCommand, short_help="Encode text with GPT-2's BPE, as fairseq's encoder does.")(
    bpe_encode
)
app.command("detok", short_help="Detokenise WikiText, as fairseq's megatron_11b example does.")(detok)
app.command("download", short_help="Fetch checkpoints, dictionaries and texts, and check them.")(download)
app.command("eval", short_help="Score a split with a checkpoint and report its perplexity.")(evaluate)
app.command("quickstart", short_help="Run the main job on a small text and an untrained model.")(quickstart)
app.command("renorm-ppl", short_help="Express a perplexity per token of the original text.")(renorm_ppl)
app.command("renormalize-ppl", hidden=True)(renorm_ppl)
app.command("train", short_help="Train a language model, split and replicated over workers.")(train)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 an LmtoolsError (one line on stderr), 2 wrong usage, 130 Ctrl-C.

    A ConfigError is wrong usage too: options that were understood one by one, and cannot work together.
    """
    try:
        with worker():
            app(standalone_mode=True)
    except LmtoolsError as error:
        if isinstance(error, WorkerError):
            sys.stderr.write(error.traceback)  # a bug keeps its traceback, in a worker too
        print(f"lmtools: {prefix_of_rank()}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)
