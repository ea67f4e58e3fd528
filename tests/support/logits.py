"""A checkpoint's logits, on any mesh. Imports little, since every rank of a test imports it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.parallel.mesh import make_mesh


def some_tokens() -> Tensor:
    return torch.randint(4, 61, (3, 20), generator=torch.Generator().manual_seed(1))


def logits_on_a_mesh(folder: Path, tp: int) -> Tensor:
    mesh = make_mesh(torch.device("cpu"), dp=1, tp=tp)
    logits = load_model(open_checkpoint(folder), mesh, torch.float32)(some_tokens())
    return logits.full_tensor() if tp > 1 else logits
