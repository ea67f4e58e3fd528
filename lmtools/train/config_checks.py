"""Options of a training run that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmtools.errors import ConfigError

if TYPE_CHECKING:
    from lmtools.train.config import TrainConfig

_RESETS = ("reset_optimizer", "reset_lr_scheduler", "reset_dataloader", "reset_meters")


def require_sense(train: TrainConfig, model: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other.

    Args:
        train: the run.
        model: the fields of its model's configuration.

    Raises:
        ConfigError: names the options and what to do.
    """
    if (train.fp16 or train.memory_efficient_fp16) and (train.bf16 or train.memory_efficient_bf16):
        raise ConfigError("--fp16 and --bf16, or their memory-efficient forms: give one of them")
    if train.batch_size is None and train.max_tokens is None:
        raise ConfigError("--batch-size or --max-tokens: give at least one")
    if train.max_update is None and train.max_epoch is None and train.stop_time_hours is None:
        raise ConfigError("--max-update, --max-epoch or --stop-time-hours: give at least one, or the run never ends")
    if not train.save_dir:  # a variable of the shell that is not set
        raise ConfigError("--save-dir: is empty, expected a folder; `.` is this one")
    if train.patience is not None and not train.valid_subset.strip(","):
        raise ConfigError("--patience: counts validations, and without --valid-subset there are none")
    for name in ("restore_file", "finetune_from"):
        if getattr(train, name) == "":  # a variable of the shell that is not set
            raise ConfigError(
                f"--{name.replace('_', '-')}: is empty, expected a checkpoint; leave it out to start anew"
            )
    if train.restore_file and train.finetune_from:
        raise ConfigError("--restore-file and --finetune-from: give one of them")
    resets = [name for name in _RESETS if getattr(train, name)]
    if resets and not (train.restore_file or train.finetune_from):
        raise ConfigError(
            f"--{resets[0].replace('_', '-')}: says what is not taken from the checkpoint of --restore-file, which is "
            "not given; a run goes on from its own checkpoint_last with all that it holds"
        )
    if train.offload_activations and not train.checkpoint_activations:
        raise ConfigError("--offload-activations without --checkpoint-activations: it moves what the latter keeps")
    if not all(0 <= beta < 1 for beta in train.adam_betas):
        raise ConfigError(f"--adam-betas {train.adam_betas}: expected two numbers from 0 to below 1")
    for name in ("dropout", "attention_dropout", "activation_dropout", "dropatt"):
        if model.get(name, 0) >= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {model[name]}: expected less than 1, which drops everything")
    is_transformer_xl = "d_model" in model
    if is_transformer_xl != (train.task == "truncated_bptt_lm"):
        raise ConfigError(
            f"--arch {train.arch} with --task {train.task}: --arch transformer_xl has --task truncated_bptt_lm, and "
            "all others language_modeling"
        )
    if is_transformer_xl:
        _require_sense_of_streams(train, model)
    else:
        _require_sense_of_blocks(train, model)


def _require_sense_of_blocks(train: TrainConfig, model: Mapping[str, Any]) -> None:
    heads, embed_dim = model["decoder_attention_heads"], model["decoder_embed_dim"]
    if embed_dim % heads:
        raise ConfigError(f"--decoder-attention-heads {heads}: does not divide --decoder-embed-dim {embed_dim}")
    _require_divided(train.mp, heads, model["decoder_ffn_embed_dim"])
    if train.tokens_per_sample > model["max_target_positions"]:
        raise ConfigError(
            f"--tokens-per-sample {train.tokens_per_sample}: longer than --max-target-positions "
            f"{model['max_target_positions']}"
        )
    width = -(-train.tokens_per_sample // train.mp) * train.mp
    if train.sequence_parallel and model["decoder_learned_pos"] and width > model["max_target_positions"]:
        raise ConfigError(
            f"--sequence-parallel with --decoder-learned-pos: --mp {train.mp} pads --tokens-per-sample "
            f"{train.tokens_per_sample} to {width}, more than --max-target-positions {model['max_target_positions']}; "
            "choose one that --mp divides"
        )
    if train.fairseq_compat:
        raise ConfigError("--fairseq-compat: is of --task truncated_bptt_lm")


def _require_sense_of_streams(train: TrainConfig, model: Mapping[str, Any]) -> None:
    if train.batch_size is None:
        raise ConfigError("--batch-size: give how many streams each replica reads side by side")
    refused = {
        "--max-tokens": train.max_tokens is not None,
        "--sample-break-mode": train.sample_break_mode != "none",
        "--sequence-parallel": train.sequence_parallel,
        "--compile": train.compile,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ConfigError(f"{name}: is not for --task truncated_bptt_lm")
    if train.zero and not model["untie_r"]:
        raise ConfigError("--zero with --no-untie-r: layers that share parameters are not split over replicas")
    _require_divided(train.mp, model["n_head"], model["d_inner"])


def _require_divided(mp: int, heads: int, units: int) -> None:
    both = math.gcd(heads, units)
    if both % mp:
        sizes = ", ".join(str(size) for size in range(1, both + 1) if both % size == 0)
        raise ConfigError(
            f"--mp {mp}: does not divide the model's {heads} attention heads and {units} feed-forward units; "
            f"use one of {sizes}"
        )
