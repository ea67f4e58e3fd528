"""lmtools' own checkpoints: safetensors files, one for each part, and a manifest that makes them one set.

    folder/
      model.safetensors                  the whole model, or
      model-0-of-2.safetensors, ...      a part for each tensor-parallel rank
      model.json                         the manifest; written last

A part holds its rank's contiguous share of every split parameter and a copy of every replicated one, as fairseq's do,
but the last parts may have fewer rows of the vocabulary. The manifest:

    {
      "format": "lmtools-model", "format_version": 1, "tool_version": "0.1.0",
      "set_id": "0c1f...",                          also in every part's __metadata__
      "model": {"vocab_size": 160, ...},            the fields of TransformerLMConfig
      "num_parameters": 21952,
      "parts": [{"path": "model-0-of-2.safetensors", "num_bytes": 49208, "sha256": "..."}, ...],
      "tensors": {
        "layers.0.fc1.weight": {"dtype": "F32", "shape": [64, 32], "split": "column", "crc32": ["9ae1...", "07c3..."]},
        ...                                         whole shapes; a checksum for each part
      },
      "origin": {"format": "fairseq", "num_parts": 4, "files": [{"path": ..., "num_bytes": ..., "sha256": ...}], ...}
    }

The files' own byte table is in `safetensors_files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmtools.checkpoints.fairseq_config import transformer_lm_config
from lmtools.checkpoints.lazy_tensor import LazyTensor
from lmtools.checkpoints.parts import drifted_replicas, dtypes_of_parts, read_from_parts, require_equal_replicas
from lmtools.checkpoints.safetensors_files import DTYPES, METADATA, read_header, read_safetensors
from lmtools.checkpoints.weights import part_slices, shape_of
from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.parallelize import without_memory
from lmtools.parallel.plans import TRANSFORMER_LM, split_of

MANIFEST_NAME = "model.json"
FORMAT = "lmtools-model"
FORMAT_VERSION = 1
SET_ID = "lmtools_set_id"


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """An open set, of which only the manifest and the files' headers were read.

    Attributes:
        paths: the file of each part, in rank order.
        config: the model that it holds.
        manifest: see the module's docstring.
        parts: parameter name to lazy tensor, for each part.
    """

    format: ClassVar[str] = "safetensors"
    paths: tuple[Path, ...]
    config: TransformerLMConfig
    manifest: Mapping[str, Any]
    parts: tuple[Mapping[str, LazyTensor], ...]

    @property
    def num_parts(self) -> int:
        """How many files it is."""
        return len(self.paths)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of each parameter."""
        return dtypes_of_parts(self.parts, self.paths)

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint from another one written to the same place, without hashing gigabytes."""
        return {"checkpoint_set_id": self.manifest["set_id"]}

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Read part of a whole parameter, from whichever parts hold it; see `read_from_parts`."""
        return read_from_parts(self.parts, TRANSFORMER_LM, name, slices)

    def drifted(self, part: int) -> list[str]:
        """Names of the replicated tensors of a part that differ from part 0's."""
        return drifted_replicas(self.parts, TRANSFORMER_LM, part)

    def verify_part(self, part: int, *, allow_replica_drift: bool = False) -> None:
        """Compare a part's tensors with their checksums, and its replicated ones with part 0's.

        Args:
            part: which one.
            allow_replica_drift: do not compare the replicated tensors.

        Raises:
            CheckpointError: names what is damaged or different, and the file.
        """
        for tensor in self.parts[part].values():
            tensor.storage.verify()
        if not allow_replica_drift:
            require_equal_replicas(self.parts, TRANSFORMER_LM, self.paths, part)


def find_manifest(path: str | Path) -> Path | None:
    """The manifest that a folder, one of its files or the manifest itself belongs to; None if there is none."""
    path = Path(path)
    if path.name == MANIFEST_NAME or path.suffix == ".safetensors":
        path = path.parent
    return path / MANIFEST_NAME if (path / MANIFEST_NAME).is_file() else None


def read_model_manifest(path: Path) -> dict[str, Any]:
    """Read and check a manifest; its model and tensors are checked when they are used.

    Raises:
        CheckpointError: it is not there, not one, or of another version.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable manifest of a checkpoint ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected {FORMAT}, found another kind of JSON")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: {FORMAT} version {manifest.get('format_version')!r}, this lmtools reads {FORMAT_VERSION}"
        )
    for name, kind in (("set_id", str), ("model", dict), ("parts", list), ("tensors", dict), ("origin", dict)):
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"{path}: {name} is missing or of another type; the manifest is damaged")
    return manifest


def open_safetensors(path: str | Path) -> SafetensorsCheckpoint:
    """Open a set and check all that can be checked without reading its weights.

    Args:
        path: its folder, its manifest or one of its parts.

    Raises:
        CheckpointError: there is no set, or a file of it is missing, cut short, of another set or not as its manifest
            says.
    """
    location = find_manifest(path)
    if location is None:
        nor = ", nor transformers' config.json" if Path(path).is_dir() else ""
        raise CheckpointError(f"{path}: has no {MANIFEST_NAME}{nor}; the set is not complete, or not one of lmtools")
    manifest = read_model_manifest(location)
    settings = {**manifest["model"], "arch": "transformer_lm"}
    config = transformer_lm_config(settings, settings.get("vocab_size", 0), str(location))
    with without_memory():
        shapes = {name: tuple(parameter.shape) for name, parameter in TransformerLM(config).named_parameters()}
    _require_tensors(manifest["tensors"], shapes, len(manifest["parts"]), location)
    paths, parts = [], []
    for part, record in enumerate(manifest["parts"]):
        if not isinstance(record, dict) or not isinstance(name := record.get("path"), str) or Path(name).name != name:
            raise CheckpointError(f"{location}: part {part} has no file name; the manifest is damaged")
        paths.append(location.parent / name)
        parts.append(_open_part(paths[-1], record, part, manifest, shapes))
    return SafetensorsCheckpoint(tuple(paths), config, manifest, tuple(parts))


def _require_tensors(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], num_parts: int, where: Path
) -> None:
    """The manifest lists exactly the model's parameters, and split as this lmtools splits them."""
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise CheckpointError(f"{where}: {name} is {'missing' if name in shapes else 'no parameter of the model'}")
    if num_parts < 1:
        raise CheckpointError(f"{where}: lists no parts")
    for name, shape in shapes.items():
        expected = {"shape": list(shape), "split": split_of(name, TRANSFORMER_LM).value}
        entry = tensors[name] if isinstance(tensors[name], dict) else {}
        for key, value in expected.items():
            if entry.get(key) != value:
                raise CheckpointError(f"{where}: {name} has {key} {entry.get(key)!r}, expected {value!r}")
        sums = entry.get("crc32")
        if not isinstance(sums, list) or len(sums) != num_parts or not all(_is_crc32(value) for value in sums):
            raise CheckpointError(f"{where}: {name} has no checksum for each of {num_parts} parts")


def _is_crc32(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 8 and all(digit in "0123456789abcdef" for digit in value)


def _open_part(
    path: Path, record: Mapping[str, Any], part: int, manifest: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: part {part} of {len(manifest['parts'])} is missing")
    metadata = read_header(path)[0].get(METADATA)
    if not isinstance(metadata, dict) or metadata.get(SET_ID) != manifest["set_id"]:
        raise CheckpointError(f"{path}: belongs to another set than {MANIFEST_NAME}; keep sets apart")
    if path.stat().st_size != record.get("num_bytes"):
        raise CheckpointError(
            f"{path}: has {path.stat().st_size:,} bytes, its manifest says {record.get('num_bytes')!r}; "
            "cut short or damaged, fetch it again"
        )
    tensors = read_safetensors(path)
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise CheckpointError(f"{path}: {name} is {'missing' if name in shapes else 'no parameter of the model'}")
    for name, shape in shapes.items():
        expected = shape_of(part_slices(name, shape, TRANSFORMER_LM, len(manifest["parts"]), part))
        if tensors[name].shape != expected or tensors[name].dtype != DTYPES.get(manifest["tensors"][name].get("dtype")):
            raise CheckpointError(
                f"{path}: {name} is {tensors[name].dtype} of shape {tensors[name].shape}, not as its manifest says"
            )
        tensors[name].storage.crc32 = int(manifest["tensors"][name]["crc32"][part], 16)
    return tensors
