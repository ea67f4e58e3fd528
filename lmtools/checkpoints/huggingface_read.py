"""Reads transformers' folders of XGLM and GPT-2 models, a slice at a time, on one process or on any mesh.

`config.json` says what the model is; the files with its tensors are found by `huggingface_files.py`.
Each parameter is a view of a tensor in a file, so nothing is converted before it is read. For GPT-2 a view does all
that there is to do: its matrices are `(in, out)`, the transpose of ours, and its c_attn holds q, k and v side by side,
each with its heads in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtools.checkpoints.huggingface_config import config_of, read_config_json
from lmtools.checkpoints.huggingface_files import CONFIG, find_weights, merged, read_weights
from lmtools.checkpoints.identity import identity_of_files
from lmtools.checkpoints.lazy_tensor import LazyTensor, equal_values
from lmtools.data.dictionary import Dictionary
from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import PAD_INDEX, TransformerLM
from lmtools.parallel.parallelize import without_memory

_OUTPUT, _EMBEDDING, _POSITIONS = "output_projection.weight", "embed_tokens.weight", "embed_positions.weight"
_TOP_ROWS = PAD_INDEX + 1  # of our learned positions, which no token has, and which GPT-2 has not

_GPT2_NAMES = {
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "ln_f": "layer_norm",
    "ln_1": "self_attn_layer_norm",
    "ln_2": "final_layer_norm",
    "attn.c_proj": "self_attn.out_proj",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}
# Buffers: causal masks of GPT-2, positions of XGLM.
_NOT_PARAMETERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|embed_positions\.weights")


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """An open folder, of which only the configuration, names and shapes were read.

    Attributes:
        paths: the files that hold parameters.
        config: the model.
        settings: config.json.
        tensors: lmtools' parameter name to lazy tensor.
    """

    format: ClassVar[str] = "hf"
    paths: tuple[Path, ...]
    config: TransformerLMConfig
    settings: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]

    @property
    def num_parts(self) -> int:
        """How many files hold the model."""
        return len(self.paths)

    @property
    def parts(self) -> tuple[Mapping[str, LazyTensor], ...]:
        """One part, of the whole model."""
        return (self.tensors,)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of each parameter."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    @property
    def eos_index(self) -> int:
        """The token that ends a text, and so stands before one."""
        found = self.settings.get("eos_token_id", 2 if self.settings["model_type"] == "xglm" else 50_256)
        first = found[0] if isinstance(found, list) and found else found
        if type(first) is not int or not 0 <= first < self.config.vocab_size:
            raise CheckpointError(f"{self.paths[0].parent / CONFIG}: eos_token_id is {first!r}, which is no token")
        return first

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
        if name != _POSITIONS:
            return self.tensors[name].read_slice(slices)
        rows, columns = slices
        on_top = max(min(rows.stop, _TOP_ROWS) - rows.start, 0)
        there = slice(max(rows.start - _TOP_ROWS, 0), max(rows.stop - _TOP_ROWS, 0))
        return F.pad(self.tensors[name].read_slice((there, columns)), (0, 0, on_top, 0))

    def drifted(self, part: int) -> list[str]:
        """No parameter is there twice."""
        return []

    def verify_part(self, part: int, *, allow_replica_drift: bool = False) -> None:
        """Compare what one of `paths` holds with its checksums, where it has any, and tied weights with each other.

        Raises:
            CheckpointError: it is damaged, or not what its configuration says.
        """
        storages = {tensor.storage.key: tensor.storage for tensor in self._tensors_of(part)}
        for storage in storages.values():
            storage.verify()
        tied = self.config.share_decoder_input_output_embed and _OUTPUT in self.tensors
        if tied and part == 0 and not equal_values(self.tensors[_OUTPUT], self.tensors[_EMBEDDING]):
            raise CheckpointError(
                f"{self.paths[0].parent}: lm_head.weight differs from the embedding, which it should be"
            )

    def _tensors_of(self, part: int) -> list[LazyTensor]:
        return [tensor for tensor in self.tensors.values() if tensor.storage.path == self.paths[part]]

    def rows_of(self, dictionary: Dictionary) -> npt.NDArray[np.int32] | None:
        """The model's row for each index of a dictionary, -1 where it has none; None if they are the same.

        GPT-2 knows tokens by their BPE ids, which are the dictionary's words. Its one special token ends a text.
        """
        if self.settings["model_type"] != "gpt2":
            return None
        size = self.config.vocab_size
        ids = [int(word) if word.isascii() and word.isdecimal() else -1 for word in dictionary.symbols]
        rows = np.array([row if row < size else -1 for row in ids], dtype=np.int32)
        rows[[dictionary.bos_index, dictionary.eos_index]] = self.eos_index
        return rows


def open_huggingface(folder: str | Path) -> HuggingFaceCheckpoint:
    """Open a folder and check all that can be checked without reading weights.

    Raises:
        CheckpointError: it is of another model, or a file or a tensor is missing, broken, unknown or of a wrong shape.
    """
    folder = Path(folder)
    settings = read_config_json(folder / CONFIG)
    config = config_of(settings, str(folder / CONFIG))
    paths = find_weights(folder)
    tensors: dict[str, LazyTensor] = {}
    for path in paths:
        for name, tensor in read_weights(path).items():
            tensors = merged(tensors, _ours(name, tensor, settings["model_type"], path), path)
    _require_shapes(tensors, config, folder)
    return HuggingFaceCheckpoint(tuple(paths), config, settings, tensors)


def _ours(name: str, tensor: LazyTensor, model_type: str, path: Path) -> dict[str, LazyTensor]:
    """What a tensor is in lmtools: one parameter, three (c_attn) or none (a buffer)."""
    # A bare model has the names without the prefix, as OpenAI's own GPT-2 has.
    bare = name.removeprefix("model." if model_type == "xglm" else "transformer.")
    if _NOT_PARAMETERS.fullmatch(bare):
        return {}
    if bare == "lm_head.weight":
        return {_OUTPUT: tensor}
    if model_type == "xglm":
        return {bare: tensor}
    owner, _, kind = bare.rpartition(".")
    layer, inside = ("", owner)
    if match := re.fullmatch(r"h\.(\d+)\.(.+)", owner):
        layer, inside = f"layers.{match[1]}.", match[2]
    if inside.startswith(("attn.", "mlp.")) and kind == "weight":
        tensor = _transposed(tensor, name, path)
    if inside == "attn.c_attn":
        return {
            f"{layer}self_attn.{which}_proj.{kind}": third
            for which, third in zip("qkv", _thirds(tensor, name, path), strict=True)
        }
    return {f"{layer}{_GPT2_NAMES.get(inside, inside)}.{kind}": tensor}


def _transposed(tensor: LazyTensor, name: str, path: Path) -> LazyTensor:
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{path}: {name} has shape {tensor.shape}, expected a matrix")
    return replace(tensor, shape=tensor.shape[::-1], stride=tensor.stride[::-1])


def _thirds(tensor: LazyTensor, name: str, path: Path) -> list[LazyTensor]:
    """The first, second and last third of the rows."""
    if not tensor.shape or tensor.shape[0] % 3:
        raise CheckpointError(f"{path}: {name} has shape {tensor.shape}, expected q, k and v side by side")
    rows = tensor.shape[0] // 3
    return [
        replace(
            tensor,
            shape=(rows, *tensor.shape[1:]),
            storage_offset=tensor.storage_offset + third * rows * tensor.stride[0],
        )
        for third in range(3)
    ]


def _require_shapes(tensors: Mapping[str, LazyTensor], config: TransformerLMConfig, folder: Path) -> None:
    with without_memory():
        model = TransformerLM(config)
    expected = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    if _POSITIONS in expected:
        num_rows, embed_dim = expected[_POSITIONS]
        expected[_POSITIONS] = (num_rows - _TOP_ROWS, embed_dim)
    optional = {_OUTPUT} if config.share_decoder_input_output_embed else set()
    for name in sorted(tensors.keys() ^ expected.keys()):
        if name not in optional:
            problem = "is not of the model" if name in tensors else "is missing"
            raise CheckpointError(f"{folder}: {name} {problem} that {CONFIG} describes")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise CheckpointError(f"{folder}: {name} has shape {tensor.shape}, {CONFIG} says {expected[name]}")
