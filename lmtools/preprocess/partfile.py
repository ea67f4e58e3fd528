"""`NAME.part` and `NAME.part.json`: what has arrived of a file so far, and of which version of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lmtools.files import atomic_write_text, disk_errors, fsync_directory, fsync_file


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a part come from; all empty when nobody knows.

    Attributes:
        url: the address that was asked.
        etag: the answer's ETag.
        last_modified: the answer's Last-Modified.
        total: the size of the whole file by the server's account.
    """

    url: str = ""
    etag: str | None = None
    last_modified: str | None = None
    total: int | None = None

    @property
    def validator(self) -> str | None:
        """What `If-Range` may say: a weak ETag does not promise the same bytes and may not be used there."""
        if self.etag is not None and not self.etag.startswith("W/") and _is_sendable(self.etag):
            return self.etag
        if self.last_modified is not None and _is_sendable(self.last_modified):
            return self.last_modified
        return None


class PartFile:
    """The unfinished download of one file; the caller holds the file's lock."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self._target = target
        self._origin_path = target.with_name(target.name + ".part.json")

    def num_bytes(self) -> int:
        """How much there is."""
        return self.path.stat().st_size if self.path.exists() else 0

    def origin(self) -> Origin:
        """Where it comes from; an empty record when `NAME.part.json` is not there or not readable."""
        try:
            origin = Origin(**json.loads(self._origin_path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Origin()
        texts = all(text is None or isinstance(text, str) for text in (origin.etag, origin.last_modified))
        return origin if texts and isinstance(origin.url, str) else Origin()

    def begin(self, origin: Origin) -> None:
        """Start over, with no bytes."""
        self.discard()
        with disk_errors(self.path):
            atomic_write_text(self._origin_path, json.dumps(asdict(origin), indent=2) + "\n")
            self.path.touch()

    def discard(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)
        self._origin_path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give it the file's own name."""
        with disk_errors(self._target):
            fsync_file(self.path)
            self.path.replace(self._target)
            self._origin_path.unlink(missing_ok=True)
            fsync_directory(self._target.parent)


def _is_sendable(header: str) -> bool:
    return header.isascii() and header.isprintable()
