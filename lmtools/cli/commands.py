"""Which commands there are. A command's module is imported when the command is asked for, and no other is.

So `lmtools --help` shows this table and nothing else, and takes as long with thirty commands as with three.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from lmtools.cli.many_values import ManyValuesCommand


class Command(NamedTuple):
    """One row of the table.

    Attributes:
        function: where it is in `lmtools.cli`, as `module:function`.
        says: what it does, in a line of an 80-column terminal; empty for one that --help does not list.
        takes_many: options take several values after one flag, see `many_values.py`.
    """

    function: str
    says: str
    takes_many: bool = False


COMMANDS = {
    "binarize": Command("binarize:binarize", "Make .bin and .idx splits of text, as fairseq-preprocess does."),
    "bpe-decode": Command("bpe_decode:bpe_decode", "Decode what bpe-encode wrote, line by line.", takes_many=True),
    "bpe-encode": Command(
        "bpe_encode:bpe_encode", "Encode text with GPT-2's BPE, as fairseq's encoder does.", takes_many=True
    ),
    "crosscheck": Command("crosscheck:crosscheck", "Run fairseq beside lmtools on your data, and show what differs."),
    "detok": Command("detok:detok", "Detokenise WikiText, as fairseq's megatron_11b example does."),
    "download": Command("download:download", "Fetch checkpoints, dictionaries and texts, and check them."),
    "eval": Command("eval:evaluate", "Score a split with a checkpoint and report its perplexity."),
    "export-dict": Command("export_dict:export_dict", "Write the words of transformers' Transformer-XL as a dict.txt."),
    "generate": Command("generate:generate", "Continue prompts with a language model."),
    "inspect": Command("inspect:inspect", "Say what a file or folder is, and where it is broken."),
    "plan": Command("plan:plan", "Say what a run needs: memory, traffic, operations, time."),
    "plot": Command("plot:plot", "Draw training runs' curves, on the terminal or as a picture."),
    "quickstart": Command("quickstart:quickstart", "Go the whole way on a small text, from raw text to a report."),
    "renorm-ppl": Command("renorm_ppl:renorm_ppl", "Express a perplexity per token of the original text."),
    "renormalize-ppl": Command("renorm_ppl:renorm_ppl", ""),
    "report": Command("report:report", "Show runs and results as one page, with charts and provenance."),
    "reproduce": Command("reproduce:reproduce", "Make a published perplexity again, from download to number."),
    "reshard": Command("reshard:reshard", "Write a checkpoint in another number of parts or format."),
    "train": Command("train:command", "Train a language model, split and replicated over workers."),
}


class CommandTable(TyperGroup):
    """The commands of the table, and those that were registered with typer's own decorator."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in order."""
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the command and build its options; None if there is no such command."""
        row = COMMANDS.get(cmd_name)
        if row is None:
            return super().get_command(ctx, cmd_name)
        module, _, function = row.function.partition(":")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        cls = ManyValuesCommand if row.takes_many else TyperCommand
        alone.command(cmd_name, cls=cls)(getattr(import_module(f"lmtools.cli.{module}"), function))
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The table, for --help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.says) for name, row in COMMANDS.items() if row.says])
