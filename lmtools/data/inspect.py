"""What a dictionary, a binarized folder or a file of text is. Reads as much as is needed to check it, and no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtools.artifacts import read_fresh_manifest, read_manifest
from lmtools.data.dictionary import SPECIAL_SYMBOLS, Dictionary
from lmtools.data.indexed import IndexedDataset, bin_path, idx_path
from lmtools.errors import DataError
from lmtools.files import open_binary

_CHUNK_BYTES = 1 << 20


def inspect_dictionary(path: Path) -> dict[str, Any]:
    """Counts of a dict.txt.

    Raises:
        DataError: it is broken; with `path:line`.
    """
    dictionary = Dictionary.load(path)
    first = len(SPECIAL_SYMBOLS)
    words, counts = dictionary.symbols[first:], dictionary.counts[first:]
    return {
        "kind": "dictionary",
        "types": len(dictionary),
        "rows": len(words),
        "padding_rows": sum(word.startswith("madeupword") for word in words),
        "gpt2_bpe": all(word.isdecimal() for word in words if not word.startswith("madeupword")),
        "total_count": sum(counts),
    }


def inspect_split(prefix: Path) -> dict[str, Any]:
    """Counts of a split's `.idx` and `.bin`, which are checked from end to end.

    Raises:
        DataError: a file of the pair is missing, cut short, or does not fit the other.
    """
    dataset = IndexedDataset(prefix)
    return {
        "kind": "binarized split",
        "sentences": len(dataset),
        "tokens": dataset.num_tokens,
        "longest_sentence": int(dataset.sizes.max()) if len(dataset) else 0,
        "dtype": dataset.dtype.name,
        **_made_by(prefix),
    }


def inspect_folder(folder: Path) -> dict[str, Any]:
    """A folder that `binarize` or fairseq-preprocess made: its dictionary and all its splits.

    Returns:
        What is found; a broken split is among its `problems`.
    """
    found: dict[str, Any] = {"kind": "binarized data", "splits": {}, "problems": []}
    dictionary = folder / "dict.txt"
    if not dictionary.is_file():
        found["problems"].append(f"{dictionary}: is missing")
    else:
        try:
            found["types"] = inspect_dictionary(dictionary)["types"]
        except DataError as error:
            found["problems"].append(str(error))
    for prefix in sorted({path.with_suffix("") for path in split_files(folder)}):
        try:
            found["splits"][prefix.name] = inspect_split(prefix)
        except DataError as error:
            found["problems"].append(str(error))
    return found


def split_files(folder: Path) -> Iterator[Path]:
    """All `.idx` and `.bin` files of a folder."""
    yield from folder.glob("*.idx")
    yield from folder.glob("*.bin")


def files_of_split(prefix: Path) -> list[Path]:
    """Both files of a split."""
    return [idx_path(prefix), bin_path(prefix)]


def inspect_text(path: Path) -> dict[str, Any]:
    """Lines and bytes of a text, and what its manifest says of it.

    Raises:
        DataError: it cannot be read or decompressed, or is no text.
    """
    lines = num_bytes = 0
    last = b""
    with open_binary(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            if b"\0" in chunk:
                at = num_bytes + chunk.index(b"\0")
                raise DataError(f"{path}: not text (a zero byte at {at:,}), and no other kind that lmtools knows")
            lines += chunk.count(b"\n")
            num_bytes += len(chunk)
            last = chunk
    lines += bool(last) and not last.endswith(b"\n")
    return {"kind": "text", "lines": lines, "num_bytes": num_bytes, **_made_by(path)}


def _made_by(path: Path) -> dict[str, Any]:
    """What a manifest says, and whether it is of the file as it is now."""
    manifest = read_manifest(path)
    if manifest is None:
        return {}
    original = manifest.original
    return {
        "made_by": f"{manifest.tool} {manifest.tool_version}",
        "made_from": [record.path for record in manifest.inputs],
        "manifest_fits": read_fresh_manifest(path) is not None,
        "counts": dict(manifest.counts),
        "original_tokens": original.tokens if original is not None else None,
    }
