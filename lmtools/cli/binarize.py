"""`lmtools binarize`: text to a folder of splits that lmtools and fairseq train and evaluate on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtools.cli.options import (
    JsonOption,
    SkipUnchangedOption,
    WorkersOption,
    input_bytes,
    print_json,
    progress_bar,
    say,
)
from lmtools.cli.text_workers import SchedulerOption, absolute_names, text_workers

if TYPE_CHECKING:
    from lmtools.preprocess.binarize import Binarized

_MUCH_REPLACED = 0.01


def binarize(
    trainpref: Annotated[str | None, typer.Option("--trainpref", help="Text of the split train.")] = None,
    validpref: Annotated[
        str | None, typer.Option("--validpref", help="Text of valid; more after commas become valid1, valid2 ...")
    ] = None,
    testpref: Annotated[
        str | None, typer.Option("--testpref", help="Text of test; more after commas become test1, test2 ...")
    ] = None,
    destdir: Annotated[
        Path, typer.Option("--destdir", help="Folder for dict.txt and the splits, made if not there.")
    ] = Path("data-bin"),
    srcdict: Annotated[
        str | None, typer.Option("--srcdict", help="Use this dict.txt, instead of building one from --trainpref.")
    ] = None,
    thresholdsrc: Annotated[
        int, typer.Option("--thresholdsrc", help="Leave words that are seen less often out of the dictionary.")
    ] = 0,
    nwordssrc: Annotated[
        int, typer.Option("--nwordssrc", help="Most types to keep, the 4 special symbols included; -1 keeps all.")
    ] = -1,
    padding_factor: Annotated[
        int, typer.Option("--padding-factor", help="Pad a built dictionary to a multiple of this.")
    ] = 8,
    dict_only: Annotated[bool, typer.Option("--dict-only", help="Write the dictionary and nothing else.")] = False,
    only_source: Annotated[
        bool, typer.Option("--only-source", help="As in fairseq; lmtools has no other mode, so it may be left out.")
    ] = True,
    dataset_impl: Annotated[str, typer.Option("--dataset-impl", help="As in fairseq; mmap is the only one.")] = "mmap",
    workers: WorkersOption = 1,
    scheduler: SchedulerOption = None,
    skip_unchanged: SkipUnchangedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Binarize text, byte for byte as fairseq-preprocess --only-source does.

    Each line becomes the indices of its words and one </s>. Inputs may be compressed (.gz, .bz2, .xz, .zst), or - for
    standard input.
    """
    if dataset_impl != "mmap":
        raise typer.BadParameter(f"expected mmap, found {dataset_impl}", param_hint="--dataset-impl")
    if srcdict is None and trainpref is None:
        raise typer.BadParameter("build a dictionary from --trainpref, or name one with --srcdict")
    if not (trainpref or validpref or testpref or dict_only):
        raise typer.BadParameter("nothing to binarize; name a text with --trainpref, --validpref or --testpref")
    if srcdict is not None and (thresholdsrc, nwordssrc, padding_factor) != (0, -1, 8):
        say("warning: --srcdict is used as it is; --thresholdsrc, --nwordssrc and --padding-factor do nothing")

    from lmtools.preprocess.binarize import BinarizeJob, DictionaryRules, find_unchanged, name_splits
    from lmtools.preprocess.binarize import binarize as make

    splits = {} if dict_only else name_splits(trainpref, validpref, testpref)
    dictionary_source, folder, *texts = absolute_names(
        [srcdict or trainpref or "", str(destdir), *splits.values()], scheduler
    )
    job = BinarizeJob(
        splits=dict(zip(splits, texts, strict=True)),
        destdir=Path(folder),
        dictionary_source=dictionary_source,
        rules=None if srcdict else DictionaryRules(thresholdsrc, nwordssrc, padding_factor),
    )
    result = find_unchanged(job) if skip_unchanged else None
    skipped = result is not None
    if skipped:
        say(f"{destdir}: unchanged, skipped")
    if result is None:
        reads = [*texts, dictionary_source]
        with (
            text_workers(workers, scheduler, reads=reads, writes=[str(job.destdir / "dict.txt")]) as chosen,
            progress_bar("binarize", total=input_bytes(job.texts())) as progress,
        ):
            result = make(job, **chosen, progress=progress)
    _warn_of_unknown_words(job.splits, result)
    if as_json:
        of_splits = {name: {"text": text, **asdict(result.splits[name])} for name, text in job.splits.items()}
        print_json({"destdir": str(destdir), "num_types": result.num_types, "splits": of_splits, "skipped": skipped})
        return
    print(f"{destdir / 'dict.txt'}: {result.num_types:,} types")
    for name, counts in result.splits.items():
        print(
            f"{destdir / name}: {counts.sentences:,} sentences, {counts.tokens:,} tokens, "
            f"{counts.replaced_share:.2%} replaced by <unk>"
        )


def _warn_of_unknown_words(texts: Mapping[str, str], result: Binarized) -> None:
    for name, counts in result.splits.items():
        if counts.replaced_share > _MUCH_REPLACED:
            say(
                f"warning: {texts[name]}: {counts.replaced_share:.2%} of its tokens are not in the dictionary and "
                "became <unk>; is it the dictionary of this text?"
            )
