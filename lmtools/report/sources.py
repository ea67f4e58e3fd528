"""An evaluation with what belongs to it: its data and its scores, found and checked against the result's hashes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import bin_path
from lmtools.errors import DataError
from lmtools.evaluate.breakdown import LogProbs
from lmtools.evaluate.splits import EvalSplit, open_split
from lmtools.files import sha256_file
from lmtools.report.result_file import Result, read_results
from lmtools.train.curves import distinct_names

_TOLERANCE = 1e-9
"""Of a sum in float64 of the same float32 scores, which may be added in another order."""


@dataclass(frozen=True)
class Data:
    """What was scored.

    Attributes:
        folder: where it lies.
        dictionary: of the folder.
        split: its tokens and windows; the windows mean nothing where the result does not say how they were cut.
    """

    folder: Path
    dictionary: Dictionary
    split: EvalSplit


@dataclass(frozen=True)
class Evaluation:
    """A result, and what of its sources was found.

    Attributes:
        name: tells it from the others.
        file: the JSON that it was read from.
        result: what it says.
        data: what was scored, or None if it is not there.
        log_probs: the score of every token of the split, or None if the file is not there.
        missing: what was not found and how to get it, a sentence each.
    """

    name: str
    file: Path
    result: Result
    data: Data | None
    log_probs: LogProbs | None
    missing: Sequence[str]


def read_evaluations(
    files: Sequence[Path], *, scores: Sequence[Path] = (), data: Sequence[Path] = ()
) -> list[Evaluation]:
    """Read results and find what belongs to them.

    Args:
        files: JSON files of `lmtools eval`, each with one result or several.
        scores: where scores lie, if not where their results say.
        data: folders of data, if not where the results say.

    Raises:
        DataError: a file is no result; what lies where a result says that its scores or data are is not what it was
            made with; scores or data that were named belong to none of the results.
    """
    names = distinct_names([file.with_suffix("") for file in files])
    named = zip(files, names, strict=True)
    results = [(file, name, result) for file, name in named for result in read_results(file)]
    evaluations = []
    for file, name, result in results:
        several = sum(other == file for other, _, _ in results) > 1
        evaluations.append(_find(file, f"{name} {result.subset}" if several else name, result, scores, data))
    for option, paths, fault in (("--scores", scores, _scores_fault), ("--data", data, _data_fault)):
        for path in paths:
            faults = [fault(path, result, file) for file, _, result in results]
            if None not in faults:
                raise DataError(f"{option} {path}: {faults[0] if faults else 'there is no result that it belongs to'}")
    return evaluations


def _find(file: Path, name: str, result: Result, scores: Sequence[Path], data: Sequence[Path]) -> Evaluation:
    missing = []
    folder = _choose(file, result, result.data, data, _data_fault)
    if folder is None:
        missing.append(f"{name}: its data is not at {result.data}; give the folder with --data DIR")
    path = _choose(file, result, result.scores.path if result.scores else None, scores, _scores_fault)
    if path is None and result.scores is not None:
        missing.append(f"{name}: the tokens' scores are not at {result.scores.path}; give the file with --scores FILE")
    elif path is None:
        missing.append(
            f"{name}: the tokens' scores were not kept; run lmtools eval again with --scores FILE.npy, which its "
            "result then names"
        )
    opened = _open_data(folder, result) if folder is not None else None
    log_probs = _load_scores(path) if path is not None else None
    if opened is not None and log_probs is not None and len(log_probs) != len(opened.split.tokens):
        num_tokens = len(opened.split.tokens)
        raise DataError(
            f"{path}: has {len(log_probs):,} scores, but {opened.split.prefix} has {num_tokens:,} tokens; run lmtools "
            "eval again"
        )
    return Evaluation(name, file, result, opened, log_probs, missing)


Fault = Callable[[Path, Result, Path], str | None]
"""Why a path is not what a result was made with, or None if it is; the last argument is the result's own file."""


def _choose(file: Path, result: Result, recorded: str | None, given: Sequence[Path], fault: Fault) -> Path | None:
    """The first that fits of those given by hand; else what lies at the recorded path, or beside the result."""
    fitting = next((path for path in given if fault(path, result, file) is None), None)
    if fitting is not None or recorded is None:
        return fitting
    places = [Path(recorded), file.parent / recorded, file.parent / Path(recorded).name]
    there = [path for path in dict.fromkeys(places) if path.is_file() or bin_path(path / result.subset).is_file()]
    faults = {path: fault(path, result, file) for path in there}
    fitting = next((path for path, found in faults.items() if found is None), None)
    if fitting is None and faults:
        path, found = next(iter(faults.items()))
        raise DataError(f"{path}: {found}")
    return fitting


def _scores_fault(path: Path, result: Result, file: Path) -> str | None:
    log_probs = _load_scores(path)
    if result.scores is not None:
        return _hash_fault(path, result.scores.sha256, file)
    known = log_probs[~np.isnan(log_probs)]
    if len(log_probs) != result.tokens_in_split or len(known) != result.tokens_scored:
        return (
            f"has {len(known):,} scores of {len(log_probs):,} tokens, but {file} is of {result.tokens_scored:,} of "
            f"{result.tokens_in_split:,}; these are another evaluation's"
        )
    total_nats = -float(known.sum(dtype=np.float64))
    if not math.isclose(total_nats, result.total_nats, rel_tol=_TOLERANCE):
        return f"sums to {total_nats:.6f} nats, but {file} says {result.total_nats:.6f}; these are another evaluation's"
    return None


def _data_fault(folder: Path, result: Result, file: Path) -> str | None:
    for name, sha256 in result.data_sha256.items():
        if not (folder / name).is_file():
            return f"has no {name}, with which {file} was made"
        fault = _hash_fault(folder / name, sha256, file)
        if fault is not None:
            return f"{name} {fault}"
    return None


def _hash_fault(path: Path, expected: str, file: Path) -> str | None:
    found = sha256_file(path)
    if found == expected:
        return None
    return (
        f"has sha256 {found[:12]}..., but {file} was made with {expected[:12]}...; it was changed since, or is another "
        "evaluation's: run lmtools eval again"
    )


def _load_scores(path: Path) -> LogProbs:
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected what `lmtools eval --scores` writes")
    try:
        log_probs = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: not a readable .npy file ({error}); run lmtools eval --scores again") from error
    if not isinstance(log_probs, np.ndarray) or log_probs.dtype.kind != "f" or log_probs.ndim != 1:
        raise DataError(f"{path}: expected a row of floating-point numbers, as `lmtools eval --scores` writes")
    return log_probs


def _open_data(folder: Path, result: Result) -> Data:
    dictionary = Dictionary.load(folder / "dict.txt")
    split = open_split(
        folder,
        result.subset,
        dictionary,
        tokens_per_sample=result.tokens_per_sample or 1024,
        context_window=result.context_window or 0,
        break_mode=result.sample_break_mode or "none",
        skip_too_long=result.tokens_skipped > 0,
    )
    return Data(folder, dictionary, split)
