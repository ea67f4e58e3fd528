"""fairseq's model checkpoints: one file, or the parts that its model parallelism writes.

Part r of P is `STEM-model_part-R.pt` and holds rank r's contiguous share of every split parameter and a copy of every
replicated one. Which is which is in `lmtools.parallel.plans` and nowhere else. Opening reads the names and shapes of
all parts and checks them; values are read when, and as far as, they are asked for. `fairseq_files.py` finds the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmtools.checkpoints.fairseq_config import model_settings, require_transformer_lm, transformer_lm_config
from lmtools.checkpoints.fairseq_files import find_parts, require_all_parts
from lmtools.checkpoints.identity import identity_of_files
from lmtools.checkpoints.lazy_tensor import LazyTensor, equal_values
from lmtools.checkpoints.parts import (
    drifted_replicas,
    dtypes_of_parts,
    read_from_parts,
    require_equal_replicas,
    require_no_copy,
)
from lmtools.checkpoints.unpickle import plain, read_torch_file
from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.parallelize import without_memory
from lmtools.parallel.plans import TRANSFORMER_LM, Plan, split_of

# Names that fairseq writes beside the parameters: a format version, and a marker of computed positions.
_NOT_PARAMETERS = frozenset({"version", "embed_positions._float_tensor", "embed_positions.version"})
_OUTPUT = "output_projection.weight"
_EMBEDDING = "embed_tokens.weight"
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class FairseqCheckpoint:
    """An open checkpoint, of which only names and shapes were read.

    Attributes:
        paths: the file of each part, in rank order.
        config: the model that it holds.
        settings: fairseq's options as it wrote them.
        parts: lmtools' parameter name to lazy tensor, for each part.
        plan: how the parameters are split over the parts.
    """

    format: ClassVar[str] = "fairseq"
    paths: tuple[Path, ...]
    config: TransformerLMConfig
    settings: Mapping[str, Any]
    parts: tuple[Mapping[str, LazyTensor], ...]
    plan: Plan

    @property
    def num_parts(self) -> int:
        """How many model-parallel ranks wrote it."""
        return len(self.paths)

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint from another one written to the same place, without hashing gigabytes."""
        return identity_of_files(self.paths)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Read part of a whole parameter, from whichever parts hold it.

        Args:
            name: lmtools' parameter name.
            slices: one for each dimension, with plain bounds.

        Returns:
            A tensor of its own, in the dtype that the file stores.
        """
        return read_from_parts(self.parts, self.plan, name, slices)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of each tensor.

        Raises:
            CheckpointError: the parts differ in it.
        """
        return dtypes_of_parts(self.parts, self.paths)

    def drifted(self, part: int) -> list[str]:
        """Names of the replicated tensors of a part that differ from part 0's."""
        return drifted_replicas(self.parts, self.plan, part)

    def verify_part(self, part: int, *, allow_replica_drift: bool = False) -> None:
        """Check a part's bytes, what must be equal (replicated tensors with part 0's, tied weights), and what must not.

        Args:
            part: which one.
            allow_replica_drift: do not compare the replicated tensors.

        Raises:
            CheckpointError: names what is damaged or different, and the files.
        """
        tensors = self.parts[part]
        for storage in {tensor.storage.key: tensor.storage for tensor in tensors.values()}.values():
            storage.verify()
        require_no_copy(self.parts, self.plan, self.paths, part)
        if not allow_replica_drift:
            require_equal_replicas(self.parts, self.plan, self.paths, part)
        tied = self.config.share_decoder_input_output_embed and _OUTPUT in tensors
        if tied and not equal_values(tensors[_OUTPUT], tensors[_EMBEDDING]):
            raise CheckpointError(
                f"{self.paths[part]}: {_OUTPUT} differs from {_EMBEDDING}, though the model shares them"
            )


def open_fairseq(path: str | Path) -> FairseqCheckpoint:
    """Open a checkpoint and check all that can be checked without reading its weights.

    Args:
        path: a folder with one checkpoint, a file, one part, or the stem that parts share (`model.pt` for
            `model-model_part-0.pt`, ...).

    Raises:
        CheckpointError: no checkpoint there, a part is missing or foreign, or a tensor is missing, unknown or of a
            wrong shape.
    """
    return fairseq_checkpoint(read_parts(path))


def read_parts(path: str | Path) -> dict[Path, Any]:
    """What `torch.save` wrote into each file of a checkpoint, in rank order; tensors are not read yet.

    Args:
        path: as for `open_fairseq`.

    Raises:
        CheckpointError: no checkpoint there, a part is missing, or a file is broken.
    """
    return {part: read_torch_file(part).content for part in find_parts(path)}


def fairseq_checkpoint(contents: Mapping[Path, Any]) -> FairseqCheckpoint:
    """The checkpoint that files hold, checked as `open_fairseq` does.

    Args:
        contents: from `read_parts`.

    Raises:
        CheckpointError: a part is foreign, or a tensor is missing, unknown or of a wrong shape.
    """
    paths = list(contents)
    for path, content in contents.items():
        if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
            raise CheckpointError(f"{path}: holds no `model`, expected a fairseq checkpoint")
    first = contents[paths[0]]
    _require_one_set(contents)
    settings = model_settings(_options(first, paths[0]), str(paths[0]))
    require_transformer_lm(settings, str(paths[0]))
    require_all_parts(paths, settings)
    parts = [_rename(content["model"], path) for path, content in contents.items()]
    _drop_added_rows(paths, parts, first)
    config = transformer_lm_config(settings, _vocab_size(parts, paths), str(paths[0]))
    _require_shapes(paths, parts, config)
    return FairseqCheckpoint(tuple(paths), config, settings, tuple(parts), TRANSFORMER_LM)


def _options(content: Mapping[str, Any], path: Path) -> Any:
    try:
        return plain({key: content.get(key) for key in ("args", "cfg")})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _require_one_set(contents: Mapping[Path, Mapping[str, Any]]) -> None:
    """Parts that lmtools wrote carry the id of their set; fairseq's carry none."""
    ids = {
        path: origin.get("set_id") if isinstance(origin := content.get("lmtools"), Mapping) else None
        for path, content in contents.items()
    }
    first = next(iter(ids))
    for path, set_id in ids.items():
        if set_id != ids[first]:
            raise CheckpointError(f"{path}: belongs to another set of parts than {first.name}; keep sets apart")


def _rename(state: Mapping[str, Any], path: Path) -> dict[str, LazyTensor]:
    """fairseq's names to lmtools': without `decoder.`, and without what is no parameter."""
    tensors: dict[str, LazyTensor] = {}
    for key, tensor in state.items():
        name = str(key).removeprefix("decoder.")
        if name == "embed_out":  # an untied output before output_projection existed
            name = _OUTPUT
        if name in _NOT_PARAMETERS:
            continue
        if not isinstance(tensor, LazyTensor) or not str(key).startswith("decoder."):
            raise CheckpointError(f"{path}: unknown entry {key!r} in the model, expected tensors named decoder.*")
        tensors[name] = tensor
    return tensors


def _drop_added_rows(paths: Sequence[Path], parts: Sequence[dict[str, LazyTensor]], content: Mapping[str, Any]) -> None:
    """Leave out the rows that lmtools added to a vocabulary for parts of equal size; its record says how many stay."""
    record = content.get("lmtools")
    own_rows = record.get("vocab_size") if isinstance(record, Mapping) else None
    if type(own_rows) is not int or own_rows < 1:
        return
    for name in (_EMBEDDING, _OUTPUT):
        left = own_rows
        for part in parts:
            tensor = part.get(name)
            if tensor is not None and len(tensor.shape) == 2:
                rows = min(left, tensor.shape[0])
                part[name] = replace(tensor, shape=(rows, tensor.shape[1]))
                left -= rows
        if left > 0 and name in parts[-1]:
            raise CheckpointError(f"{paths[-1]}: {name} has {own_rows - left} rows over all parts, expected {own_rows}")


def _vocab_size(parts: Sequence[Mapping[str, LazyTensor]], paths: Sequence[Path]) -> int:
    rows = 0
    for part, path in zip(parts, paths, strict=True):
        embedding = part.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{path}: has no {_EMBEDDING} of rows and columns, expected a fairseq language model")
        rows += embedding.shape[0]
    return rows


def _require_shapes(paths: Sequence[Path], parts: Sequence[dict[str, LazyTensor]], config: TransformerLMConfig) -> None:
    """Each part has exactly the model's parameters, and together they have the model's shapes."""
    for path, part in zip(paths, parts, strict=True):
        num_layers = len({match[1] for name in part if (match := _LAYER.match(name))})
        if num_layers != config.decoder_layers:
            raise CheckpointError(
                f"{path}: holds {num_layers} layers, its options say decoder_layers={config.decoder_layers}"
            )
    with without_memory():
        model = TransformerLM(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    optional = {_OUTPUT} if config.share_decoder_input_output_embed else set()
    for path, part in zip(paths, parts, strict=True):
        unknown = sorted(part.keys() - expected.keys())
        missing = sorted(expected.keys() - part.keys() - optional)
        if unknown or missing:
            found = "; ".join(f"{kind} {_list(names)}" for kind, names in (("unknown", unknown), ("missing", missing)))
            raise CheckpointError(f"{path}: tensors do not fit the model of the checkpoint's options: {found}")
    for name, shape in expected.items():
        holders = [part for part in parts if name in part]
        if holders and len(holders) != len(parts):
            raise CheckpointError(f"{paths[0].parent}: {name} is in {len(holders)} of {len(parts)} parts")
        if holders:
            whole = _whole_shape(name, [part[name].shape for part in parts], paths)
            if whole != shape:
                raise CheckpointError(f"{paths[0]}: {name} has shape {whole} over all parts, expected {shape}")


def _list(names: Sequence[str]) -> str:
    """The first few of them."""
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "none"


def _whole_shape(name: str, shapes: Sequence[tuple[int, ...]], paths: Sequence[Path]) -> tuple[int, ...]:
    dim = split_of(name, TRANSFORMER_LM).dim
    first = shapes[0]
    for path, shape in zip(paths, shapes, strict=True):
        if len(shape) != len(first) or any(shape[i] != first[i] for i in range(len(first)) if i != dim):
            raise CheckpointError(f"{path}: {name} has shape {shape}, but {first} in {paths[0].name}")
    if dim is None or dim >= len(first):
        return first
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])
