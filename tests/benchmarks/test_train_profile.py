"""The profile of an update: every kind of work has a share, and together they are the whole."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lmtools.train.config import to_toml
from tests.support.training import tiny_run

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "train_profile.py"


def test_kinds_of_operations():
    kind_of = runpy.run_path(str(PROGRAM))["kind_of"]
    assert kind_of("aten::addmm") == "matrix products"
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu_backward") == "attention"
    assert kind_of("aten::_fused_adamw_") == "optimizer"
    assert kind_of("_c10d_functional::wait_tensor") == "communication"
    assert kind_of("update") == "python"


@pytest.mark.slow
def test_shares_of_a_tiny_run(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(tiny_run(save_dir=str(tmp_path / "run"), device="cpu")))
    command = [sys.executable, PROGRAM, tmp_path / "run.toml"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROGRAM.parents[1])
    shares = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares[kind] for kind in ("matrix products", "attention", "optimizer", "loss")) > 0
    assert shares["communication"] == 0
