"""Dropout streams over the ranks, without any state to keep.

Activations that every tp rank holds whole must lose the same elements on every rank; activations of which each rank
holds its own part (attention heads, the feed-forward's hidden units) must not repeat one rank's mask on the others. And
a run that is resumed, here or on another mesh of the same dp, must draw what it would have drawn.

So nothing is carried on: before each batch the generator is seeded from (run seed, place in the data,
dp_rank), the same on all tp ranks. A module whose activations are split draws one number from that stream, and from the
number and its tp_rank a stream of its own for as long as it runs. Recomputing a block under activation checkpointing
replays the shared stream, and so the module's own too.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from lmtools.parallel.plans import ModulePatterns, matches_any


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed from anything that names a stream; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_batch(device: torch.device, *, seed: int, place: str, batch: int, dp_rank: int) -> None:
    """Seed the device's default generator for one batch. Call it on every rank before the batch's forward pass."""
    _default_generator(device).manual_seed(stream_seed("batch", seed, place, batch, dp_rank))


def split_dropout(model: nn.Module, patterns: ModulePatterns, *, tp_rank: int, device: torch.device) -> None:
    """Give the modules whose activations are split over the tp ranks a stream of their own, in place.

    Args:
        model: any module.
        patterns: names of these modules, as in fnmatch.
        tp_rank: this rank.
        device: where the model computes.
    """
    for name, module in model.named_modules():
        if matches_any(name, patterns):
            stream = _OwnStream(tp_rank, _default_generator(device))
            # torch.compile cannot trace a generator: told so, it compiles what lies between without a warning.
            enter, leave = map(torch.compiler.disable, (stream.enter, stream.leave))
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)


class _OwnStream:
    """Swaps the generator's state around one module's forward."""

    def __init__(self, tp_rank: int, generator: torch.Generator) -> None:
        self._tp_rank = tp_rank
        self._generator = generator
        self._shared: Tensor | None = None

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        if not module.training:
            return
        draw = torch.randint(2**62, (), generator=self._generator, device=self._generator.device)
        self._shared = self._generator.get_state()
        self._generator.manual_seed(stream_seed("split", int(draw), self._tp_rank))

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._shared is not None:
            self._generator.set_state(self._shared)
            self._shared = None


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
