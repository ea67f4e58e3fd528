"""Files of torch.save with a pickle of the test's own choice, in both containers."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
PROTOCOL = pickle.dumps(1001, protocol=2)
SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, protocol=2)
NO_STORAGES = pickle.dumps([], protocol=2)


def write_zip(
    path: Path, content: bytes, storages: Mapping[str, bytes] | None = None, *, byteorder: bytes = b"little"
) -> Path:
    """A zip archive as torch.save writes it, around the pickle `content`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", byteorder)
        for key, values in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", values)
    return path


def write_legacy(path: Path, content: bytes, storages: Sequence[tuple[str, int, bytes]] = ()) -> Path:
    """A legacy file around the pickle `content`; each storage is key, number of elements, and their bytes."""
    keys = pickle.dumps([key for key, _, _ in storages], protocol=2)
    tail = b"".join(struct.pack("<q", num_elements) + values for _, num_elements, values in storages)
    path.write_bytes(MAGIC + PROTOCOL + SYSTEM + content + keys + tail)
    return path
