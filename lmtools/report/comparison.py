"""Results side by side: what is equal, what differs, and whether the numbers can be compared at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmtools.report.result_file import Result
from lmtools.report.sources import Evaluation

_UNKNOWN = "–"


@dataclass(frozen=True)
class Row:
    """One quantity of all results.

    Attributes:
        label: what it is.
        cells: its value for each result, to read.
        differs: whether they are not all the same.
        best: index of the lowest, where lower is better and one is lower than the others.
    """

    label: str
    cells: Sequence[str]
    differs: bool
    best: int | None = None


def compare(evaluations: Sequence[Evaluation]) -> list[Row]:
    """The table of several results."""
    results = [evaluation.result for evaluation in evaluations]
    settings: dict[str, Callable[[Result], object]] = {
        "split": lambda result: result.subset,
        "tokens scored": lambda result: f"{result.tokens_scored:,}",
        "tokens not scored": lambda result: f"{result.tokens_skipped:,}",
        "<unk>": lambda result: _count(result.tokens_unk),
        "original tokens": lambda result: _count(result.original.tokens if result.original else None),
        "original bytes": lambda result: _count(result.original.num_bytes if result.original else None),
        "window": lambda result: _count(result.tokens_per_sample),
        "context": lambda result: _count(result.context_window),
        "memory": lambda result: _count(result.mem_len),
        "blocks": lambda result: result.sample_break_mode or _UNKNOWN,
        "dtype": lambda result: result.dtype,
        "mp × dp": lambda result: f"{result.mp} × {result.dp}",
        "checkpoint": lambda result: result.path,
        "checkpoint sha256": lambda result: short(*result.checkpoint_sha256.values()),
        "data sha256": lambda result: short(_data_hash(result)),
        "dictionary sha256": lambda result: short(result.data_sha256.get("dict.txt", "")),
        **{
            name: lambda result, name=name: result.versions.get(name, _UNKNOWN)  # type: ignore[misc]
            for name in ("lmtools", "torch")
        },
    }
    rows = [
        _lower_is_better("perplexity per token", [result.perplexity for result in results], ",.2f"),
        _lower_is_better("per original token", [result.word_perplexity for result in results], ",.2f"),
        _lower_is_better("bits per token", [result.loss_base2 for result in results], ".4f"),
        _lower_is_better("bits per byte", [result.bits_per_byte for result in results], ".4f"),
    ]
    for label, value in settings.items():
        cells = [str(value(result)) for result in results]
        rows.append(Row(label, cells, len(set(cells)) > 1))
    return [row for row in rows if set(row.cells) != {_UNKNOWN}]


def comparability(evaluations: Sequence[Evaluation]) -> list[str]:
    """What must be known before the numbers of several results are held against each other, a sentence each."""
    results = [evaluation.result for evaluation in evaluations]
    if len(results) < 2:
        return []
    notes = []
    same_data = len({_data_hash(result) for result in results}) == 1
    same_dictionary = len({result.data_sha256.get("dict.txt") for result in results}) == 1
    if same_data and same_dictionary:
        notes.append(f"All are of the same {results[0].tokens_in_split:,} tokens: perplexities can be compared.")
    elif len({_text(result) for result in results}) == 1 and results[0].original is not None:
        notes.append("All are of one text in different tokens: compare per original token or per byte, not per token.")
    else:
        notes.append("These are not all of one text, as far as is known: a lower number need not be a better model.")
    if len({(result.tokens_per_sample, result.context_window, result.mem_len) for result in results}) > 1:
        notes.append("Windows, contexts or memories differ: more context gives a lower perplexity with the same model.")
    if any(result.tokens_skipped for result in results):
        notes.append("Not every token was scored, and what is left out can move a perplexity either way.")
    return notes


def short(*digests: str) -> str:
    """The head of a hash, and how many more there are."""
    more = f" +{len(digests) - 1}" if len(digests) > 1 else ""
    return f"{digests[0][:12]}{more}" if digests and digests[0] else _UNKNOWN


def _lower_is_better(label: str, values: Sequence[float | None], form: str) -> Row:
    known = [value for value in values if value is not None]
    low = min(known, default=None)
    best = values.index(low) if low is not None and known.count(low) == 1 and len(known) > 1 else None
    cells = [_UNKNOWN if value is None else rounded(value, form) for value in values]
    return Row(label, cells, len(set(values)) > 1, best)


def rounded(value: float, form: str = ",.2f") -> str:
    """A number for a person, whatever its size."""
    return f"{value:{form}}" if abs(value) < 1e9 else f"{value:.4g}"


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _data_hash(result: Result) -> str:
    return result.data_sha256.get(f"{result.subset}.bin", "")


def _text(result: Result) -> tuple[object, ...]:
    original = result.original
    return (original.path, original.tokens, original.num_bytes) if original is not None else ()
