"""The files of a transformers folder that hold its tensors: which they are, and what is in them.

    model.safetensors                or parts of it, named by model.safetensors.index.json; where these are not,
    pytorch_model.bin                or parts of it, named by pytorch_model.bin.index.json

transformers prefers them in this order too. An index is read for the files' names alone, as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lmtools.checkpoints.lazy_tensor import LazyTensor
from lmtools.checkpoints.safetensors_files import read_safetensors
from lmtools.checkpoints.unpickle import read_torch_file
from lmtools.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def is_huggingface(path: str | Path) -> bool:
    """Whether a folder is transformers'."""
    return (Path(path) / CONFIG).is_file()


def find_weights(folder: Path) -> list[Path]:
    """The files that hold a folder's tensors.

    Raises:
        CheckpointError: there are none, or an index of them is broken.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                if not files or not all(Path(file).name == file for file in files):
                    raise ValueError("a file of another folder")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index}: not an index of parts ({error})") from error
            return [folder / file for file in files]
    raise CheckpointError(f"{folder}: has neither model.safetensors nor pytorch_model.bin, nor an index of their parts")


def read_weights(path: Path) -> dict[str, LazyTensor]:
    """Names and shapes of what one of these files holds; no value is read.

    Raises:
        CheckpointError: it is missing, broken, or no table of tensors.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    content = read_torch_file(path).content
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds no state dict")
    for name, tensor in content.items():
        if not isinstance(tensor, LazyTensor):
            raise CheckpointError(f"{path}: unknown entry {name!r} in the model, expected tensors")
    return {str(name): tensor for name, tensor in content.items()}


def merged(tensors: Mapping[str, LazyTensor], others: Mapping[str, LazyTensor], path: Path) -> dict[str, LazyTensor]:
    """Two files' tensors together.

    Args:
        tensors: of the files before.
        others: of the next file.
        path: the next file, for the message.

    Raises:
        CheckpointError: one is in both, and which of them is the model's cannot be known.
    """
    twice = sorted(tensors.keys() & others.keys())
    if twice:
        before = tensors[twice[0]].storage.path.name
        raise CheckpointError(f"{path}: has {twice[0]}, which {before} has too; each belongs into one file")
    return {**tensors, **others}
