"""What the page shows of one evaluation beside its numbers: where the loss lies, and passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.breakdown import Group, extreme_passages, loss_by_count, loss_by_position, loss_of_type
from lmtools.report.charts import count_range
from lmtools.report.passages import ShownPassage, open_codec, show
from lmtools.report.sources import Data, Evaluation

PASSAGE_TOKENS = 48
_TOKENS_BEFORE = 16
_NUM_PASSAGES = 3
_POSITION_GROUPS = 48
_SPECIAL = (Dictionary.eos_index, Dictionary.unk_index)


@dataclass(frozen=True)
class Frequency:
    """One row of the table of frequencies."""

    label: str
    group: Group
    share_of_tokens: float
    share_of_loss: float


@dataclass(frozen=True)
class Breakdown:
    """Where the loss of an evaluation lies.

    Attributes:
        by_position: groups of positions in the window; empty where the result does not say how windows were cut.
        by_count: groups of types by how often they were seen; special symbols are in none.
        count_source: seen in what.
        specials: the loss of the end of sentence and of unknown words, where there are any.
        hardest: passages of the highest loss.
        easiest: passages of the lowest loss.
    """

    by_position: Sequence[Group]
    by_count: Sequence[Group]
    count_source: str
    specials: Sequence[tuple[str, Group]]
    hardest: Sequence[ShownPassage]
    easiest: Sequence[ShownPassage]


def break_down(evaluation: Evaluation) -> Breakdown | None:
    """Where the loss lies; None where the data or the scores are not there."""
    data, log_probs = evaluation.data, evaluation.log_probs
    if data is None or log_probs is None:
        return None
    tokens = data.split.tokens
    counts, source = type_counts(data)
    specials = [(data.dictionary.symbols[index], loss_of_type(log_probs, tokens, index)) for index in _SPECIAL]
    codec = open_codec(data.dictionary)
    hardest, easiest = (
        [
            show(passage, tokens, log_probs, codec, num_before=_TOKENS_BEFORE)
            for passage in extreme_passages(log_probs, length=PASSAGE_TOKENS, most=_NUM_PASSAGES, hardest=wanted)
        ]
        for wanted in (True, False)
    )
    return Breakdown(
        by_position=loss_by_position(log_probs, data.split.windows, num_groups=_POSITION_GROUPS)
        if evaluation.result.has_windows
        else [],
        by_count=loss_by_count(log_probs, tokens, counts, left_out=_SPECIAL),
        count_source=source,
        specials=[(symbol, group) for symbol, group in specials if group is not None],
        hardest=hardest,
        easiest=easiest,
    )


def type_counts(data: Data) -> tuple[npt.NDArray[np.int64], str]:
    """How often each type was seen where the dictionary was made; in the split itself, where dict.txt does not say.

    Returns:
        `(num_types,)`, and in words where they were counted.
    """
    counts = np.array(data.dictionary.counts, dtype=np.int64)
    words = counts[max(_SPECIAL) + 1 :]
    if len(set(words[words > 0].tolist())) > 1:
        return counts, "times in dict.txt"
    return np.bincount(data.split.tokens, minlength=len(counts)).astype(np.int64), "times in the split itself"


def frequency_table(breakdown: Breakdown) -> list[Frequency]:
    """The groups of frequencies and the special symbols, with their shares."""
    rows = [(count_range(group.first, group.last), group) for group in breakdown.by_count]
    rows += breakdown.specials
    num_tokens = sum(group.num_tokens for _, group in rows)
    total_bits = sum(group.total_bits for _, group in rows) or 1.0
    return [
        Frequency(label, group, group.num_tokens / num_tokens, group.total_bits / total_bits) for label, group in rows
    ]
