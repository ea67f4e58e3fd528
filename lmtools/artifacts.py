"""Sidecar manifests: what made a file, from what, with which options and counts.

Every step writes `OUTPUT.meta.json` beside its output and carries the counts of the original text forward, so
that `eval` and `renorm-ppl` know both token counts without being told. A manifest is never required: a file
without one is used as it is, and counts can be given by hand.

    {
      "format": "lmtools-manifest", "format_version": 1,
      "tool": "lmtools bpe-encode", "tool_version": "0.1.0",
      "options": {"keep_empty": false, ...},
      "inputs":  [{"path": "wiki.test.detok", "num_bytes": 1270000, "sha256": "..."}],
      "outputs": [{"path": "wiki.test.bpe", "num_bytes": 1240000, "sha256": "..."}],
      "counts":  {"lines": 2891, "tokens": 267956, ...},
      "original": {"path": "wiki.test.raw", "lines": 4358, "words": 241211, "tokens": 245569, "num_bytes": 1290590}
    }

Paths are file names, not absolute paths: a manifest moves with its files. `original` is what the first step of
the pipeline read; `original.tokens` is words + line ends, the count that WikiText-103's word-level perplexity
is normalised by.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmtools import __version__
from lmtools.errors import DataError
from lmtools.files import STDIO, atomic_write_text, is_device_or_pipe, sha256_file

FORMAT = "lmtools-manifest"
FORMAT_VERSION = 1
_COUNTS_OF_ORIGINAL = ("lines", "words", "tokens", "num_bytes")


@dataclass(frozen=True)
class FileRecord:
    """One file that a step read or wrote."""

    path: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> FileRecord:
        """Hash a file that exists."""
        return cls(Path(path).name, Path(path).stat().st_size, sha256_file(path))


@dataclass(frozen=True)
class OriginalText:
    """The counts of the text before detokenisation and BPE.

    Attributes:
        path: name of the file that the first step read.
        lines: number of lines, a last one without a line end included.
        words: number of fields between white space.
        tokens: words + lines, as word-level WikiText-103 counts them (each line end is one `<eos>`).
        num_bytes: size of the (decompressed) text.
    """

    path: str
    lines: int
    words: int
    tokens: int
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What made a file; see the module's docstring for each field."""

    tool: str
    options: Mapping[str, Any]
    inputs: Sequence[FileRecord]
    outputs: Sequence[FileRecord]
    counts: Mapping[str, Any]
    original: OriginalText | None = None
    tool_version: str = __version__
    format: str = field(default=FORMAT)
    format_version: int = field(default=FORMAT_VERSION)


def manifest_path(path: str | Path) -> Path:
    """Where the manifest of `path` lies: `PATH.meta.json`, for a folder beside it too."""
    path = Path(path)
    return path.with_name(path.name + ".meta.json")


def write_manifest(path: str | Path, manifest: Manifest) -> None:
    """Write the manifest of `path` (complete or absent). Output to `-`, a device or a pipe has none."""
    if is_device_or_pipe(path):
        return
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False)
    atomic_write_text(manifest_path(path), text + "\n")


def read_manifest(path: str | Path) -> Manifest | None:
    """The manifest of `path`, or None when there is none.

    Raises:
        DataError: the file is there but is not a manifest of a version that this lmtools knows.
    """
    if is_device_or_pipe(path) or not Path(path).name:  # `.` and `/` have no name for a manifest to lie beside
        return None
    location = manifest_path(path)
    if not os.path.exists(location):
        return None
    try:
        record = json.loads(location.read_text(encoding="utf-8"))
        if record["format"] != FORMAT or record["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{location}: expected {FORMAT} version {FORMAT_VERSION}, found {record['format']!r} version "
                f"{record['format_version']!r}; remove it to go on without its counts"
            )
        if not isinstance(record["options"], dict) or not isinstance(record["counts"], dict):
            raise TypeError("options and counts must be objects")
        original = record["original"]
        if original is not None and not all(type(original[name]) is int for name in _COUNTS_OF_ORIGINAL):
            raise TypeError("the counts of the original text must be whole numbers")
        return Manifest(
            tool=record["tool"],
            options=record["options"],
            inputs=[FileRecord(**entry) for entry in record["inputs"]],
            outputs=[FileRecord(**entry) for entry in record["outputs"]],
            counts=record["counts"],
            original=OriginalText(**original) if original is not None else None,
            tool_version=record["tool_version"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{location}: not a readable manifest ({error}); remove it to go on without its counts"
        ) from error


def read_fresh_manifest(path: str | Path) -> Manifest | None:
    """The manifest of `path` if it describes what is there now, else None.

    A file that was edited after its manifest was written no longer has the counts that the manifest says, so
    the recorded sha256 is compared with the file's. When `path` is not one of the outputs but what they have in
    common (a folder, or a split's prefix), every output must be as it was recorded.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return None
    own = [record for record in manifest.outputs if record.path == Path(path).name]
    return manifest if _are_as_recorded(path, own or manifest.outputs) else None


def is_unchanged(path: str | Path, *, tool: str, options: Mapping[str, Any], inputs: Sequence[str | Path]) -> bool:
    """Whether a step would make again what is already there.

    True when the manifest of `path` names the same tool, version and options, its inputs have the same bytes as
    those given now, and every output still has the bytes that it recorded.
    """
    manifest = read_manifest(path)
    if manifest is None or manifest.tool != tool or manifest.tool_version != __version__:
        return False
    if dict(manifest.options) != json.loads(json.dumps(dict(options))):
        return False
    if any(str(name) == STDIO or not os.path.isfile(name) for name in inputs):  # a pipe is gone once it is read
        return False
    return list(manifest.inputs) == [FileRecord.of(name) for name in inputs] and _are_as_recorded(
        path, manifest.outputs
    )


def carries_original(manifest: Manifest, source: str | Path) -> bool:
    """Whether an output has the counts of the original text that its input's manifest says now, if it says any.

    Args:
        manifest: of the output.
        source: the input's name; its bytes are those that the manifest recorded.
    """
    before = None if str(source) == STDIO else read_manifest(source)
    if before is None or before.original is None or not any(record in before.outputs for record in manifest.inputs):
        return True
    return manifest.original == before.original


def _are_as_recorded(path: str | Path, records: Sequence[FileRecord]) -> bool:
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return all((folder / record.path).is_file() and FileRecord.of(folder / record.path) == record for record in records)
