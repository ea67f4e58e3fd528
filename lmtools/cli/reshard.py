"""`lmtools reshard`: a checkpoint in any number of parts in, the same model in any other number out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtools.cli.dictionaries import Bpe, padded_dictionary, tokenizer_of
from lmtools.cli.options import Advance, DType, JsonOption, print_json, progress_bar, say
from lmtools.errors import ConfigError


class Format(str, Enum):
    """What is written."""

    fairseq = "fairseq"
    safetensors = "safetensors"
    hf = "hf"


def reshard(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Checkpoint: a folder, a file, one part or the parts' stem.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist or be empty.")],
    mp: Annotated[int, typer.Option("--mp", "--model-parallel-size", min=1, help="Parts to write; 1 is one file.")] = 1,
    format: Annotated[
        Format,
        typer.Option(
            help="fairseq: its own .pt files. safetensors: lmtools' own, which map into memory. hf: for transformers."
        ),
    ] = Format.safetensors,
    dtype: Annotated[DType | None, typer.Option(help="Convert the parameters; not given, each stays as it is.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what was written again and compare it, bit by bit.")
    ] = False,
    allow_replica_drift: Annotated[
        bool,
        typer.Option(
            "--allow-replica-drift", help="Take part 0's where the parts' copies of a tensor differ, and say so."
        ),
    ] = False,
    dictionary: Annotated[
        Path | None,
        typer.Option("--dict", help="dict.txt or its folder, for OUT; beside IN or in a run's data if not given."),
    ] = None,
    bpe: Annotated[
        Bpe | None, typer.Option(help="hf: gpt2, or none for words; gpt2 for a dictionary of numbers if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint again in another number of parts, or in another format; it is read a few megabytes at a time.

    The output is complete or absent. Optimizer state is left out.
    """
    import torch

    from lmtools.checkpoints.load import open_checkpoint
    from lmtools.checkpoints.reshard import reshard as reshard_checkpoint

    def bar(description: str, total: int) -> AbstractContextManager[Advance]:
        return progress_bar(description, total=total)

    if bpe and format is not Format.hf:
        raise ConfigError(f"--bpe: --format {format.value} has no tokenizer; leave it out")
    checkpoint = open_checkpoint(source)
    if format is Format.hf:
        more_files = tokenizer_of(checkpoint, dictionary, bpe)
        if more_files is None:
            say(f"{source}: has no dict.txt beside it, so {target} gets no tokenizer; --dict names one")
    else:
        more_files = padded_dictionary(checkpoint, dictionary)

    result = reshard_checkpoint(
        source,
        target,
        num_parts=mp,
        format=format.value,
        dtype=getattr(torch, dtype.value) if dtype else None,
        verify=verify,
        allow_replica_drift=allow_replica_drift,
        more_files=more_files,
        bar=bar,
    )
    if as_json:
        print_json(result)
    else:
        typer.echo(_summary(result))


def _summary(result: dict[str, Any]) -> str:
    source, target = result["source"], result["target"]
    num_bytes = sum(target["files"].values())
    lines = [
        f"{source['path']}: {_parts(source['num_parts'])} ({source['format']}) -> "
        f"{target['path']}: {_parts(target['num_parts'])} ({target['format']})",
        f"  {result['num_parameters']:,} parameters, {'/'.join(result['dtypes'])}, {num_bytes:,} bytes"
        + (", read again and equal" if result["verified"] else ""),
    ]
    if result["rows_added"]:
        lines.append(
            f"  {result['rows_added']} rows of zeros added to the vocabulary of {result['vocab_size']:,}, for parts of "
            "equal size; lmtools leaves them out when it reads, fairseq counts them in its softmax"
        )
    if result["replica_drift"]:
        lines.append(f"  differed between parts, part 0's was taken: {', '.join(result['replica_drift'])}")
    return "\n".join(lines)


def _parts(num_parts: int) -> str:
    return "1 part" if num_parts == 1 else f"{num_parts} parts"
