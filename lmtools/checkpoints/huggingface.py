"""Writes a model as a folder that `transformers` loads with no code of ours: fairseq's decoder is its XGLM.

    config.json, generation_config.json    the model's shape
    origin.json                            what it was made from
    model.safetensors                      or model-00001-of-00003.safetensors, ... and model.safetensors.index.json
    tokenizer.json, ...                    given by the caller, see `preprocess/huggingface_tokenizer.py`

XGLM has sinusoidal positions that begin with 2, an embedding scaled by sqrt(d_model), LayerNorm before each sublayer
and at the end. A model that differs in one of these has no such folder.

Source: transformers/models/xglm/modeling_xglm.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmtools import __version__
from lmtools.checkpoints.safetensors_files import encode_header
from lmtools.checkpoints.weights import Progress, Weights, stream_bytes
from lmtools.errors import ConfigError
from lmtools.models.architectures import ActivationName, TransformerLMConfig
from lmtools.models.transformer_lm import PAD_INDEX

EOS_INDEX = 2

SHARD_BYTES = 5 << 30
"""A tensor begins another file where it would make one larger than this."""

_ACTIVATIONS: dict[ActivationName, str] = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_new"}


def write_huggingface(
    folder: Path,
    weights: Weights,
    *,
    num_parts: int,
    origin: Mapping[str, Any],
    progress: Progress = lambda num_bytes: None,
) -> list[Path]:
    """A `Writer`. `num_parts` is 1: transformers splits a model when it has loaded it. origin.json it does not read."""
    require_xglm(weights.config, num_parts)
    shards = _shards(weights)
    for file_name, names in shards.items():
        theirs = {huggingface_name(name): name for name in names}
        shapes = {name: weights.shapes[ours] for name, ours in theirs.items()}
        with open(folder / file_name, "wb") as stream:
            stream.write(encode_header(shapes, {name: weights.dtypes[ours] for name, ours in theirs.items()}))
            for ours in theirs.values():
                for chunk in stream_bytes(weights, ours, tuple(slice(0, length) for length in weights.shapes[ours])):
                    stream.write(chunk)
                    progress(chunk.nbytes)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_num_bytes(weights, name) for name in weights.shapes)},
            "weight_map": {huggingface_name(name): file_name for file_name, names in shards.items() for name in names},
        }
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", xglm_config(weights.config, weights.dtypes["embed_tokens.weight"]))
    _write_json(folder / "origin.json", {"tool_version": __version__, **origin})
    _write_json(folder / "generation_config.json", _special_tokens())
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


def require_xglm(config: TransformerLMConfig, num_parts: int) -> None:
    """Refuse what has no folder.

    Raises:
        ConfigError: XGLM is another model than this one, or several parts were asked for.
    """
    if num_parts != 1:
        raise ConfigError(f"--mp {num_parts}: transformers has no parts for ranks; use --mp 1")
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


def _shards(weights: Weights) -> dict[str, list[str]]:
    """The parameters of each file."""
    groups: list[list[str]] = [[]]
    in_group = 0
    for name in weights.shapes:
        num_bytes = _num_bytes(weights, name)
        if groups[-1] and in_group + num_bytes > SHARD_BYTES:
            groups.append([])
            in_group = 0
        groups[-1].append(name)
        in_group += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _num_bytes(weights: Weights, name: str) -> int:
    return math.prod(weights.shapes[name]) * weights.dtypes[name].itemsize


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
