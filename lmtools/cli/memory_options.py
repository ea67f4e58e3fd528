"""Options of a Transformer-XL's memory, which evaluation and generation may choose anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.errors import ConfigError

if TYPE_CHECKING:
    from lmtools.checkpoints.training_read import TrainingCheckpoint
    from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint

MemLenOption = Annotated[
    int | None,
    typer.Option(min=0, help="Transformer-XL: positions that are remembered; the checkpoint's if not given."),
]

ClampLenOption = Annotated[
    int | None, typer.Option(min=-1, help="Transformer-XL: distances above it count as it; -1 does not clamp.")
]

SameLengthOption = Annotated[
    bool | None,
    typer.Option(
        "--same-length/--no-same-length", help="Transformer-XL: each position sees exactly --mem-len positions."
    ),
]


def given_memory_options(mem_len: int | None, clamp_len: int | None, same_length: bool | None) -> dict[str, Any]:
    """The fields of the model's configuration that were given."""
    options = {"mem_len": mem_len, "clamp_len": clamp_len, "same_length": same_length}
    return {name: value for name, value in options.items() if value is not None}


def with_memory_options(
    checkpoint: TrainingCheckpoint | TransformerXLCheckpoint, options: Mapping[str, Any]
) -> TrainingCheckpoint | TransformerXLCheckpoint:
    """A checkpoint of a Transformer-XL, as one with some options changed that change no parameter.

    Raises:
        ConfigError: they contradict each other.
    """
    from lmtools.models.architectures import TransformerXLConfig

    assert isinstance(checkpoint.config, TransformerXLConfig)
    return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, **options))


def refuse_memory_options(options: Mapping[str, Any], reason: str) -> None:
    """Refuse them where no Transformer-XL is.

    Raises:
        ConfigError: names the first that was given.
    """
    for name in options:
        raise ConfigError(f"--{name.replace('_', '-')}: {reason}")
