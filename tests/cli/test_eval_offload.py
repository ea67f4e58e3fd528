"""`lmtools eval --offload`: the same scores, from a model that is never in memory as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("mp4", ["--context-window", 24]),
        ("mp2_2020", []),
        ("plain/model.pt", ["--batch-size", 7]),
    ],
)
def test_scores_are_those_of_an_ordinary_evaluation(lmtools, golden: Path, tmp_path, checkpoint, options):
    scores = {}
    for name, offload in (("whole", []), ("offloaded", ["--offload"])):
        target = tmp_path / f"{name}.npy"
        ran = lmtools(
            "eval", golden / "bin", "--path", golden / checkpoint, *options, *offload, "--scores", target, "--json"
        )
        assert (ran.code, ran.err) == (0, "")
        result = json.loads(ran.out)
        assert result["offload"] is bool(offload)
        scores[name] = np.load(target)
    np.testing.assert_allclose(scores["offloaded"], scores["whole"], rtol=0, atol=5e-6)
    assert scores["offloaded"].mean() == pytest.approx(scores["whole"].mean(), rel=1e-6)


def test_as_many_windows_as_fit_go_together(lmtools, golden: Path):
    ran = lmtools("eval", golden / "bin", "--path", golden / "mp4", "--offload", "--offload-memory", 1.01, "--json")
    few = json.loads(ran.out)["batch_size"]
    ran = lmtools("eval", golden / "bin", "--path", golden / "mp4", "--offload", "--offload-memory", 1.02, "--json")
    assert 1 < few < json.loads(ran.out)["batch_size"]


def test_too_little_memory_is_refused_before_a_weight_is_read(lmtools, golden: Path):
    ran = lmtools("eval", golden / "bin", "--path", golden / "mp4", "--offload", "--offload-memory", 0.5)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("lmtools: --offload-memory 0.5: this model needs at least 1.00 GiB")


@pytest.mark.parametrize("mesh", [["--mp", 2], ["--dp", 2]])
def test_it_is_for_one_process(lmtools, golden: Path, mesh):
    ran = lmtools("eval", golden / "bin", "--path", golden / "mp4", "--offload", *mesh)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("lmtools: --offload: is for one process, found --mp")
