"""What a command line of fairseq-train says otherwise than one of `lmtools train`.

Options that both have keep fairseq's names. Here are the rest of those that published command lines use: other names,
options that mean something else here, options that nothing depends on here, and options that would start another run
than the one that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtools.errors import ConfigError

SPELLINGS = {
    "activation_dropout": ["--activation-dropout", "--relu-dropout"],
    "arch": ["--arch", "-a"],
    "batch_size": ["--batch-size", "--max-sentences"],
    "batch_size_valid": ["--batch-size-valid", "--max-sentences-valid"],
    "finetune_from": ["--finetune-from", "--finetune-from-model"],
    "lr": ["--lr", "--learning-rate"],
    "mp": ["--mp", "--model-parallel-size"],
    "weight_decay": ["--weight-decay", "--wd"],
}
"""fairseq's other names for an option of lmtools."""

_TRANSLATED: Mapping[str, type] = {
    "cpu": bool,
    "ddp_backend": str,
    "decoder_input_dim": int,
    "decoder_output_dim": int,
    "disable_validation": bool,
    "distributed_world_size": int,
    "no_progress_bar": bool,
}

_NEEDLESS: Mapping[str, Mapping[str, type]] = {
    "replicas are summed by lmtools itself": {
        "broadcast_buffers": bool,
        "bucket_cap_mb": int,
        "fast_stat_sync": bool,
        "find_unused_parameters": bool,
        "gradient_as_bucket_view": bool,
    },
    "workers find each other": {
        "distributed_backend": str,
        "distributed_no_spawn": bool,
        "distributed_port": int,
    },
    "data are mapped into memory, not loaded": {
        "data_buffer_size": int,
        "dataset_impl": str,
        "plasma_path": str,
        "use_plasma_view": bool,
    },
    "memory is left to PyTorch": {
        "all_gather_list_size": int,
        "empty_cache_freq": int,
        "fp16_no_flatten_grads": bool,
    },
    "checkpoints are always written in the background": {"write_checkpoints_asynchronously": bool},
    "sentences that do not fit a block are refused with what to do": {"skip_invalid_size_inputs_valid_test": bool},
    "there is one implementation of Adam": {"use_old_adam": bool},
    "validation draws nothing at random": {"fixed_validation_seed": int},
    "only the splits that --valid-subset names are validated on": {"ignore_unused_valid_subsets": bool},
}
"""Why an option changes nothing, and the options of which that is so."""

_REFUSED: Mapping[str, type] = {"distributed_init_method": str, "distributed_rank": int}
"""fairseq's way to start on several machines: without it each machine would train a model of its own."""

FOREIGN: Mapping[str, type] = {
    **_TRANSLATED,
    **{name: kind for options in _NEEDLESS.values() for name, kind in options.items()},
    **_REFUSED,
}
"""All options here, with their types; bool is a flag."""


def translate(foreign: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What fairseq's options say, in lmtools' terms.

    Args:
        foreign: those of `FOREIGN` that were given; for what depends on others see the functions below.

    Returns:
        Fields of `TrainConfig`, and for each option that changes nothing, why.

    Raises:
        ConfigError: an option that has no meaning here, and may not be ignored.
    """
    fields: dict[str, Any] = {}
    for name, value in foreign.items():
        match name, value:
            case "cpu", _:
                fields["device"] = "cpu"
            case "disable_validation", _:
                fields["valid_subset"] = ""
            case "no_progress_bar", _:
                fields["log_format"] = "simple"
            case "ddp_backend", "fully_sharded":
                fields["zero"] = 3
    for name in _REFUSED:
        if name in foreign:
            raise ConfigError(f"{_flag(name)}: start a run on several machines with torchrun, see docs/training.md")
    reasons = {name: reason for reason, options in _NEEDLESS.items() for name in options}
    return fields, [f"{_flag(name)}: ignored, {reasons[name]}" for name in foreign if name in reasons]


def require_one_width(foreign: Mapping[str, Any], embed_dim: int) -> None:
    """Refuse embeddings of another width than the model: they need projections, which lmtools does not have.

    Raises:
        ConfigError: names the option.
    """
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if foreign.get(name, embed_dim) != embed_dim:
            raise ConfigError(
                f"{_flag(name)} {foreign[name]}: is supported only if it is --decoder-embed-dim {embed_dim}"
            )


def replicas_of(world_size: int, mp: int) -> int:
    """fairseq counts all ranks, `--dp` counts replicas.

    Raises:
        ConfigError: the ranks cannot be dealt out to models of `mp`.
    """
    if world_size % mp:
        raise ConfigError(f"--distributed-world-size {world_size}: not a multiple of --mp {mp}")
    return world_size // mp


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
