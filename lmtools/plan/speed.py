"""Seconds from operations and bytes, at speeds that the user states. No device is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """How fast a device is.

    Attributes:
        flops: operations a second of one device, as its maker says.
        utilisation: share of it that a run reaches.
        link_bandwidth: bytes a second that a device can send to the others; None counts no time for it.
    """

    flops: float
    utilisation: float
    link_bandwidth: float | None


@dataclass(frozen=True)
class StepTime:
    """How long one update takes.

    Attributes:
        compute_seconds: for the operations.
        communication_seconds: for the bytes; 0 if no bandwidth was given.
    """

    compute_seconds: float
    communication_seconds: float

    @property
    def seconds(self) -> float:
        """Both, one after the other: what tensor parallelism sends, the next product waits for."""
        return self.compute_seconds + self.communication_seconds


def step_time(flops: float, sent_bytes: float, speed: Speed) -> StepTime:
    """flops / (device's flops * utilisation), and bytes / bandwidth.

    Args:
        flops: operations of one rank.
        sent_bytes: what one rank sends.
        speed: of the device and its link.
    """
    communication = sent_bytes / speed.link_bandwidth if speed.link_bandwidth else 0.0
    return StepTime(flops / (speed.flops * speed.utilisation), communication)
