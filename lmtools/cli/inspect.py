"""`lmtools inspect`: what a file or folder is, and where it is broken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

_HASH_DIGITS = 16  # fit beside a name; --json has all
_TABLES = ("tensors", "files", "splits", "problems", "results")


def inspect(
    path: Annotated[
        Path,
        typer.Argument(help="Checkpoint (folder, file, part or stem), data folder, dictionary, text or result."),
    ],
    hash: Annotated[bool, typer.Option("--hash/--no-hash", help="Read the files from end to end for sha256.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Say what a file or folder is: counts, shapes, types, parts and hashes. No weight is loaded, and nothing is run.

    What is broken is said, and the exit code is 1.
    """
    from lmtools.checkpoints.inspect import inspect_path
    from lmtools.files import sha256_file

    found, files = inspect_path(path)
    records = []
    sizes = [file.stat().st_size for file in files]
    with progress_bar("hash", total=sum(sizes)) as advance:
        for file, num_bytes in zip(files, sizes, strict=True):
            records.append({"path": file.name, "num_bytes": num_bytes})
            if hash:
                records[-1]["sha256"] = sha256_file(file)
            advance(num_bytes)
    found = {"path": str(path), **found, "files": records, "problems": found.get("problems", [])}
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["problems"]:
        raise typer.Exit(1)


def _show(found: Mapping[str, Any]) -> None:
    """Facts, tensors, files, and problems last, where they are seen."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_facts(found))
    for split, facts in found.get("splits", {}).items():
        console.print()
        console.print(_facts({"split": split, **{key: value for key, value in facts.items() if key != "kind"}}))
    for result in found.get("results", []):
        console.print()
        console.print(_facts(result))
    if found.get("tensors"):
        console.print("", _tensors(found["tensors"]), sep="\n")
    if found["files"]:
        console.print("", _files(found["files"]), sep="\n")
    for problem in found["problems"]:
        console.print("BROKEN", _printable(problem), style="bold red", soft_wrap=True)


def _facts(found: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in found.items():
        if name in _TABLES or value is None:
            continue
        table.add_row(name, Text(_text(value)))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return (
            "\n".join(f"{_printable(key)} {_text(item)}" for key, item in value.items() if item is not None) or "none"
        )
    if isinstance(value, list):
        return ", ".join(_brief(item) for item in value) or "none"
    return _printable(str(value))


def _printable(text: str) -> str:
    """A file may hold any names, also such that a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _brief(value: Any) -> str:
    """An item of a list: of a file, its name."""
    return _printable(str(value["path"] if isinstance(value, Mapping) and "path" in value else value))


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> Table:
    """One row for the tensors of all layers that are alike."""
    from rich.table import Table

    prefix = _common_prefix([tensor["name"] for tensor in tensors])
    groups: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        name = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.*.", tensor["name"].removeprefix(prefix))
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        key = (name, shape, tensor["dtype"], tensor.get("split", ""))
        groups[key] = groups.get(key, 0) + 1
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"{_printable(prefix)}*" if prefix else "tensor", overflow="fold")
    table.add_column("times", justify="right")
    for column in ("shape", "dtype", "split"):
        table.add_column(column)
    for (name, *rest), count in groups.items():
        table.add_row(_printable(name), str(count), *rest)
    return table


def _common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dot."""
    common = []
    for fields in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(fields)) > 1:
            break
        common.append(f"{fields[0]}.")
    return "".join(common)


def _files(files: Iterable[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column(f"sha256, first {_HASH_DIGITS} digits")
    for file in files:
        table.add_row(file["path"], f"{file['num_bytes']:,}", file.get("sha256", "")[:_HASH_DIGITS])
    return table
