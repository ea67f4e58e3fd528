"""What a checkpoint and the run that starts from it must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtools.checkpoints.training_index import tensor_shapes
from lmtools.errors import CheckpointError
from lmtools.train.config import TrainConfig

_OF_STREAMS = ("tokens_per_sample", "fairseq_compat")

_OF_BATCHES = (
    *("train_subset", "tokens_per_sample", "sample_break_mode", "seed"),
    *("batch_size", "max_tokens", "required_batch_size_multiple"),
)

_FREE = frozenset(
    ("dropatt", "init", "init_std", "init_range", "proj_init_std", "mem_len", "clamp_len", "same_length", "ext_len")
)
"""What changes no parameter and may be another in each run."""


def require_same_model(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The same parameters, and the same function of them; what is dropped in training or remembered may differ.

    Raises:
        CheckpointError: names the option that differs.
    """
    if saved.keys() != {*wanted, "vocab_size"}:
        raise CheckpointError(f"{path}: holds a model of another kind than this run's --arch")
    for name, value in wanted.items():
        is_free = "dropout" in name or name in _FREE
        if name == "max_target_positions":
            is_free = not wanted["decoder_learned_pos"]
        found = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
        if found != value and not is_free:
            option = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{path}: {option} is {found!r} in the checkpoint, {value!r} in this run")


def require_same_streams(path: Path, saved: Mapping[str, Any], config: TrainConfig) -> None:
    """Within an epoch, truncated BPTT goes on with the rows that it began with; replicas may divide them otherwise.

    Raises:
        CheckpointError: names the option that differs.
    """
    if config.task != "truncated_bptt_lm":
        return
    rows, saved_rows = (run["batch_size"] * run["dp"] for run in (vars(config), saved))
    found = {"--batch-size x --dp": saved_rows} | {name: saved[name] for name in _OF_STREAMS}
    wanted = {"--batch-size x --dp": rows} | {name: getattr(config, name) for name in _OF_STREAMS}
    for name, value in wanted.items():
        if found[name] != value:
            option = name if name.startswith("--") else f"--{name.replace('_', '-')}"
            raise CheckpointError(
                f"{path}: is within an epoch of {option} {found[name]}, this run has {value}; go on with the same, or "
                "start from it with --restore-file, --reset-dataloader and --resume never"
            )


def of_other_batches(saved: Mapping[str, Any], config: TrainConfig) -> str:
    """What is to be said where a run goes on within an epoch whose batches are not those that were counted.

    Args:
        saved: the fields of the run that counted them.
        config: the run that goes on.

    Returns:
        Words to follow the checkpoint's name, or none.
    """
    changed = [name for name in _OF_BATCHES if name in saved and saved[name] != getattr(config, name)]
    if not changed or config.task == "truncated_bptt_lm":
        return ""
    options = ", ".join(f"--{name.replace('_', '-')} {saved[name]}" for name in changed)
    return f", which is within an epoch of {options}: some of its blocks are read twice or left out"


def require_same_optimizer(path: Path, saved: str, wanted: str) -> None:
    """What one optimizer has saved means nothing to another.

    Raises:
        CheckpointError: names both, and what to do.
    """
    if saved != wanted:
        raise CheckpointError(
            f"{path}: --optimizer is {saved} in the checkpoint, {wanted} in this run; "
            "start from its weights with --restore-file, --reset-optimizer and --resume never"
        )


def require_all_tensors(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Every tensor that this run has.

    Raises:
        CheckpointError: names one that is missing, and what to do.
    """
    saved = tensor_shapes(path)
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            f"{path}: has no {missing[0]}: it was trained with another optimizer or precision; "
            "start from its weights with --restore-file, --reset-optimizer and --resume never"
        )
