"""Writes a model as a folder that `transformers` loads with no code of ours: fairseq's decoder is its XGLM.

    config.json, generation_config.json    the model's shape
    model.safetensors                      or model-00001-of-00003.safetensors, ... and model.safetensors.index.json
    tokenizer.json, ...                    given by the caller, see `preprocess/huggingface_tokenizer.py`

XGLM has sinusoidal positions that begin with 2, an embedding scaled by sqrt(d_model), LayerNorm before each sublayer
and at the end. A model that differs in one of these has no such folder.

Source: transformers/models/xglm/modeling_xglm.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtools.checkpoints.load import Checkpoint
from lmtools.checkpoints.safetensors_files import write_safetensors
from lmtools.errors import ConfigError
from lmtools.files import atomic_directory, require_free_space
from lmtools.models.architectures import ActivationName, TransformerLMConfig
from lmtools.models.transformer_lm import PAD_INDEX, TransformerLM
from lmtools.parallel.parallelize import without_memory

EOS_INDEX = 2

_ACTIVATIONS: dict[ActivationName, str] = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_new"}


def export_huggingface(
    source: Checkpoint,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    more_files: Mapping[str, str] | None = None,
    shard_bytes: int = 5 << 30,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Write an open checkpoint as a folder of transformers' XGLM. The folder is complete or absent.

    One tensor at a time is in memory, whatever parts the checkpoint has.

    Args:
        source: from `open_checkpoint`.
        folder: where to; it must not exist or be empty.
        dtype: what the parameters are converted to; None keeps the embedding's.
        more_files: name and content of other files of the folder, such as the tokenizer's.
        shard_bytes: tensors begin another file where they would make one larger than this.
        progress: called with the number of bytes of parameters that were just written.

    Returns:
        The files that hold parameters.

    Raises:
        CheckpointError: the checkpoint is damaged, or its parts contradict each other.
        ConfigError: XGLM is another model than the checkpoint's.
        LmtoolsError: the folder has content, or the disk is full or may not be written.
    """
    folder = Path(folder)
    _require_xglm(source.config)
    for part in range(source.num_parts):
        source.verify_part(part)
    with without_memory():
        shapes = {name: tuple(value.shape) for name, value in TransformerLM(source.config).named_parameters()}
    if dtype is None:
        dtype = source.read("embed_tokens.weight", (slice(0, 1), slice(0, 1))).dtype
    names = {huggingface_name(name): name for name in shapes}
    shards = _shards({name: shapes[ours] for name, ours in names.items()}, dtype, shard_bytes)
    num_bytes = {name: math.prod(shapes[ours]) * dtype.itemsize for name, ours in names.items()}

    def read(name: str) -> Tensor:
        ours = names[name]
        return source.read(ours, tuple(slice(0, length) for length in shapes[ours]))

    with atomic_directory(folder) as temporary:
        require_free_space(temporary, sum(num_bytes.values()), str(folder))
        for file_name, tensors in shards.items():
            with open(temporary / file_name, "wb") as stream:
                write_safetensors(stream, tensors, read, dtype=dtype, progress=progress)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(num_bytes.values())},
                "weight_map": {name: file_name for file_name, tensors in shards.items() for name in tensors},
            }
            _write_json(temporary / "model.safetensors.index.json", index)
        _write_json(temporary / "config.json", xglm_config(source.config, dtype))
        _write_json(temporary / "generation_config.json", _special_tokens())
        for name, content in (more_files or {}).items():
            (temporary / name).write_text(content, encoding="utf-8", newline="")
    return [folder / name for name in shards]


def huggingface_name(name: str) -> str:
    """XGLM's name of a parameter."""
    return "lm_head.weight" if name == "output_projection.weight" else f"model.{name}"


def xglm_config(config: TransformerLMConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says."""
    return {
        "architectures": ["XGLMForCausalLM"],
        "model_type": "xglm",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_target_positions,
        "d_model": config.decoder_embed_dim,
        "ffn_dim": config.decoder_ffn_embed_dim,
        "num_layers": config.decoder_layers,
        "attention_heads": config.decoder_attention_heads,
        "activation_function": _ACTIVATIONS[config.activation_fn],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "layerdrop": 0.0,
        "scale_embedding": not config.no_scale_embedding,
        "tie_word_embeddings": config.share_decoder_input_output_embed,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_special_tokens(),
    }


def _special_tokens() -> dict[str, int]:
    # A text begins where another has ended, so what stands before its first token is the end of a sentence.
    return {
        "bos_token_id": EOS_INDEX,
        "eos_token_id": EOS_INDEX,
        "pad_token_id": PAD_INDEX,
        "decoder_start_token_id": EOS_INDEX,
    }


def _require_xglm(config: TransformerLMConfig) -> None:
    differences = {
        "LayerNorm after each sublayer (decoder_normalize_before=False)": not config.decoder_normalize_before,
        "no final LayerNorm (no_decoder_final_norm)": config.no_decoder_final_norm,
        "learned positions (decoder_learned_pos)": config.decoder_learned_pos,
        "no positions (no_token_positional_embeddings)": config.no_token_positional_embeddings,
        "a LayerNorm on the embedding (layernorm_embedding)": config.layernorm_embedding,
    }
    found = [what for what, differs in differences.items() if differs]
    if found:
        raise ConfigError(
            f"the model has {', '.join(found)}: transformers' XGLM, which it would be exported as, has not; "
            "use another format"
        )


def _shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    in_group = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and in_group + num_bytes > shard_bytes:
            groups.append({})
            in_group = 0
        groups[-1][name] = shape
        in_group += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
