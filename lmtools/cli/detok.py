"""`lmtools detok`: WikiText's tokens back to text as it is read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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
from lmtools.compressed import COMPRESSED_SUFFIXES
from lmtools.files import STDIO, made_folder


def detok(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT OUTPUT",
            help="Text (plain, .gz, .bz2, .xz, .zst, or - for standard input), and where it goes (or -). "
            "With --output-dir: inputs, any number of them.",
        ),
    ],
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Folder for NAME.detok of each input, made if it is not there.")
    ] = None,
    workers: WorkersOption = 1,
    scheduler: SchedulerOption = None,
    skip_unchanged: SkipUnchangedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Detokenise WikiText, byte for byte as fairseq's megatron_11b example does.

    Lossy by design: `me @ home` becomes `me home`, `x = y` becomes `x=y`. The counts of the original text, by which
    WikiText's perplexity is normalised, are kept in OUTPUT.meta.json.
    """
    sources, targets = _name_outputs(absolute_names(paths, scheduler), output_dir)
    report = report_to(targets, as_json=as_json)

    from lmtools.preprocess.detok import detok as detokenise
    from lmtools.preprocess.detok import find_detokenized
    from lmtools.preprocess.transform import require_pairs

    require_pairs(sources, targets)
    described = []
    with (
        nullcontext() if output_dir is None else made_folder(output_dir),
        text_workers(workers, scheduler, reads=sources, writes=targets) as chosen,
    ):
        for source, target in zip(sources, targets, strict=True):
            found = find_detokenized(source, target) if skip_unchanged else None
            if found is not None:
                say(f"{target}: unchanged, skipped")
                done = found
            else:
                with progress_bar("detok", total=input_bytes([source])) as progress:
                    done = detokenise(source, target, **chosen, progress=progress)
            original = done.original
            described.append(
                {"path": target, **asdict(done.counts), "original": asdict(original), "skipped": found is not None}
            )
            if not as_json:
                report(
                    f"{target}: {done.counts.lines:,} lines, {done.counts.words:,} words; original {original.path}: "
                    f"{original.lines:,} lines, {original.words:,} words, "
                    f"{original.tokens:,} tokens (words + line ends)"
                )
    if as_json:
        print_json({"outputs": described})


def _name_outputs(paths: list[str], output_dir: Path | None) -> tuple[list[str], list[str]]:
    if output_dir is None:
        if len(paths) != 2:
            raise typer.BadParameter(
                f"expected INPUT OUTPUT, found {len(paths)} name(s); --output-dir takes several inputs",
                param_hint="INPUT OUTPUT",
            )
        return [paths[0]], [paths[1]]
    if STDIO in paths:
        raise typer.BadParameter("standard input (-) has no name to make an output of", param_hint="--output-dir")
    if output_dir.exists() and not output_dir.is_dir():
        raise typer.BadParameter(f"{output_dir} is a file, expected a folder", param_hint="--output-dir")
    return paths, [str(output_dir / f"{_stem(path)}.detok") for path in paths]


def _stem(path: str) -> str:
    """`wiki.test` of `wiki.test.raw` and of `wiki.test.raw.gz`."""
    name = Path(path)
    if name.suffix in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    return name.stem
