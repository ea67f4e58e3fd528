"""One stage of the text pipeline: every line of the inputs through a task into the outputs, with their records.

The inputs are cut into pieces (the same lines of each input), the task turns a piece into part files in a worker, and
the parts are joined in order. What reads, writes or hashes text is done by workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from lmtools.artifacts import FileRecord, Manifest, OriginalText, is_unchanged, read_manifest, write_manifest
from lmtools.errors import ConfigError, DataError
from lmtools.files import STDIO, atomic_write, is_device_or_pipe, sha256_file
from lmtools.preprocess.lines import (
    ByteRange,
    Unchanged,
    cut_at_newlines,
    cut_every_lines,
    join_parts,
    plain_file,
    scratch_folder,
)
from lmtools.preprocess.workers import run_ordered, worker_pool

Result = TypeVar("Result")

_LINES_PER_PIECE = 10_000
_MOST_PIECES = 20_000  # each costs this process, or a cluster's scheduler, about a millisecond


@dataclass(frozen=True)
class Piece:
    """What one call of a task reads and writes.

    Attributes:
        inputs: the same lines of every input.
        parts: the file to write for every output.
        output: the (first) output's name, for messages about the disk.
    """

    inputs: Sequence[ByteRange]
    parts: Sequence[Path]
    output: str


@dataclass(frozen=True)
class Transformed(Generic[Result]):
    """What a stage did.

    Attributes:
        results: what the task returned for each piece, in order.
        inputs: a record of every input.
        outputs: a record of every output that is a file.
        originals: counts of the text that each input was made from, where the input's manifest carries them.
    """

    results: Sequence[Result]
    inputs: Sequence[FileRecord]
    outputs: Sequence[FileRecord]
    originals: Sequence[OriginalText | None]


def transform(
    task: Callable[[Piece], Result],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    piece_bytes: int,
    workers: int,
    executor: Executor | None = None,
    preload: Sequence[str] = (),
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Transformed[Result]:
    """Run a task over all lines of the inputs and join what it writes into the outputs: all of them complete, or none.

    Args:
        task: writes `piece.parts` from `piece.inputs`; pickled, so a top-level function or a `partial` of one.
        inputs: names of plain or compressed files, or `-`; several have the same number of lines.
        outputs: as many names, or `-`.
        piece_bytes: size of a piece of a single input, or more where that would make very many; several inputs are
            cut after every 10,000 lines.
        workers: how many tasks run at a time; the outputs do not depend on it.
        executor: where they run, if not in processes of this call's own; it must see the same files.
        preload: modules that the task needs, for workers of this call's own.
        progress: called with the number of bytes of the inputs that were just done.

    Raises:
        ConfigError: two outputs have one name, or there are not as many as inputs.
        DataError: an input is missing, broken or changed meanwhile, or they differ in their number of lines; what the
            task raises.
        LmtoolsError: the disk is full or may not be written.
    """
    require_pairs(inputs, outputs)
    manifests = [read_manifest(source) for source in inputs]
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(outputs[0]))
        with ExitStack() as writing:
            streams = [writing.enter_context(atomic_write(output)) for output in outputs]
            plain = [stack.enter_context(plain_file(source, scratch)) for source in inputs]
            unchanged = Unchanged(zip(inputs, plain, strict=True))
            ranges: list[tuple[ByteRange, ...]] = []
            if len(inputs) == 1:
                piece_bytes = max(piece_bytes, plain[0].stat().st_size // _MOST_PIECES)
                ranges = [(text,) for text in cut_at_newlines(plain[0], piece_bytes, source=inputs[0])]
                workers = min(workers, max(len(ranges), 1))  # starting a process takes longer than a piece
            pool = executor or stack.enter_context(worker_pool(workers, preload=preload))
            hashing = [pool.submit(_record, source, path) for source, path in zip(inputs, plain, strict=True)]
            if len(inputs) > 1:
                ranges = _cut_at_the_same_lines(inputs, plain, workers, pool)
            pieces = [
                Piece(texts, [scratch / f"{number}.{n}" for n in range(len(outputs))], outputs[0])
                for number, texts in enumerate(ranges)
            ]
            results = []
            for piece, result in zip(pieces, run_ordered(task, pieces, workers=workers, executor=pool), strict=True):
                for part, stream in zip(piece.parts, streams, strict=True):
                    join_parts([part], stream)
                progress(sum(text.num_bytes for text in piece.inputs))
                results.append(result)
            input_records = [record.result() for record in hashing]
            unchanged.require()  # before an output may take an input's place
        files = [output for output in outputs if not is_device_or_pipe(output)]
        output_records = list(run_ordered(FileRecord.of, files, workers=workers, executor=pool))
    originals = [
        manifest.original if manifest is not None and record in manifest.outputs else None  # else of other bytes
        for manifest, record in zip(manifests, input_records, strict=True)
    ]
    return Transformed(results, input_records, output_records, originals)


def require_pairs(inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Check the names that a command was given.

    Raises:
        ConfigError: there are not as many outputs as inputs; a name is empty; two outputs are one file; standard input
            is named twice.
    """
    if len(inputs) != len(outputs) or not inputs:
        raise ConfigError(
            f"expected an output for every input, found {len(inputs)} input(s) ({', '.join(inputs)}) and "
            f"{len(outputs)} output(s) ({', '.join(outputs)})"
        )
    if "" in (*inputs, *outputs):
        raise ConfigError("expected names of files, found an empty one; is a variable of the shell not set?")
    files = [os.path.realpath(name) for name in outputs]
    for name, file in zip(outputs, files, strict=True):
        if files.count(file) > 1:
            raise ConfigError(f"{name}: named as the output of more than one input")
    if inputs.count(STDIO) > 1:
        raise ConfigError("standard input (-) can be read as one input only")


def _cut_at_the_same_lines(
    inputs: Sequence[str], plain: Sequence[Path], workers: int, executor: Executor
) -> list[tuple[ByteRange, ...]]:
    texts = list(zip(plain, inputs, strict=True))
    cut = list(run_ordered(_cut, texts, workers=workers, executor=executor))
    if len({num_lines for _, num_lines in cut}) > 1:
        found = ", ".join(f"{name} has {num_lines:,}" for name, (_, num_lines) in zip(inputs, cut, strict=True))
        raise DataError(f"the inputs differ in their number of lines ({found}), expected one for each of the others'")
    return list(zip(*(ranges for ranges, _ in cut), strict=True))


def _cut(text: tuple[Path, str]) -> tuple[list[ByteRange], int]:
    path, source = text
    return cut_every_lines(path, _LINES_PER_PIECE, source=source)


def _record(source: str, plain: Path) -> FileRecord:
    """The record of an input: of the file itself, or of what came through a pipe."""
    if not is_device_or_pipe(source):
        return FileRecord.of(source)
    return FileRecord(Path(source).name, plain.stat().st_size, sha256_file(plain))


def write_manifests(
    outputs: Sequence[str],
    done: Transformed[Any],
    *,
    tool: str,
    options: Mapping[str, Any],
    counts: Sequence[Mapping[str, Any]],
    originals: Sequence[OriginalText | None],
) -> None:
    """Write a manifest beside every output that is a file; each names all inputs, in order.

    Args:
        outputs: the outputs' names.
        done: what `transform` returned.
        tool: the command.
        options: what the outputs depend on beside the inputs.
        counts: of each output.
        originals: counts of the text that each output comes from, or None.
    """
    records = iter(done.outputs)
    for output, of_output, original in zip(outputs, counts, originals, strict=True):
        if not is_device_or_pipe(output):
            write_manifest(output, Manifest(tool, options, done.inputs, [next(records)], of_output, original))


def manifests_if_unchanged(
    outputs: Sequence[str], *, tool: str, options: Mapping[str, Any], inputs: Sequence[str]
) -> list[Manifest] | None:
    """The manifest of every output, if the same command, options and inputs made all that is there; else None."""
    if not all(is_unchanged(output, tool=tool, options=options, inputs=inputs) for output in outputs):
        return None
    return [manifest for output in outputs if (manifest := read_manifest(output)) is not None]
