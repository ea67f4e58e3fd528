"""The steps from a raw text to a number, found among manifests by the hashes of what they read and wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtools.artifacts import FileRecord, Manifest, read_manifest
from lmtools.errors import DataError

_SUFFIX = ".meta.json"


@dataclass(frozen=True)
class Chain:
    """What led to some files.

    Attributes:
        steps: manifests, each after those of what it read.
        sources: files that steps read and that no step is known to have made; the raw text is one, if it was found.
    """

    steps: Sequence[Manifest]
    sources: Sequence[FileRecord]


def read_manifests(folders: Iterable[Path]) -> tuple[list[Manifest], list[str]]:
    """All manifests that lie in folders, not in those within them.

    Returns:
        The manifests, and a line on each file that has a manifest's name and cannot be read as one.
    """
    manifests, unreadable = [], []
    for folder in dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()):
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            try:
                manifest = read_manifest(path.with_name(path.name.removesuffix(_SUFFIX)))
            except DataError as error:
                unreadable.append(str(error))
                continue
            if manifest is not None:
                manifests.append(manifest)
    return manifests, unreadable


def chain_of(digests: Iterable[str], manifests: Sequence[Manifest]) -> Chain:
    """The steps that made files.

    Args:
        digests: sha256 of the files.
        manifests: all that are known; those of other files are left out.
    """
    made_by = _makers(manifests)
    steps: list[Manifest] = []
    sources: dict[str, FileRecord] = {}
    entered: list[Manifest] = []

    def follow(manifest: Manifest) -> None:
        if manifest in entered:
            return
        entered.append(manifest)
        for record in manifest.inputs:
            before = made_by.get(record.sha256)
            if before is None or before is manifest:  # what a step left as it was is read and written by it
                sources.setdefault(record.sha256, record)
            else:
                follow(before)
        steps.append(manifest)

    for digest in digests:
        if digest in made_by:
            follow(made_by[digest])
    return Chain(steps, list(sources.values()))


def _makers(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """The step that made the file of each hash; one that left a file as it was only where no other is known."""
    made_by: dict[str, Manifest] = {}
    for is_passed_on in (True, False):
        for manifest in manifests:
            read = {record.sha256 for record in manifest.inputs}
            written = {record.sha256 for record in manifest.outputs}
            made_by |= dict.fromkeys(written & read if is_passed_on else written - read, manifest)
    return made_by
