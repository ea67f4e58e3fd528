"""What a report reads of the JSON that `lmtools eval` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError, model_validator

from lmtools.errors import DataError
from lmtools.evaluate.perplexity import bits_per_byte, nats_to_bits, perplexity_of_bits, word_perplexity
from lmtools.files import open_binary

_TOLERANCE = 1e-6
"""Of numbers that follow from each other; a perplexity is as inexact as its loss is large."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class Original(_Record):
    """Counts of the text before detokenisation and BPE; a count that nobody knows is None."""

    path: str | None = None
    tokens: PositiveInt | None = None
    num_bytes: PositiveInt | None = None


class ScoresFile(_Record):
    """Where the scores of every token were written."""

    path: str
    sha256: str


class Result(_Record):
    """One evaluated split; fields as in `lmtools.evaluate.result`.

    Models with memory have `mem_len` and read chunks of `tokens_per_sample`, others have `context_window` and
    `sample_break_mode`. Results of earlier versions have no `scores`.
    """

    format: Literal["lmtools-eval"]
    format_version: Literal[1]
    subset: str
    loss_base2: FiniteFloat
    total_nats: FiniteFloat
    perplexity: FiniteFloat
    tokens_scored: PositiveInt
    tokens_in_split: PositiveInt
    tokens_skipped: int = Field(ge=0)
    tokens_unk: int | None = Field(default=None, ge=0)
    word_perplexity: FiniteFloat | None
    bits_per_byte: FiniteFloat | None
    original: Original | None
    original_from: str | None
    tokens_per_sample: PositiveInt | None = None
    context_window: int | None = Field(default=None, ge=0)
    sample_break_mode: Literal["none", "complete", "eos"] | None = None
    mem_len: int | None = Field(default=None, ge=0)
    dtype: str
    path: str
    data: str
    mp: int
    dp: int
    device: str
    checkpoint_sha256: dict[str, str]
    data_sha256: dict[str, str]
    versions: dict[str, str]
    tokens_resumed: int = 0
    seconds: FiniteFloat
    tokens_per_second: FiniteFloat | None
    scores: ScoresFile | None = None

    @property
    def has_windows(self) -> bool:
        """Whether it is known how the stream was cut."""
        is_told = self.sample_break_mode is not None or self.mem_len is not None
        return self.tokens_per_sample is not None and is_told

    @model_validator(mode="after")
    def _is_whole(self) -> Result:
        """What is shown beside each other is there together, and is one evaluation's."""
        original = self.original or Original()
        if self.word_perplexity is not None and original.tokens is None:
            raise ValueError("word_perplexity without original.tokens")
        if self.bits_per_byte is not None and original.num_bytes is None:
            raise ValueError("bits_per_byte without original.num_bytes")
        bits = nats_to_bits(self.total_nats / self.tokens_scored)
        made = [("loss_base2", self.loss_base2, bits), ("perplexity", self.perplexity, perplexity_of_bits(bits))]
        if self.word_perplexity is not None and original.tokens is not None:
            made.append(("word_perplexity", self.word_perplexity, word_perplexity(self.total_nats, original.tokens)))
        if self.bits_per_byte is not None and original.num_bytes is not None:
            made.append(("bits_per_byte", self.bits_per_byte, bits_per_byte(self.total_nats, original.num_bytes)))
        for name, found, expected in made:
            if not math.isclose(found, expected, rel_tol=_TOLERANCE):
                raise ValueError(f"{name} is {found:.9g}, but its total_nats and counts make {expected:.9g}")
        unknown = {f"{self.subset}.bin", f"{self.subset}.idx", "dict.txt"} - self.data_sha256.keys()
        if unknown:
            raise ValueError(f"data_sha256 without {min(unknown)}")
        return self


def read_results(path: Path) -> list[Result]:
    """The results in a file, one a split.

    Raises:
        DataError: no such file, no JSON, or not a result that this lmtools knows.
    """
    with open_binary(path) as stream:
        content = stream.read()
    try:
        document: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); expected what `lmtools eval --output` writes") from error
    records = document.get("results", [document]) if isinstance(document, dict) else document
    if not isinstance(records, list) or not records:
        raise DataError(f"{path}: expected a result of `lmtools eval --output`, or an object with a list of results")
    return [_result(record, path) for record in records]


def _result(record: Any, path: Path) -> Result:
    try:
        return Result.model_validate(record)
    except ValidationError as error:
        raise DataError(f"{path}: not a result of `lmtools eval`: {_first(error.errors())}") from error


def _first(errors: Sequence[Any]) -> str:
    """The first thing that is wrong, in a line."""
    if errors[0]["type"] == "value_error":  # of ours, which says all
        return str(errors[0]["msg"]).removeprefix("Value error, ")
    where = ".".join(str(part) for part in errors[0]["loc"]) or "the document"
    found = "" if errors[0]["type"] == "missing" else f", found {str(errors[0]['input'])[:60]!r}"
    return f"{where}: {errors[0]['msg']}{found}"
