"""`lmtools bpe-decode`: ids of GPT-2's BPE back to text."""

from __future__ import annotations

from typing import Annotated

import typer

from lmtools.cli.bpe_encode import EncoderJsonOption, VocabBpeOption
from lmtools.cli.options import (
    JsonOption,
    SkipUnchangedOption,
    WorkersOption,
    input_bytes,
    print_json,
    progress_bar,
    report_to,
    say,
    useful_workers,
)


def bpe_decode(
    inputs: Annotated[
        list[str] | None,
        typer.Option("--inputs", metavar="FILE...", help="Ids: plain, .gz, .bz2, .xz, .zst, or - for standard input."),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--outputs", metavar="FILE...", help="Where the text of each goes, or -.")
    ] = None,
    encoder_json: EncoderJsonOption = None,
    vocab_bpe: VocabBpeOption = None,
    workers: WorkersOption = 1,
    skip_unchanged: SkipUnchangedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decode what bpe-encode wrote, line by line.

    <unk> and <mask> stand for themselves; any other word that is no id is an error. Without --inputs and --outputs it
    is a filter.
    """
    sources, targets = inputs or ["-"], outputs or ["-"]
    report = report_to(targets, as_json=as_json)

    from lmtools.preprocess.bpe import bpe_decode as decode
    from lmtools.preprocess.bpe import find_decoded
    from lmtools.preprocess.gpt2_vocabulary import find_vocabulary
    from lmtools.preprocess.transform import require_pairs

    require_pairs(sources, targets)
    vocabulary = find_vocabulary(encoder_json, vocab_bpe)
    processes = useful_workers(workers)
    described = []
    for source, target in zip(sources, targets, strict=True):
        found = find_decoded(source, target, vocabulary=vocabulary) if skip_unchanged else None
        if found is not None:
            say(f"{target}: unchanged, skipped")
            counts = found
        else:
            with progress_bar("bpe-decode", total=input_bytes([source])) as progress:
                counts = decode(source, target, vocabulary=vocabulary, workers=processes, progress=progress)
        described.append({"path": target, "lines": counts.lines, "tokens": counts.tokens, "skipped": found is not None})
        if not as_json:
            report(f"{target}: {counts.lines:,} lines from {counts.tokens:,} tokens")
    if as_json:
        print_json({"outputs": described})
