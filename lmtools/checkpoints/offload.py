"""A model larger than memory: its blocks stay in the checkpoint's files and are read when their turn comes.

What goes in goes through one block after the other, all windows of a batch through one block before the next, so that
a batch reads each block once, however many windows it has. While a block computes, a thread reads the next one; the
weights of the one before are gone by then. Embedding, output projection and what else is outside the blocks stay in
memory. Any checkpoint works whose `read` gives slices: nothing here knows a file format.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lmtools.checkpoints.load import Checkpoint, require_transformer_lm
from lmtools.errors import ConfigError
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import Block, Extend, TransformerLM
from lmtools.parallel.parallelize import materialize, without_memory

TOKENS_AT_A_TIME = 1024
"""A block computes so many tokens together, or one window: enough for its products to run at full speed."""

BASE_BYTES = 1 << 30
"""What the program takes beside weights and activations: torch, some logits, pieces of tensors as they are read."""


def load_offloaded(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> TransformerLM:
    """A model that computes what `load_model`'s does, with its blocks left in the checkpoint's files.

    Args:
        checkpoint: from `open_checkpoint`; its files must stay as they are.
        device: where to compute.
        dtype: what parameters are converted to when they are read.
        progress: called with the number of bytes that were just checked or read.

    Returns:
        The model in eval mode, without gradients. A forward pass changes its blocks' inputs in place.

    Raises:
        CheckpointError: parts that contradict each other.
    """
    for part, path in enumerate(checkpoint.paths):
        checkpoint.verify_part(part)
        progress(path.stat().st_size)
    with without_memory():
        model = TransformerLM(require_transformer_lm(checkpoint, "its layers cannot be left in the file"))
    blocks, model.layers = model.layers, nn.ModuleList()
    materialize(model, checkpoint.read, device=device, dtype=dtype)
    model.requires_grad_(False)
    reader = _BlockReader(checkpoint, blocks, device, dtype)
    model.layers = nn.ModuleList(OffloadedBlock(block, index, reader) for index, block in enumerate(blocks))
    return model.eval()


def is_offloaded(model: TransformerLM) -> bool:
    """Whether a forward pass reads the model from disk, and so should be one of as much as fits."""
    return any(isinstance(layer, OffloadedBlock) for layer in model.layers)


def windows_together(config: TransformerLMConfig, *, memory_bytes: int, length: int, dtype: torch.dtype) -> int:
    """How many windows of `length` tokens go through the model together in so much memory.

    What is left after BASE_BYTES, the parameters outside the blocks, three blocks' (one computes, one is read, one
    piece by piece) and one window's intermediate activations, (3 E + 2 F) T s, divided by 2 E T s: a window's
    activations and, at the ends of the model, a second copy.

    Raises:
        ConfigError: not even one fits; says how much that takes.
    """
    embed_dim, ffn_dim = config.decoder_embed_dim, config.decoder_ffn_embed_dim
    with without_memory():
        model = TransformerLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    outside = total - config.decoder_layers * block
    tokens = max(length, TOKENS_AT_A_TIME)
    fixed = BASE_BYTES + (outside + 3 * block + (3 * embed_dim + 2 * ffn_dim) * tokens) * dtype.itemsize
    each = 2 * embed_dim * length * dtype.itemsize
    if fixed + each > memory_bytes:
        raise ConfigError(
            f"--offload-memory {memory_bytes / 2**30:.3g}: this model needs at least {(fixed + each) / 2**30:.2f} GiB "
            "for windows of this length; give more, shorter windows, or --dtype bfloat16"
        )
    return (memory_bytes - fixed) // each


class OffloadedBlock(nn.Module):
    """One block, without its weights."""

    def __init__(self, block: nn.Module, index: int, reader: _BlockReader) -> None:
        super().__init__()
        assert isinstance(block, Block)
        self._index = index
        self._reader = reader
        self.block = block.requires_grad_(False)

    def forward(self, x: Tensor, query_start: int = 0, extend: Extend | None = None) -> Tensor:
        """As `Block`; without a cache, `x` is overwritten."""
        weights = self._reader.take(self._index)
        if extend is not None:
            return self._compute(weights, x, query_start, extend)
        outputs = x if query_start == 0 else x.new_empty(x.shape[0], x.shape[1] - query_start, x.shape[2])
        rows = max(1, TOKENS_AT_A_TIME // x.shape[1])
        for start in range(0, len(x), rows):
            outputs[start : start + rows] = self._compute(weights, x[start : start + rows], query_start, None)
        return outputs

    def _compute(self, weights: dict[str, Tensor], x: Tensor, query_start: int, extend: Extend | None) -> Tensor:
        output: Tensor = functional_call(self.block, weights, (x,), {"query_start": query_start, "extend": extend})
        return output


class _BlockReader:
    """Reads blocks in order, round and round, each while the one before computes."""

    def __init__(self, checkpoint: Checkpoint, blocks: nn.ModuleList, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._blocks = blocks
        self._device = device
        self._dtype = dtype
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._next: tuple[int, Future[dict[str, Tensor]]] | None = None

    def take(self, index: int) -> dict[str, Tensor]:
        """The weights of a block, by their names in it."""
        if self._next is None or self._next[0] != index:
            self._prefetch(index)
        assert self._next is not None
        weights = self._next[1].result()
        self._prefetch((index + 1) % len(self._blocks))
        return weights

    def _prefetch(self, index: int) -> None:
        self._next = index, self._thread.submit(self._read, index)

    def _read(self, index: int) -> dict[str, Tensor]:
        weights = {}
        for name, parameter in self._blocks[index].named_parameters():
            whole = tuple(slice(0, length) for length in parameter.shape)
            weights[name] = self._checkpoint.read(f"layers.{index}.{name}", whole).to(self._device, self._dtype)
        return weights
