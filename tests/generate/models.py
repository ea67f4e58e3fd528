"""What the tests of this folder generate from, and the slow way to do it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.generate.decode import Limits
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.mesh import Mesh

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=CPU, device_mesh=None)
EOS = 2
NUM_TYPES = 144
ALLOWED = range(2, NUM_TYPES)  # neither <s> nor <pad>, nor the rows that fairseq added


def golden_model(name: str, mesh: Mesh = ALONE, dtype: torch.dtype = torch.float64) -> TransformerLM:
    path = {"mp4": GOLDEN / "mp4", "plain": GOLDEN / "plain" / "model.pt", "mp2_2020": GOLDEN / "mp2_2020"}[name]
    return load_model(open_checkpoint(path), mesh, dtype)


def some_prompts(count: int, longest: int = 12, seed: int = 1) -> list[list[int]]:
    choice = random.Random(seed)
    return [[EOS, *choice.choices(range(4, NUM_TYPES), k=choice.randrange(longest))] for _ in range(count)]


def limits(max_new_tokens: int = 8, max_positions: int = 32, eos_index: int = EOS) -> Limits:
    return Limits(ALLOWED, eos_index, max_new_tokens, max_positions)


def slow_log_probs(model: TransformerLM, tokens: Sequence[int]) -> Tensor:
    """`(V,)` of what comes after the tokens, all of which are read again."""
    return model(torch.tensor([tokens]))[0, -1].log_softmax(dim=-1).detach()
