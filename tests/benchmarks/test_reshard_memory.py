"""The benchmark of resharding's memory, on its smallest model: it ends with an error where a bound is passed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_reshard_stays_below_its_bound(tmp_path):
    script = REPOSITORY / "benchmarks" / "reshard_memory.py"
    command = [sys.executable, script, "--layers", "1", "--inputs", "zip", "--folder", tmp_path]
    command += ["--output", tmp_path / "table.md"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    table = (tmp_path / "table.md").read_text()
    assert ran.stdout == table + "\n"
    rows = re.findall(
        r"^\| (\w+), \d+ parts? \| 18\d \| \d+ \| (\w+), \d+ parts? \| (\d+) \| (\d+) \|", table, re.MULTILINE
    )
    assert [(container, format) for container, format, _, _ in rows] == [
        ("zip", "safetensors"),
        ("zip", "fairseq"),
    ]
    assert all(0 < int(memory) <= int(bound) for _, _, memory, bound in rows)
