"""Which commands keep the memory that they free: those that compute again and again, from when the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TRAIN = "train {golden}/bin --arch transformer_lm --decoder-layers 1 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8"
EVAL = "eval {golden}/bin --path {golden}/mp4"


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (f"{TRAIN} --tokens-per-sample 8 --batch-size 1 --max-update 1 --save-dir {{tmp}}", True),
        (EVAL, True),
        (f"{EVAL} --offload", False),
        ("eval {golden}/bin --path {golden}/txl/checkpoint_last.pt --task truncated_bptt_lm", True),
    ],
    ids=["train", "eval", "eval offload", "eval streams"],
)
def test_commands_that_tune_cpu_memory(lmtools, golden: Path, tmp_path: Path, monkeypatch, command: str, kept: bool):
    devices: list[torch.device] = []
    monkeypatch.setattr("lmtools.parallel.allocator.tune_cpu_memory", devices.append)
    ran = lmtools(*command.format(golden=golden, tmp=tmp_path).split(), *["--device", "cpu"])
    assert ran.code == 0, ran.err
    assert devices == [torch.device("cpu")] * kept
