"""transformers' config.json of XGLM and GPT-2, as a `TransformerLMConfig`.

XGLM is fairseq's decoder, and its tokens are a fairseq dictionary's. GPT-2 differs in learned positions, in an
embedding that is not scaled, and in a vocabulary of its own. What a config.json leaves out has transformers' default.

Source: transformers/models/{xglm,gpt2}/configuration_*.py
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtools.checkpoints.fairseq_config import transformer_lm_config
from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}

_XGLM: dict[str, tuple[str, Any]] = {
    "max_target_positions": ("max_position_embeddings", 2048),
    "decoder_embed_dim": ("d_model", 1024),
    "decoder_ffn_embed_dim": ("ffn_dim", 4096),
    "decoder_layers": ("num_layers", 24),
    "decoder_attention_heads": ("attention_heads", 16),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "activation_dropout": ("activation_dropout", 0.0),
    "share_decoder_input_output_embed": ("tie_word_embeddings", True),
}
_GPT2: dict[str, tuple[str, Any]] = {
    "max_target_positions": ("n_positions", 1024),
    "decoder_embed_dim": ("n_embd", 768),
    "decoder_ffn_embed_dim": ("n_inner", None),
    "decoder_layers": ("n_layer", 12),
    "decoder_attention_heads": ("n_head", 12),
    "dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "share_decoder_input_output_embed": ("tie_word_embeddings", True),
}
"""Our option: the name and default there."""

_NEUTRAL: dict[str, dict[str, Any]] = {
    "xglm": {"add_cross_attention": False},
    "gpt2": {
        "add_cross_attention": False,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
}
"""What lmtools has in one way only."""


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        CheckpointError: it is no JSON object, or of another model than XGLM and GPT-2.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable config.json ({error})") from error
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    if model_type not in ("xglm", "gpt2"):
        raise CheckpointError(
            f"{path}: model_type is {reprlib.repr(model_type)}, lmtools loads xglm, gpt2 and transfo-xl"
        )
    assert isinstance(settings, dict)
    return settings


def config_of(settings: Mapping[str, Any], where: str) -> TransformerLMConfig:
    """The model that a config.json describes.

    Args:
        settings: from `read_config_json`.
        where: the file, for messages.

    Raises:
        CheckpointError: an option has a value of another type, or stands for what lmtools does not have.
    """
    model_type = settings["model_type"]
    for name, neutral in _NEUTRAL[model_type].items():
        if settings.get(name, neutral) != neutral:
            raise CheckpointError(f"{where}: has {name}={reprlib.repr(settings[name])}, lmtools has {neutral} only")
    activation = settings.get("activation_function", {"xglm": "gelu", "gpt2": "gelu_new"}[model_type])
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{where}: activation_function={reprlib.repr(activation)}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    table = {"xglm": _XGLM, "gpt2": _GPT2}[model_type]
    options = {ours: settings.get(theirs, default) for ours, (theirs, default) in table.items()}
    if model_type == "gpt2":
        if options["decoder_ffn_embed_dim"] is None and type(options["decoder_embed_dim"]) is int:
            options["decoder_ffn_embed_dim"] = 4 * options["decoder_embed_dim"]
        options |= {"decoder_learned_pos": True, "no_scale_embedding": True}
    else:
        options["no_scale_embedding"] = settings.get("scale_embedding", True) is False
    vocab_size = settings.get("vocab_size", {"xglm": 256_008, "gpt2": 50_257}[model_type])
    if type(vocab_size) is not int or vocab_size < 1:
        raise CheckpointError(f"{where}: has vocab_size={reprlib.repr(vocab_size)}, expected a whole number from 1")
    options |= {
        "arch": "transformer_lm",
        "activation_fn": _ACTIVATIONS[activation],
        "decoder_normalize_before": True,
    }
    return transformer_lm_config(options, vocab_size, where)
