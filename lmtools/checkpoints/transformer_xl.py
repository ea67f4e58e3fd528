"""Transformer-XL as other programs saved it: fairseq, Hugging Face transformers, and the original.

All three have one state dict, whose names `transformer_xl_names.py` knows, and transformers may have it in several
files; they differ in where the options are. Opening reads names and shapes; values are read when, and as far as, they
are asked for. Nothing is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmtools.checkpoints.fairseq import read_parts
from lmtools.checkpoints.fairseq_config import model_settings
from lmtools.checkpoints.fairseq_files import PART_NAME
from lmtools.checkpoints.huggingface_files import CONFIG, find_weights, is_huggingface, merged, read_weights
from lmtools.checkpoints.identity import identity_of_files
from lmtools.checkpoints.lazy_tensor import LazyTensor, equal_values
from lmtools.checkpoints.transformer_xl_names import (
    Source,
    config_from_settings,
    parameter_sources,
    settings_from_shapes,
)
from lmtools.checkpoints.unpickle import plain
from lmtools.checkpoints.vocabulary import find_vocabulary_file
from lmtools.errors import CheckpointError, ConfigError
from lmtools.models.architectures import TransformerXLConfig
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.parallelize import without_memory

_HUGGING_FACE_LENGTHS = {"mem_len": 1600, "clamp_len": 1000, "same_length": True}
"""What transformers takes for options that are not in config.json; shapes do not show these."""
_TABLE = "word_emb.emb_layers."
_TABLES = re.compile(r"(?:^|\.)(?:word_emb\.emb|crit\.out)_layers\.(\d+)\.weight")


@dataclass(frozen=True)
class TransformerXLCheckpoint:
    """An open checkpoint, of which only names and shapes were read.

    Attributes:
        paths: the one file, or transformers' several.
        config: the model that it holds.
        tokens_per_sample: the length of chunks that it was trained on, if the file says.
        state: the state dict.
        sources: where in it each parameter is.
        vocabulary_path: the file beside it that says which word is which row; None if rows are a dict.txt's indices.
        says_lengths: whether the file says how long the memory was; the original's does not.
        of_transformers: whether it is a folder of transformers, which comes with words of its own.
    """

    paths: tuple[Path, ...]
    config: TransformerXLConfig
    tokens_per_sample: int | None
    state: Mapping[str, LazyTensor]
    sources: Mapping[str, Source]
    vocabulary_path: Path | None = None
    says_lengths: bool = True
    of_transformers: bool = False

    format: ClassVar[str] = "transformer_xl"

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of each parameter."""
        return {name: self.state[source.name].dtype for name, source in self.sources.items()}

    @property
    def num_parts(self) -> int:
        """How many files hold the model."""
        return len(self.paths)

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint from another one written to the same place, without hashing gigabytes."""
        return identity_of_files(self.paths)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Read part of a whole parameter.

        Args:
            name: lmtools' parameter name.
            slices: one for each dimension, with plain bounds.

        Returns:
            A tensor of its own, in the dtype that the file stores.
        """
        source = self.sources[name]
        tensor = self.state[source.name]
        start, end = source.rows or (0, tensor.shape[0])
        rows = slices[0]
        if not source.reversed:
            return tensor.read_slice((slice(start + rows.start, start + rows.stop), *slices[1:]))
        return tensor.read_slice((slice(end - rows.stop, end - rows.start), *slices[1:])).flip(0)

    def drifted(self, part: int) -> list[str]:
        """Which replicated parameters differ between parts: each is in one."""
        return []

    def verify_part(self, part: int, *, allow_replica_drift: bool = False) -> None:
        """Check a file's bytes, and that what the model shares is the same wherever it is listed.

        Raises:
            CheckpointError: names what is damaged or different.
        """
        path = self.paths[part]
        of_part = [tensor.storage for tensor in self.state.values() if tensor.storage.path == path]
        for storage in {storage.key: storage for storage in of_part}.values():
            storage.verify()
        for source in self.sources.values():
            for copy in source.copies:
                here = copy in self.state and self.state[copy].storage.path == path
                if here and not equal_values(self.state[copy], self.state[source.name]):
                    raise CheckpointError(f"{path}: {copy} differs from {source.name}, though the model shares them")


def open_transformer_xl(path: str | Path) -> TransformerXLCheckpoint | None:
    """Open a checkpoint and check all that can be checked without reading its weights.

    Args:
        path: fairseq's file, a Hugging Face folder (`config.json`, and what `huggingface_files.py` finds), the
            original's file with a state dict, or a folder with one such file.

    Returns:
        None if another kind of model is there.

    Raises:
        CheckpointError: nothing is there, the file is broken, a tensor is missing, unknown or of a wrong shape, or it
            is a variant that lmtools does not have.
    """
    if is_transformers_folder(path):
        return _open_hugging_face(Path(path))
    return transformer_xl_checkpoint(read_parts(path))


def is_transformers_folder(path: str | Path) -> bool:
    """Whether a folder is one that transformers wrote, perhaps without its options."""
    return is_huggingface(path) or (Path(path) / "pytorch_model.bin").is_file()


def transformer_xl_checkpoint(contents: Mapping[Path, Any]) -> TransformerXLCheckpoint | None:
    """The checkpoint that fairseq's or the original's file holds, checked as `open_transformer_xl` does.

    Args:
        contents: from `read_parts`.

    Returns:
        None if another kind of model is there.

    Raises:
        CheckpointError: a tensor is missing, unknown or of a wrong shape, or it is a variant that lmtools has not.
    """
    (file, content), *others = contents.items()
    if others or PART_NAME.fullmatch(file.name) or not isinstance(content, Mapping):
        return None
    if isinstance(content.get("model"), Mapping):
        return _open_fairseq(content, file)
    if any(str(name).endswith(f"{_TABLE}0.weight") for name in content):
        return _open_original(content, file)
    return None


def _open_fairseq(content: Mapping[str, Any], path: Path) -> TransformerXLCheckpoint | None:
    try:
        options = plain({key: content.get(key) for key in ("args", "cfg")})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    settings = model_settings(options, str(path))
    if not str(settings.get("arch")).startswith("transformer_xl"):
        return None
    state = _tensors(content["model"], path)
    return _checked(path, _config(settings, state, path), _positive(settings.get("tokens_per_sample")), state)


def _open_hugging_face(folder: Path) -> TransformerXLCheckpoint | None:
    options = folder / CONFIG
    try:
        settings = json.loads(options.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{options}: not a readable config.json ({error})") from error
    if not isinstance(settings, dict) or settings.get("model_type") != "transfo-xl":
        return None
    paths = find_weights(folder)
    state: dict[str, LazyTensor] = {}
    for path in paths:
        state = merged(state, read_weights(path), path)
    config = _config(_HUGGING_FACE_LENGTHS | settings, state, options)
    found = _checked(paths[0] if len(paths) == 1 else folder, config, _positive(settings.get("tgt_len")), state)
    return replace(found, paths=tuple(paths), vocabulary_path=find_vocabulary_file(folder), of_transformers=True)


def _open_original(content: Mapping[str, Any], path: Path) -> TransformerXLCheckpoint:
    """The original's file has no options: shapes say what they can, and the rest is as in its WikiText-103 runs."""
    state = _tensors(content, path)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    settings = settings_from_shapes(shapes, str(path))
    config = TransformerXLConfig(**settings)
    tails = [shape[0] for name, shape in shapes.items() if name.endswith("crit.cluster_weight")]
    num_tails = tails[0] if tails else 0
    if len(config.cluster_bounds) != num_tails + 1:
        raise CheckpointError(
            f"{path}: has {num_tails} clusters of rare types and one table, which does not say where they begin; "
            f"expected the original's cutoffs for {config.vocab_size} types, {len(config.cluster_bounds) - 1} of them"
        )
    found = _checked(path, config, None, state)
    return replace(found, vocabulary_path=find_vocabulary_file(path.parent), says_lengths=False)


def _tensors(content: Mapping[Any, Any], path: Path) -> dict[str, LazyTensor]:
    """The state dict's tensors; a number (fairseq's `decoder.version`) is none."""
    for name, tensor in content.items():
        if not isinstance(tensor, LazyTensor):
            raise CheckpointError(f"{path}: unknown entry {name!r} in the model, expected tensors")
    return {str(name): tensor for name, tensor in content.items()}


def _config(settings: Mapping[str, Any], state: Mapping[str, LazyTensor], where: Path) -> TransformerXLConfig:
    # Of each table's names, which may be one or two.
    rows = {m[1]: state[name].shape[0] for name in state if (m := _TABLES.search(name)) and state[name].shape}
    vocab_size = sum(rows.values())
    kinds = {field.name: field.type for field in fields(TransformerXLConfig)}
    for name, value in settings.items():
        expected = {"int": (int,), "bool": (bool,), "float": (float, int)}.get(str(kinds.get(name)))
        if expected is not None and type(value) not in expected:
            raise CheckpointError(f"{where}: has {name}={value!r}, expected {expected[0].__name__}")
    try:
        return config_from_settings(settings, vocab_size, str(where))
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where}: options of no Transformer-XL that lmtools knows: {error}") from error


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _checked(
    path: Path, config: TransformerXLConfig, tokens_per_sample: int | None, state: Mapping[str, LazyTensor]
) -> TransformerXLCheckpoint:
    """Every parameter is there in the model's shape; `path` is what holds them all."""
    sources = parameter_sources(state, config, str(path))
    with without_memory():
        model = TransformerXL(config)
    for name, parameter in model.named_parameters():
        source = sources[name]
        found = state[source.name].shape
        shape = found if source.rows is None else (min(source.rows[1], found[0]) - source.rows[0], *found[1:])
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{state[source.name].storage.path}: {source.name} has shape {found}, "
                f"expected {tuple(parameter.shape)} for {name}"
            )
    return TransformerXLCheckpoint((path,), config, tokens_per_sample, state, sources)
