"""What a training run is asked to do: one flat record, its fields named as fairseq's options.

Values come from four places, each over the one before: the defaults here, the preset that `arch` names, a TOML file
(`--config`), the flags. The resolved record is in every checkpoint and in the run's `config.toml`.

No torch here: the command line reads the fields to make its options.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmtools.errors import ConfigError
from lmtools.models.architectures import ARCHITECTURES, TransformerLMConfig, TransformerXLConfig
from lmtools.train.config_checks import require_sense
from lmtools.train.config_toml import read_toml, write_toml


def option(default: Any, help_text: str) -> Any:
    """A field with the text that `lmtools train --help` shows for it."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The model's own fields are in `TransformerLMConfig` or `TransformerXLConfig`."""

    # What and where
    data: str = option("", "Folder that `lmtools binarize` made; several with colons are taken an epoch each.")
    arch: str = option("transformer_lm", f"Preset that the model's fields start from: {', '.join(ARCHITECTURES)}.")
    task: Literal["language_modeling", "truncated_bptt_lm"] = option(
        "language_modeling", "truncated_bptt_lm reads streams in order, with a memory: for --arch transformer_xl."
    )
    criterion: Literal["cross_entropy", "vocab_parallel_cross_entropy"] = option(
        "cross_entropy",
        "The loss; these two are the same here, and over several --mp ranks the logits are never gathered.",
    )
    save_dir: str = option("checkpoints", "Folder for checkpoints, metrics.jsonl and config.toml.")
    seed: int = option(1, "All randomness comes from it.")

    # Data
    train_subset: str = option("train", "Split to learn from.")
    valid_subset: str = option("valid", "Split to validate on, or several with commas.")
    tokens_per_sample: int = option(1024, "Tokens of a block.")
    sample_break_mode: Literal["none", "complete", "eos"] = option("none", "Where blocks may begin and end.")
    batch_size: int | None = option(None, "Blocks in a batch of one replica.")
    max_tokens: int | None = option(None, "Tokens in a batch of one replica, at most.")
    required_batch_size_multiple: int = option(
        8, "A batch of fewer than --batch-size blocks is cut to a multiple of this, if it has as many."
    )
    batch_size_valid: int | None = option(None, "Blocks in a validation batch; if not given, as --batch-size.")
    fairseq_compat: bool = option(
        False, "Streams as in fairseq: the first token of a chunk is not predicted, and the tail is left out."
    )
    num_workers: int = option(1, "Background threads that prepare batches; 0 prepares them in the loop.")

    # Parallelism
    mp: int = option(1, "Tensor-parallel ranks that one model is split over.")
    dp: int = option(1, "Replicas, each on other batches.")
    zero: Literal[0, 2, 3] = option(0, "0 keeps replicas whole; 2 splits gradients and optimizer state, 3 weights too.")
    sequence_parallel: bool = option(False, "Split what lies between the tensor-parallel layers over the sequence.")
    checkpoint_activations: bool = option(False, "Keep only each block's input and compute the rest again.")
    offload_activations: bool = option(
        False, "As --checkpoint-activations, and what is kept waits in the host's memory."
    )
    compile: bool = option(False, "Compile each block with torch.compile.")
    device: Literal["cpu", "cuda"] | None = option(None, "cpu or cuda; cuda where there is one, if not given.")

    # Precision
    fp16: bool = option(False, "Compute in float16 with dynamic loss scaling and float32 master weights.")
    bf16: bool = option(False, "Compute in bfloat16 with float32 master weights.")
    memory_efficient_fp16: bool = option(False, "As --fp16 without master weights.")
    memory_efficient_bf16: bool = option(False, "As --bf16 without master weights.")
    fp16_init_scale: int = option(2**7, "First loss scale.")
    fp16_scale_window: int | None = option(
        None, "Updates without overflow before the scale doubles; if not given, 2**14 batches' worth."
    )
    fp16_scale_tolerance: float = option(0.0, "Share of updates that may overflow before the scale halves.")
    min_loss_scale: float = option(1e-4, "Below this the run stops.")
    threshold_loss_scale: float | None = option(None, "The scale is not lowered below this.")

    # Optimizer
    optimizer: Literal["adam", "sgd", "adafactor"] = option("adam", "How weights follow gradients.")
    lr: float = option(0.25, "Peak learning rate.")
    adam_betas: tuple[float, float] = option((0.9, 0.999), "Adam's decay rates, as 0.9,0.98 or '(0.9, 0.98)'.")
    adam_eps: float = option(1e-8, "Adam's epsilon, added to the uncorrected root.")
    weight_decay: float = option(0.0, "Decoupled weight decay.")
    momentum: float = option(0.0, "SGD's momentum.")
    adafactor_eps: tuple[float, float] = option(
        (1e-30, 1e-3), "Adafactor: added to the squared gradient; with --scale-parameter, least size of a parameter."
    )
    clip_threshold: float = option(1.0, "Adafactor: largest root mean square of an update.")
    decay_rate: float = option(-0.8, "Adafactor: the second moment's decay at update t is 1 - t ** this.")
    beta1: float | None = option(None, "Adafactor: decay of the first moment; without it there is none.")
    scale_parameter: bool = option(False, "Adafactor: multiply the rate by the parameter's root mean square.")
    clip_norm: float = option(0.0, "Largest global gradient norm; 0 does not clip.")
    update_freq: int = option(1, "Batches of one replica in an update.")

    # Schedule
    lr_scheduler: Literal["inverse_sqrt", "cosine", "polynomial_decay", "fixed"] = option(
        "fixed", "Course of the learning rate."
    )
    warmup_updates: int = option(
        0, "Updates in which the rate rises to --lr; with inverse_sqrt 4000 if not given, as in fairseq."
    )
    warmup_init_lr: float = option(-1.0, "Rate at the start of the warm-up; -1 is the schedule's own default.")
    min_lr: float = option(0.0, "Lowest rate of --lr-scheduler cosine.")
    lr_period_updates: float = option(-1.0, "Updates in the cosine's first period; -1 is all after the warm-up.")
    t_mult: float = option(1.0, "Factor by which the cosine's periods grow.")
    lr_shrink: float = option(0.1, "Factor by which rates shrink: a period of the cosine, an epoch of fixed.")
    force_anneal: int | None = option(None, "Epoch from which the rate of --lr-scheduler fixed shrinks.")
    end_learning_rate: float = option(0.0, "Last rate of polynomial_decay.")
    power: float = option(1.0, "Exponent of polynomial_decay.")
    total_num_update: int | None = option(None, "Update at which polynomial_decay ends; --max-update if not given.")

    # How long
    max_update: int | None = option(None, "Stop after this many updates.")
    max_epoch: int | None = option(None, "Stop after this many epochs.")
    stop_time_hours: float | None = option(None, "Stop after this many hours of training, resumed ones included.")
    patience: int | None = option(None, "Stop when validation has not improved this many times in a row.")

    # Checkpoints and validation
    validate_interval: int = option(1, "Validate every so many epochs.")
    validate_interval_updates: int = option(0, "Validate every so many updates; 0 only between epochs.")
    save_interval: int = option(1, "Save every so many epochs.")
    save_interval_updates: int = option(0, "Save every so many updates; 0 only between epochs.")
    keep_interval_updates: int | None = option(
        None, "Keep the last so many of the checkpoints that --save-interval-updates makes."
    )
    keep_last_epochs: int | None = option(None, "Keep the last so many checkpoints of whole epochs.")
    keep_best_checkpoints: int | None = option(None, "Keep the best so many checkpoints.")
    no_epoch_checkpoints: bool = option(
        False, "Of the checkpoints of whole epochs keep only what checkpoint_last and checkpoint_best name."
    )
    no_save: bool = option(False, "Write no checkpoints.")
    best_checkpoint_metric: Literal["loss", "ppl"] = option("loss", "What makes a checkpoint the best one.")
    resume: Literal["auto", "never"] = option("auto", "Whether to go on from checkpoint_last, if there is one.")
    restore_file: str | None = option(None, "Checkpoint to start from, lmtools' or fairseq's.")
    finetune_from: str | None = option(None, "Checkpoint whose weights to start from, with all else new.")
    reset_optimizer: bool = option(False, "Do not load the optimizer's state.")
    reset_lr_scheduler: bool = option(False, "Count the schedule's updates from 0.")
    reset_dataloader: bool = option(False, "Start the data at the first epoch.")
    reset_meters: bool = option(False, "Forget the best validation loss and the time spent.")

    # Faults and reports
    nan: Literal["stop", "skip"] = option("stop", "What is done about a loss that is not finite.")
    restarts: int = option(0, "How often all workers are started again from the last checkpoint after a failure.")
    log_interval: int = option(10, "Updates between log lines.")
    log_format: Literal["rich", "simple", "json", "none"] = option(
        "rich", "How progress is shown on stderr; rich is one live line on a terminal, simple a line each time."
    )
    tensorboard_logdir: str | None = option(None, "Folder for TensorBoard.")


@dataclass(frozen=True)
class Run:
    """A resolved configuration: the run, and the fields of its model that do not come from the data."""

    train: TrainConfig
    model: Mapping[str, Any]


MODEL_CONFIGS = (TransformerXLConfig, TransformerLMConfig)
MODEL_FIELDS = {
    field.name: field for kind in MODEL_CONFIGS for field in dataclasses.fields(kind) if field.name != "vocab_size"
}
TRAIN_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}

_WARMUP_OF_INVERSE_SQRT = 4000
"""fairseq's default, which published command lines rely on; its other schedules have none."""

_ONE_FOR_EACH_EPOCH = ("lr", "update_freq")
"""Options of which fairseq takes a list, one value for each epoch."""

_NO_LIMIT_AT_0 = (
    "max_update",
    "max_epoch",
    "stop_time_hours",
    "patience",
    "keep_interval_updates",
    "keep_last_epochs",
    "keep_best_checkpoints",
)
"""Limits that fairseq writes as 0 or -1 where there is none."""

_LEAST = dict.fromkeys(
    (
        *("tokens_per_sample", "batch_size", "batch_size_valid", "max_tokens", "required_batch_size_multiple"),
        *("mp", "dp", "update_freq", "fp16_init_scale", "fp16_scale_window"),
        *("validate_interval", "save_interval", "log_interval", "max_target_positions"),
        *("decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_attention_heads"),
        *("n_layer", "d_model", "d_inner", "n_head", "d_head", "div_val"),
    ),
    1,
) | dict.fromkeys(
    (
        *("num_workers", "restarts", "validate_interval_updates", "save_interval_updates"),
        *("fp16_scale_tolerance", "min_loss_scale", "adam_eps", "weight_decay", "momentum", "clip_norm"),
        *("dropout", "attention_dropout", "activation_dropout", "dropatt", "mem_len", "ext_len"),
        *("init_std", "init_range", "proj_init_std", "layer_norm_epsilon"),
    ),
    0,
)
"""The least value of a number; those of the schedule are in `schedule.py`."""


def resolve(file: Path | None, flags: Mapping[str, Any]) -> Run:
    """Put a configuration together: defaults < preset < file < flags.

    Args:
        file: TOML with the fields of `TrainConfig` and of the model at its top level, or None.
        flags: the fields that were given on the command line.

    Raises:
        ConfigError: an unknown field, with the nearest one; a value of the wrong type or out of range; fields that
            contradict each other.
    """
    from_file = read_toml(file) if file is not None else {}
    hints = model_hints() | typing.get_type_hints(TrainConfig)
    given: dict[str, Any] = {}
    for name, value in {**from_file, **flags}.items():
        where = f"--{name.replace('_', '-')}" if name in flags else f"{file}: {name}"
        if name not in TRAIN_FIELDS and name not in MODEL_FIELDS:
            near = difflib.get_close_matches(name, [*TRAIN_FIELDS, *MODEL_FIELDS], n=1)
            raise ConfigError(f"{where}: unknown{f', did you mean {near[0]}?' if near else ''}")
        given[name] = _checked(name, value, hints[name], where)

    train_fields = {name: value for name, value in given.items() if name in TRAIN_FIELDS}
    if train_fields.get("lr_scheduler") == "inverse_sqrt":
        train_fields.setdefault("warmup_updates", _WARMUP_OF_INVERSE_SQRT)
    if train_fields.get("offload_activations"):
        train_fields.setdefault("checkpoint_activations", True)
    train = TrainConfig(**train_fields)
    if train.arch not in ARCHITECTURES:
        raise ConfigError(f"--arch {train.arch}: expected one of {', '.join(ARCHITECTURES)}")
    preset = ARCHITECTURES[train.arch]
    overrides = {name: value for name, value in given.items() if name in MODEL_FIELDS}
    own = {field.name for field in dataclasses.fields(preset(vocab_size=1))}
    for name in overrides:
        if name not in own:
            raise ConfigError(f"--{name.replace('_', '-')}: is no option of --arch {train.arch}")
    if "max_target_positions" in own:
        overrides.setdefault("max_target_positions", train.tokens_per_sample)
    model = dataclasses.asdict(preset(vocab_size=1, **overrides))
    del model["vocab_size"]
    require_sense(train, model)
    return Run(train, model)


def model_hints() -> dict[str, Any]:
    """The types of `MODEL_FIELDS`."""
    return {name: hint for kind in MODEL_CONFIGS for name, hint in typing.get_type_hints(kind).items()}


def _checked(name: str, value: Any, hint: Any, where: str) -> Any:
    """A field's value in the type and the range that it has."""
    from pydantic import TypeAdapter, ValidationError

    if isinstance(value, (list, tuple)):
        value = tuple(value)
        if name in _ONE_FOR_EACH_EPOCH:
            if len(value) != 1:
                raise ConfigError(f"{where}: one for each epoch is not supported, found {len(value)}; give one")
            (value,) = value
    try:
        value = TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{where}: {error.errors()[0]['msg'].lower()}, found {value!r}") from error
    if name in _NO_LIMIT_AT_0 and value is not None and value <= 0:
        return None
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{where}: expected a finite number, found {number}")
        if name in _LEAST and number is not None and number < _LEAST[name]:
            raise ConfigError(f"{where}: expected {_LEAST[name]} or more, found {number}")
    return value


def to_toml(run: Run) -> str:
    """The resolved configuration as a file that `--config` takes."""
    values = {**dataclasses.asdict(run.train), **run.model}
    return "# A run of `lmtools train`; start it again with --config.\n" + write_toml(values)
