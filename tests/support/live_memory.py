"""Counts the bytes of tensors that are alive, on any device, as operations make them and as they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within it, `now` and `peak` are the bytes of storages that operations made and that are still there.

    What operations inside DTensor's own make is not seen.
    """

    def __init__(self, *, except_for: Iterable[Tensor] = ()) -> None:
        """Count nothing for the storages of these tensors."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self._bytes = {tensor.untyped_storage()._cdata: 0 for tensor in except_for}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if type(tensor) in (Tensor, torch.nn.Parameter):
                self._count(tensor.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._bytes.pop(key)
