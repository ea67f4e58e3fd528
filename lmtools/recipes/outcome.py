"""What came out, beside what was published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmtools.errors import DataError
from lmtools.recipes.recipe import Result

Number = int | float


@dataclass(frozen=True)
class Comparison:
    """One row of the table.

    Attributes:
        what: the number's name.
        published: what was published; None where nothing was.
        obtained: what came out here.
        difference: obtained less published.
        note: why they may differ.
    """

    what: str
    published: Number | None
    obtained: Number
    difference: Number | None
    note: str | None


def compare(results: Sequence[Result], workdir: Path) -> list[Comparison]:
    """Read each number from the file that holds it.

    Raises:
        DataError: the file is not JSON, or has no such number.
    """
    rows = []
    for result in results:
        obtained = _number(workdir / result.file, result.key)
        difference = None if result.published is None else obtained - result.published
        rows.append(Comparison(result.what, result.published, obtained, difference, result.note))
    return rows


def _number(path: Path, key: str) -> Number:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON ({error}); remove it and run again") from error
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise DataError(f"{path}: {key} is {value!r}, expected a number")
    return value


def table(rows: Sequence[Comparison]) -> str:
    """The rows for a person, with notes under the table."""
    cells = [("", "published", "obtained", "difference", "")]
    notes: list[str] = []
    for row in rows:
        mark = ""
        if row.note and row.difference:
            notes.append(row.note)
            mark = f" [{len(notes)}]"
        difference = "" if row.difference is None else _shown(row.difference, signed=True)
        published = "" if row.published is None else _shown(row.published, digits=2)
        cells.append((row.what, published, _shown(row.obtained), difference, mark))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        f"{what:{widths[0]}}  {published:>{widths[1]}}  {obtained:>{widths[2]}}  {difference:>{widths[3]}}{mark}"
        for what, published, obtained, difference, mark in cells
    ]
    return "\n".join([line.rstrip() for line in lines] + [f"[{n}] {note}" for n, note in enumerate(notes, start=1)])


def _shown(number: Number, *, digits: int = 4, signed: bool = False) -> str:
    plus = "+" if signed else ""
    return f"{number:{plus},}" if isinstance(number, int) else f"{number:{plus},.{digits}f}"


def as_json(rows: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The rows as JSON values."""
    return [asdict(row) for row in rows]
