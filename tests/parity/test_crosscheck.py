"""`lmtools crosscheck` with genuine fairseq: what is equal is said to be equal, and a known fault has its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def crosscheck(fairseq_python, *arguments):
    """Returns the exit code and the result."""
    command = [sys.executable, "-m", "lmtools", "crosscheck", *map(str, arguments)]
    ran = subprocess.run(
        [*command, "--json", "--fairseq-python", fairseq_python],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode in (0, 1), ran.stderr
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def test_every_stage_of_a_text_with_a_carriage_return(fairseq_python, golden, tmp_path):
    """Parts are merged, a context window is kept, and one text program of fairseq differs where it is known to."""
    (tmp_path / "text.raw").write_bytes(b" one \r two \n" + (golden / "train.txt").read_bytes())
    options = ["--raw", tmp_path / "text.raw", "--lines", 40, "--context-window", 8]
    code, result = crosscheck(fairseq_python, golden / "bin", "--path", golden / "mp4", *options)
    assert code == 0
    detok = result["stages"].pop("detok")
    assert detok["difference"] == {
        "file": "text.detok",
        "offset": 3,
        "line": 1,
        "ours": "'one two'",
        "theirs": "'one'",
    }
    assert "bare carriage return" in detok["faults"][0]
    assert [stage["difference"] for stage in result["stages"].values()] == [None, None]
    scored = result["eval"]
    assert scored["same"]
    assert scored["tokens_ours"] == scored["tokens_theirs"] == scored["num_tokens"] > 400
    assert scored["largest_nats"] < 1e-4
    assert scored["loss_base2_theirs"] == pytest.approx(scored["printed_base2"], rel=1e-6)
    assert "4 parts" in scored["faults"][0]


@pytest.mark.shared
def test_parts_with_padded_vocabulary(fairseq_python, shared_golden):
    """8 parts whose embedding has 1,024 rows for a dictionary of 1,008 types."""
    data, path = shared_golden / "bin" / "built_1k", shared_golden / "mp8"
    code, result = crosscheck(fairseq_python, data, "--path", path, "--lines", 20)
    assert (code, result["eval"]["same"]) == (0, True)
