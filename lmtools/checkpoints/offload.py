"""A model larger than memory: its blocks stay in the checkpoint's files and are read when their turn comes.

What goes in goes through one block after the other, all rows of a batch through one block before the next: a batch of
windows, or one more token of each text of a batch, reads each block once, however many rows it has. While a block
computes, a thread reads the next one; the weights of the one before are gone by then. Embedding, output projection,
keys and values of what was read, and what else is outside the blocks stay in memory. Any checkpoint works whose `read`
gives slices: nothing here knows a file format.
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

DRAW_BYTES = 60
"""What choosing a token takes for each type of the vocabulary: logits, and copies in float64, sorted and summed."""


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
    fixed = _model_bytes(config, dtype) + _intermediate_bytes(config, max(length, TOKENS_AT_A_TIME), dtype)
    each = 2 * config.decoder_embed_dim * length * dtype.itemsize
    if fixed + each > memory_bytes:
        raise ConfigError(
            f"--offload-memory {memory_bytes / 2**30:.3g}: this model needs at least {(fixed + each) / 2**30:.2f} GiB "
            "for windows of this length; give more, shorter windows, or --dtype bfloat16"
        )
    return (memory_bytes - fixed) // each


def rows_together(
    config: TransformerLMConfig,
    *,
    memory_bytes: int,
    prompt_length: int,
    capacity: int,
    dtype: torch.dtype,
    at_least: int = 1,
) -> int:
    """How many sequences are continued together in so much memory, with a cache of all that they have read.

    What is left after BASE_BYTES, the parameters outside the blocks and three blocks', divided by what one sequence
    takes: keys and values of L layers and of one a second time while rows are selected, 2 (L + 1) E C s; while the
    prompt is read its intermediate activations, (3 E + 2 F) T s, and who may look where, T T (s + 1); and
    DRAW_BYTES V for the choice of a token.

    Args:
        config: the model.
        memory_bytes: that may be used.
        prompt_length: tokens of the longest prompt, T.
        capacity: tokens of the longest sequence, C.
        dtype: what the model computes in.
        at_least: how many are needed, as by a beam search.

    Raises:
        ConfigError: so many do not fit; says how much that takes.
    """
    fixed = _model_bytes(config, dtype)
    each = 2 * (config.decoder_layers + 1) * config.decoder_embed_dim * capacity * dtype.itemsize
    each += _intermediate_bytes(config, prompt_length, dtype) + prompt_length**2 * (dtype.itemsize + 1)
    each += DRAW_BYTES * config.vocab_size
    if fixed + at_least * each > memory_bytes:
        raise ConfigError(
            f"--offload-memory {memory_bytes / 2**30:.3g}: this model needs at least "
            f"{(fixed + at_least * each) / 2**30:.2f} GiB for {at_least} x {capacity} tokens; give more, shorter "
            "prompts, fewer --max-new-tokens, a smaller --beam, or --dtype bfloat16"
        )
    return (memory_bytes - fixed) // each


def _model_bytes(config: TransformerLMConfig, dtype: torch.dtype) -> int:
    """BASE_BYTES, what stays in memory, and three blocks: one computes, one is read, one piece by piece."""
    with without_memory():
        model = TransformerLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    return BASE_BYTES + (total - (config.decoder_layers - 3) * block) * dtype.itemsize


def _intermediate_bytes(config: TransformerLMConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """A block's activations at their most, for tokens that it computes together."""
    return (3 * config.decoder_embed_dim + 2 * config.decoder_ffn_embed_dim) * num_tokens * dtype.itemsize


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
