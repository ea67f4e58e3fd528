"""Parts of a model that stock fairseq cannot build, in one file that it evaluates: to the loss that its parts gave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmtools.cli import main
from tests.parity.test_export import EVALUATE


@pytest.mark.parametrize(("source", "evaluation", "context_window"), [("mp4", "noctx", 0), ("mp2_2020", "ctx24", 24)])
def test_fairseq_evaluates_one_file_of_what_were_parts(
    fairseq_python: str,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    evaluation: str,
    context_window: int,
) -> None:
    """The last fairseq gave four parts 16 rows more than the dictionary has; they count, and dict.txt names them."""
    arguments = ["--mp", "1", "--format", "fairseq", "--dict", str(golden / "bin"), "--verify"]
    monkeypatch.setattr(sys, "argv", ["lmtools", "reshard", str(golden / source), str(tmp_path / "one"), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0

    data = tmp_path / "data"
    data.mkdir()
    for name in ("test.bin", "test.idx"):
        shutil.copy(golden / "bin" / name, data)
    shutil.copy(tmp_path / "one" / "dict.txt", data)
    options = ["--gen-subset", "test", "--tokens-per-sample", "32", "--batch-size", "8", "--cpu"]
    options += ["--context-window", str(context_window)]
    ran = subprocess.run(
        [fairseq_python, "-c", EVALUATE, str(data), "--path", str(tmp_path / "one" / "model.pt"), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    expected = json.loads((golden / source / "eval" / f"{evaluation}.json").read_text())
    result = json.loads(ran.stdout.splitlines()[-1])
    assert f"Evaluated {expected['count']:,} tokens" in ran.stderr + ran.stdout
    assert result["loss"] == pytest.approx(expected["loss_base2"], rel=1e-6)
