"""`lmtools bpe-encode`: text to the ids of GPT-2's BPE."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lmtools.cli.options import (
    JsonOption,
    SkipUnchangedOption,
    WorkersOption,
    input_bytes,
    print_json,
    progress_bar,
    report_to,
    say,
)
from lmtools.cli.text_workers import SchedulerOption, absolute_names, text_workers

if TYPE_CHECKING:
    from lmtools.preprocess.bpe import BpeCounts

EncoderJsonOption = Annotated[
    str | None, typer.Option("--encoder-json", help="The tokens' ids; GPT-2's own if not given.")
]
VocabBpeOption = Annotated[str | None, typer.Option("--vocab-bpe", help="The merges; GPT-2's own if not given.")]


def bpe_encode(
    inputs: Annotated[
        list[str] | None,
        typer.Option("--inputs", metavar="FILE...", help="Text: plain, .gz, .bz2, .xz, .zst, or - for standard input."),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--outputs", metavar="FILE...", help="Where the ids of each go, or -.")
    ] = None,
    encoder_json: EncoderJsonOption = None,
    vocab_bpe: VocabBpeOption = None,
    keep_empty: Annotated[bool, typer.Option("--keep-empty", help="Keep empty lines.")] = False,
    workers: WorkersOption = 1,
    scheduler: SchedulerOption = None,
    skip_unchanged: SkipUnchangedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Encode text with GPT-2's BPE, byte for byte as fairseq's multiprocessing_bpe_encoder does.

    A line becomes its ids, with a space between them. Empty lines are left out, of all files together if there are
    several. Without --inputs and --outputs it is a filter.
    """
    sources, targets = (absolute_names(names or ["-"], scheduler) for names in (inputs, outputs))
    report = report_to(targets, as_json=as_json)

    from lmtools.preprocess.bpe import bpe_encode as encode
    from lmtools.preprocess.bpe import find_encoded
    from lmtools.preprocess.gpt2_vocabulary import find_vocabulary
    from lmtools.preprocess.transform import require_pairs

    require_pairs(sources, targets)
    files = (name and absolute_names([name], scheduler)[0] for name in (encoder_json, vocab_bpe))
    vocabulary = find_vocabulary(*files)
    found = find_encoded(sources, targets, vocabulary=vocabulary, keep_empty=keep_empty) if skip_unchanged else None
    if found is not None:
        say(f"{', '.join(targets)}: unchanged, skipped")
        counts = found
    else:
        reads = [*sources, str(vocabulary.encoder_json), str(vocabulary.vocab_bpe)]
        with (
            text_workers(workers, scheduler, reads=reads, writes=targets) as chosen,
            progress_bar("bpe-encode", total=input_bytes(sources)) as progress,
        ):
            counts = encode(sources, targets, vocabulary=vocabulary, keep_empty=keep_empty, **chosen, progress=progress)
    for source, target, of_target in zip(sources, targets, counts, strict=True):
        if of_target.lost_lines:
            say(
                f"warning: {target}: {of_target.lost_lines:,} lines of {source} with text are left out, being empty in "
                "another input; the counts of its original text do not travel on (--keep-empty keeps all lines)"
            )
    if as_json:
        outputs_json = [_describe(target, of_target) for target, of_target in zip(targets, counts, strict=True)]
        print_json({"outputs": outputs_json, "skipped": found is not None})
        return
    for target, of_target in zip(targets, counts, strict=True):
        report(
            f"{target}: {of_target.lines:,} lines, {of_target.tokens:,} tokens "
            f"({of_target.tokens_with_eos:,} with an end of sentence for each line), "
            f"{of_target.dropped_lines:,} empty lines left out"
        )


def _describe(path: str, counts: BpeCounts) -> dict[str, object]:
    return {"path": path, **asdict(counts), "tokens_with_eos": counts.tokens_with_eos}
