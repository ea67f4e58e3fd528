"""`lmtools download`: checkpoints, dictionaries and texts by name."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtools.cli.options import JsonOption, for_tab, print_json, progress_bar, say
from lmtools.errors import ConfigError, LmtoolsError
from lmtools.preprocess.sources import ARTIFACTS, Artifact

if TYPE_CHECKING:
    from lmtools.preprocess.download import Outcome


def download(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to download; --list shows the names.",
            autocompletion=for_tab([artifact.name for artifact in ARTIFACTS]),
        ),
    ] = None,
    dest: Annotated[Path, typer.Option("--dest", help="Folder to put it in; made if it is not there.")] = Path("."),
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Your own mirror, used alone: the address of the one file, or a folder's with / at its end.",
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Fetch nothing: check and unpack what is there, or say what is missing.")
    ] = False,
    keep_archive: Annotated[
        bool, typer.Option("--keep-archive", help="Keep the archive beside what was unpacked from it.")
    ] = False,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, help="Failures in a row before the next mirror is tried.")
    ] = 5,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.01, max=86_400, help="Seconds to wait for a connection and for the next bytes."
        ),
    ] = 30.0,
    list_all: Annotated[bool, typer.Option("--list", help="Show what can be downloaded, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Download checkpoints, dictionaries and texts: resumed after a break, checked, and safely unpacked.

    Prints the path of each folder or file. What is there already, with the right bytes, is not fetched again.
    """
    if list_all:
        print_json({"artifacts": [_describe(artifact) for artifact in ARTIFACTS]}) if as_json else _print_table()
        return
    if not names:
        raise typer.BadParameter("name what to download, or use --list", param_hint="NAMES")
    if offline and url is not None:
        raise ConfigError("--offline and --url: choose one; offline nothing is fetched from anywhere")

    from lmtools.preprocess.download import download as bring
    from lmtools.preprocess.download import from_mirror
    from lmtools.preprocess.transfer import RetryPolicy

    artifacts = [_by_name(name) for name in dict.fromkeys(names)]
    if url is not None:
        artifacts = from_mirror(artifacts, url)
    policy = RetryPolicy(attempts=attempts, timeout_s=timeout)
    outcomes: list[Outcome] = []
    failures: list[str] = []
    for artifact in artifacts:
        try:
            outcome = bring(
                artifact, dest, policy=policy, bar=progress_bar, report=say, offline=offline, keep_archive=keep_archive
            )
        except LmtoolsError as error:
            if len(artifacts) == 1:
                raise
            say(f"lmtools: {error}")
            failures.append(artifact.name)
            continue
        outcomes.append(outcome)
        if not as_json:
            _print_paths(outcome)
    if as_json:
        print_json({"artifacts": [_report(outcome) for outcome in outcomes], "failed": failures})
    if failures:
        raise LmtoolsError(f"{len(failures)} of {len(artifacts)} failed, as said above: {', '.join(failures)}")


def _by_name(name: str) -> Artifact:
    for artifact in ARTIFACTS:
        if artifact.name == name:
            return artifact
    known = [artifact.name for artifact in ARTIFACTS]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "--list shows the names"
    raise typer.BadParameter(f"nothing is known as {name!r}; {hint}", param_hint="NAMES")


def _print_paths(outcome: Outcome) -> None:
    say(f"{outcome.name}: {'there already' if outcome.status == 'present' else 'downloaded'}")
    for path in outcome.paths:
        print(path)


def _report(outcome: Outcome) -> dict[str, object]:
    return {
        "name": outcome.name,
        "status": outcome.status,
        "paths": [str(path) for path in outcome.paths],
        "urls": list(outcome.urls),
    }


def _describe(artifact: Artifact) -> dict[str, object]:
    return {
        "name": artifact.name,
        "description": artifact.description,
        "folder": artifact.folder,
        "unpacked": artifact.archive is not None,
        "files": [
            {"name": file.name, "num_bytes": file.num_bytes, "sha256": file.sha256, "urls": list(file.urls)}
            for file in artifact.files
        ],
    }


def _print_table() -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("name", "size", "checked by", "gives"):
        table.add_column(heading, justify="right" if heading == "size" else "left", no_wrap=True)
    table.add_column("what")
    for artifact in ARTIFACTS:
        files = artifact.files
        known = [file.num_bytes for file in files if file.num_bytes is not None]
        table.add_row(
            artifact.name,
            decimal(sum(known)) if len(known) == len(files) else "?",
            ", ".join(dict.fromkeys("sha256" if file.sha256 else "size" for file in files)),
            f"{artifact.folder}/",
            artifact.description,
        )
    # A pipe has no width: there each artifact keeps to one line.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
