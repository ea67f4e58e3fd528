"""In which dtype a run computes, and the loss scale that keeps float16 gradients from underflow and overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lmtools.errors import ConfigError, LmtoolsError
from lmtools.train.config import TrainConfig

SCALE_FACTOR = 2.0


def parameter_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of parameters, activations and gradients."""
    if config.fp16 or config.memory_efficient_fp16:
        return torch.float16
    if config.bf16 or config.memory_efficient_bf16:
        return torch.bfloat16
    return torch.float32


@dataclass
class LossScaler:
    """The factor on the loss: doubled after a while without overflow, halved on overflow, or always 1.

    Ask every rank to `update` with the same answer, one about the norm of all gradients, and all keep the same scale.
    The rules are fairseq's (fairseq/optim/dynamic_loss_scaler.py); it saves the scale alone and so forgets at a resume
    how far a window was, here all counters are saved.

    Attributes:
        scale: what to multiply the loss by, and to divide the gradients by.
        dynamic: whether the scale moves at all: in float16.
        window: steps without overflow after which the scale doubles.
        tolerance: share of the steps since the scale last changed that may overflow before it is halved.
        threshold: the scale is not halved below this; then overflows only skip steps, however many there are.
        floor: reaching it ends the run.
        num_steps: steps tried, skipped ones included.
        last_overflow: number of the last step that overflowed.
        last_rescale: number of the last step that changed the scale.
        num_overflows: overflows since then.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1
    tolerance: float = 0.0
    threshold: float | None = None
    floor: float = 0.0
    num_steps: int = 0
    last_overflow: int = -1
    last_rescale: int = -1
    num_overflows: int = 0

    @classmethod
    def of(cls, config: TrainConfig) -> LossScaler:
        """The scaler of a run at its first update.

        Raises:
            ConfigError: the first scale is not above the floor.
        """
        if parameter_dtype(config) != torch.float16:
            return cls()
        if config.fp16_init_scale <= config.min_loss_scale:
            floor = f"--min-loss-scale {config.min_loss_scale}"
            raise ConfigError(f"--fp16-init-scale {config.fp16_init_scale}: expected more than {floor}")
        # fairseq's default. Over many replicas it comes to 0 there, and to a division by it.
        window = config.fp16_scale_window or 2**14 // (config.dp * config.update_freq)
        return cls(
            scale=float(config.fp16_init_scale),
            dynamic=True,
            window=max(window, 1),
            tolerance=config.fp16_scale_tolerance,
            threshold=config.threshold_loss_scale,
            floor=config.min_loss_scale,
        )

    def update(self, *, overflow: bool) -> None:
        """Count a step, and set the scale of the next one.

        Args:
            overflow: the gradient norm was not finite, and the step was skipped.

        Raises:
            LmtoolsError: the scale has come down to its floor.
        """
        if not self.dynamic:
            return
        if overflow:
            self._count_overflow()
        elif (self.num_steps - self.last_overflow) % self.window == 0:
            self.scale *= SCALE_FACTOR
            self.last_rescale = self.num_steps
        self.num_steps += 1

    def _count_overflow(self) -> None:
        self.last_overflow = self.num_steps
        self.num_overflows += 1
        if self.num_overflows / (self.num_steps - self.last_rescale) < self.tolerance:
            return
        lower = max(self.scale / SCALE_FACTOR, self.threshold or 0.0)
        if lower <= self.floor:
            raise LmtoolsError(
                f"gradients overflow at loss scale {self.scale:g} and half of it is --min-loss-scale {self.floor:g} or "
                "less: the loss is probably exploding; lower --lr, set --clip-norm, make batches larger, or use --bf16"
            )
        self.scale = lower
        self.last_rescale = self.num_steps
        self.num_overflows = 0

    def state_dict(self) -> dict[str, float]:
        """What to save: plain numbers, none if the scale never moves."""
        return {name: getattr(self, name) for name in _SAVED} if self.dynamic else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what was saved; a run in another precision saved nothing, or nothing that is of use here."""
        if self.dynamic and state:
            for name in _SAVED:
                setattr(self, name, state[name])


_SAVED = ("scale", "num_steps", "last_overflow", "last_rescale", "num_overflows")
