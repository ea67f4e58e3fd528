"""The programs of the rehearsal at full size, on a model of the same make that is small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.unpickle import read_torch_file

REPOSITORY = Path(__file__).parents[2]


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, REPOSITORY / "benchmarks" / program, *map(str, arguments)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.slow
def test_writes_eight_legacy_parts_and_scores_windows_from_them(tmp_path):
    folder = tmp_path / "megatron"
    small = ["--layers", 2, "--embed-dim", 64, "--ffn-dim", 128, "--vocab-size", 160]
    assert run("write_megatron_11b.py", folder, *small).startswith("8 parts, ")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.num_parts, checkpoint.config.decoder_layers) == (8, 2)
    assert {read_torch_file(path).format for path in checkpoint.paths} == {"legacy"}

    report = run("offload_11b.py", folder, "--windows", 3, "--length", 32, "--offload-memory", 1.1)
    assert "| windows of 32 tokens together | 3 |" in report
    loss = re.search(r"loss of random tokens \| ([\d.]+) bits", report)
    assert loss is not None
    assert 6.5 < float(loss[1]) < 9  # 160 types are 7.3 bits
