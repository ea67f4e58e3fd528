"""`lmtools eval` on two machines, or what looks like it: two torchrun agents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.agents import run_on_two_agents

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", [["--mp", 2], ["--dp", 2]], ids=["one model over both", "a model on each"])
def test_two_agents_score_as_one_launcher(lmtools, golden: Path, tmp_path: Path, mesh: list[object]):
    arguments = ["eval", golden / "bin", "--path", golden / "mp4", "--batch-size", 100, "--context-window", 24, *mesh]
    arguments += ["--device", "cpu", "--json"]
    here = lmtools(*arguments)
    assert here.code == 0, here.err
    printed = run_on_two_agents(arguments, tmp_path)
    there, expected = json.loads(printed), json.loads(here.out)  # one rank speaks, so it is one object
    for result in (there, expected):
        del result["seconds"], result["tokens_per_second"]
    assert there == expected
