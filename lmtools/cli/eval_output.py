"""What the tasks of `lmtools eval` show and write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lmtools.cli.options import Advance, print_json, progress_bar
from lmtools.files import atomic_write, atomic_write_text, is_device_or_pipe, sha256_file

if TYPE_CHECKING:
    from lmtools.evaluate.run import ScoredSplit
    from lmtools.evaluate.scoring import Scores
    from lmtools.evaluate.splits import EvalSplit
    from lmtools.parallel.mesh import Mesh


def bar_of_rank_0(mesh: Mesh, description: str, total: int | None, unit: str) -> AbstractContextManager[Advance]:
    """A progress bar of rank 0's, which speaks for all."""
    return progress_bar(description, total=total, unit=unit) if mesh.rank == 0 else nullcontext(lambda count: None)


def document_of(
    splits: Sequence[EvalSplit],
    scored: Sequence[ScoredSplit],
    settings: Mapping[str, Any],
    *,
    scores: Path | None,
    orig_tokens: int | None,
    orig_bytes: int | None,
) -> dict[str, Any]:
    """The results with their settings, of one split just that; scores are written where they were asked for.

    Args:
        splits: what was scored.
        scored: its scores.
        settings: all that made them.
        scores: file for the first split's log-probabilities, or None.
        orig_tokens: tokens of the original text, as given by hand.
        orig_bytes: its bytes, likewise.
    """
    from lmtools.evaluate.result import result_of

    written = _write_scores(scores, splits[0], scored[0].log_probs) if scores is not None else None
    settings = {**settings, "scores": written}
    results = []
    for split, outcome in zip(splits, scored, strict=True):
        original, source = original_counts(split, orig_tokens, orig_bytes)
        results.append(result_of(split, outcome, settings=settings, original=original, original_from=source))
    return results[0] if len(results) == 1 else {"results": results}


def original_counts(
    split: EvalSplit, orig_tokens: int | None, orig_bytes: int | None
) -> tuple[dict[str, Any] | None, str | None]:
    """Counts of the original text, and where they come from. What is given by hand goes before the manifest."""
    if orig_tokens is None and orig_bytes is None:
        return (asdict(split.original), "manifest") if split.original else (None, None)
    given = {"path": None, "lines": None, "words": None, "tokens": orig_tokens, "num_bytes": orig_bytes}
    return given, "given"


def _write_scores(path: Path, split: EvalSplit, log_probs: Scores) -> dict[str, str] | None:
    """Write the score of every token; returns where, and the hash by which the result knows its scores again.

    None for a device or a pipe, which cannot be read again.
    """
    import numpy as np

    from lmtools.evaluate.run import scores_of_every_token

    with atomic_write(path) as stream:
        np.save(stream, scores_of_every_token(split, log_probs))
    return None if is_device_or_pipe(path) else {"path": str(path), "sha256": sha256_file(path)}


def write(document: Mapping[str, Any], output: Path | None) -> None:
    """Write the result, if it was asked for."""
    if output is not None:
        atomic_write_text(output, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def show(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the results, for a program or for a person."""
    from lmtools.evaluate.result import summary_of

    if as_json:
        print_json(document)
    else:
        for result in document.get("results", [document]):
            typer.echo(summary_of(result))
