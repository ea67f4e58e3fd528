"""What the tests of this folder generate from, and the slow way to do it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtools.checkpoints.load import as_transformer_xl, load_model, open_checkpoint
from lmtools.checkpoints.models import Model
from lmtools.generate.decode import Limits
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import Mesh

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=CPU, device_mesh=None)
EOS = 2
NUM_TYPES = 144
ALLOWED = range(2, NUM_TYPES)  # neither <s> nor <pad>, nor the rows that fairseq added


MEMORIES: dict[str, dict[str, Any]] = {
    "txl": {"mem_len": 6},
    "txl, short": {"mem_len": 1, "clamp_len": 1},
    "txl, same length": {"mem_len": 5, "same_length": True, "clamp_len": 3},
    "txl, long": {"mem_len": 64},
}
"""The golden Transformer-XL, remembering more or less than the prompts have."""


def golden_model(name: str, mesh: Mesh = ALONE, dtype: torch.dtype = torch.float64) -> Model:
    """A model that genuine fairseq trained."""
    if name in MEMORIES:
        checkpoint = as_transformer_xl(open_checkpoint(GOLDEN / "txl" / "checkpoint_last.pt"))
        assert checkpoint is not None
        config = dataclasses.replace(checkpoint.config, **MEMORIES[name])
        return load_model(dataclasses.replace(checkpoint, config=config), mesh, dtype)
    path = {"mp4": GOLDEN / "mp4", "plain": GOLDEN / "plain" / "model.pt", "mp2_2020": GOLDEN / "mp2_2020"}[name]
    return load_model(open_checkpoint(path), mesh, dtype)


def some_prompts(count: int, longest: int = 12, seed: int = 1) -> list[list[int]]:
    choice = random.Random(seed)
    return [[EOS, *choice.choices(range(4, NUM_TYPES), k=choice.randrange(longest))] for _ in range(count)]


def limits(max_new_tokens: int = 8, max_positions: int = 32, eos_index: int = EOS) -> Limits:
    return Limits(ALLOWED, eos_index, max_new_tokens, max_positions)


def slow_log_probs(model: Model, tokens: Sequence[int]) -> Tensor:
    """`(V,)` of what comes after the tokens, all of which are read again.

    A Transformer-XL reads them one by one, and each layer remembers its own inputs: the definition of its memory.
    """
    if isinstance(model, TransformerXL):
        memories = None
        for token in tokens:
            features, memories = model.features(torch.tensor([[token]]), memories)
        return model.adaptive_softmax.log_probs(features[0, -1]).detach()
    return model(torch.tensor([tokens]))[0, -1].log_softmax(dim=-1).detach()
