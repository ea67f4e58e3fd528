"""From the options that a fairseq checkpoint carries to a model configuration.

Two generations: until 2020 a checkpoint has `args`, one flat Namespace; since then `cfg`, sections of which `model`
and `task` matter here (for model-parallel architectures `cfg["model"]` is itself the old flat Namespace).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig

Settings = Mapping[str, Any]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Options that change the model in ways lmtools does not have, with the values that leave it as it is.
    "adaptive_input": (False,),
    "adaptive_softmax_cutoff": (None,),
    "alibi": (False,),
    "base_layers": (0,),
    "character_embeddings": (False,),
    "decoder_layers_to_keep": (None, ""),
    "decoder_xformers_att_config": (None,),
    "scale_attn": (False,),
    "scale_fc": (False,),
    "scale_heads": (False,),
    "scale_resids": (False,),
    "use_stable_embedding": (False,),
}

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_accurate", "gelu_fast": "gelu_accurate"}


def model_settings(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The flat model options of a checkpoint's content, whichever generation wrote it.

    Args:
        content: the checkpoint, its records already turned into plain dicts.
        where: the file, for messages.

    Raises:
        CheckpointError: neither generation's options are there.
    """
    args, cfg = content.get("args"), content.get("cfg")
    if isinstance(args, Mapping):
        return dict(args)
    if isinstance(cfg, Mapping) and isinstance(cfg.get("model"), Mapping):
        settings = dict(cfg["model"])
        settings.setdefault("arch", settings.get("_name"))
        task = cfg.get("task")
        if isinstance(task, Mapping):
            # What the model section leaves open (None), fairseq fills from the task.
            for key in ("tokens_per_sample", "max_target_positions"):
                if settings.get(key) is None:
                    settings[key] = task.get(key)
        common = cfg.get("common")
        if isinstance(common, Mapping):
            settings.setdefault("model_parallel_size", common.get("model_parallel_size", 1))
        return settings
    raise CheckpointError(f"{where}: holds neither `args` nor `cfg`, expected a fairseq training checkpoint")


def require_transformer_lm(settings: Settings, where: str) -> None:
    """Refuse another kind of model.

    Args:
        settings: from `model_settings`.
        where: the file, for messages.

    Raises:
        CheckpointError: names the architecture.
    """
    arch = settings.get("arch")
    if not (isinstance(arch, str) and arch.startswith(("transformer_lm", "model_parallel_transformer_lm"))):
        raise CheckpointError(f"{where}: architecture {_short(arch)}, expected a fairseq transformer_lm")


def transformer_lm_config(settings: Settings, vocab_size: int, where: str) -> TransformerLMConfig:
    """The configuration of a fairseq `transformer_lm` of any preset, plain or model-parallel.

    Args:
        settings: from `model_settings`.
        vocab_size: rows of the embedding that the checkpoint holds; its options do not say.
        where: the file, for messages.

    Raises:
        CheckpointError: an option that no such model has, or a feature that lmtools does not have.
    """
    require_transformer_lm(settings, where)
    for name, neutral in _NEUTRAL.items():
        if name in settings and settings[name] not in neutral:
            raise CheckpointError(f"{where}: has {name}={_short(settings[name])}, which lmtools does not support")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if settings.get(name) not in (None, settings.get("decoder_embed_dim")):
            raise CheckpointError(
                f"{where}: {name}={_short(settings[name])} differs from "
                f"decoder_embed_dim={_short(settings.get('decoder_embed_dim'))}, which lmtools does not support"
            )
    activation = settings.get("activation_fn", "relu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(f"{where}: activation_fn={_short(activation)}, expected one of {', '.join(_ACTIVATIONS)}")

    values = {field.name: settings[field.name] for field in fields(TransformerLMConfig) if field.name in settings}
    values |= {"vocab_size": vocab_size, "activation_fn": _ACTIVATIONS[activation]}
    values["max_target_positions"] = settings.get("max_target_positions") or settings.get("tokens_per_sample")
    if settings.get("relu_dropout") and not values.get("activation_dropout"):
        values["activation_dropout"] = settings["relu_dropout"]  # the option's name before 2019
    if values["max_target_positions"] is None:
        raise CheckpointError(f"{where}: says neither max_target_positions nor tokens_per_sample")
    values = {name: value for name, value in values.items() if value is not None}
    _require_types(values, where)
    config = TransformerLMConfig(**values)
    if config.decoder_embed_dim % config.decoder_attention_heads:
        raise CheckpointError(
            f"{where}: {config.decoder_attention_heads} heads do not divide decoder_embed_dim "
            f"{config.decoder_embed_dim}"
        )
    return config


def _require_types(values: Settings, where: str) -> None:
    """A checkpoint's options are whatever its file says, until here."""
    kinds = {field.name: field.type for field in fields(TransformerLMConfig)}
    for name, value in values.items():
        match kinds[name]:
            case "int":
                fits, expected = type(value) is int and 1 <= value < 1 << 31, "a whole number from 1"
            case "float":
                fits, expected = type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"
            case "bool":
                fits, expected = type(value) is bool, "True or False"
            case _:
                continue
        if not fits:
            raise CheckpointError(f"{where}: has {name}={_short(value)}, expected {expected}")


def _short(value: Any) -> str:
    """A value for a message, however large it is."""
    return reprlib.repr(value)
