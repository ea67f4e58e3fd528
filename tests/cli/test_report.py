"""`lmtools report` as a user types it."""

from __future__ import annotations

import builtins
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support.results import write_data, write_metrics, write_result

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path):
    write_result(tmp_path / "result.json", write_data(tmp_path), tmp_path / "scores.npy")
    write_metrics(tmp_path / "run", losses=[9, 8, 7.5, 7], valid={2: 8.5, 4: 7.25})
    return tmp_path


def test_a_page_of_a_run_and_a_result(lmtools, folder):
    ran = lmtools("report", folder / "run", folder / "result.json", "-o", folder / "page.html")
    assert (ran.code, ran.err) == (0, "")
    perplexity, wrote = ran.out.splitlines()
    assert perplexity.startswith("result: perplexity ")
    assert perplexity.endswith(" over 400 tokens")
    assert wrote == f"wrote {folder / 'page.html'}"
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_charts_as_pictures_too(lmtools, folder):
    options = ["-o", folder / "page.html", "--png", folder / "new" / "png", "--json"]
    ran = lmtools("report", folder / "run", folder / "result.json", *options)
    summary = json.loads(ran.out)
    names = ["training", "speed", "position", "frequency"]
    assert summary["png"] == [str(folder / "new" / "png" / f"{name}.png") for name in names]
    assert all((folder / "new" / "png" / f"{name}.png").read_bytes().startswith(PNG) for name in names)
    assert (summary["runs"], summary["missing"]) == (["run"], [])
    [result] = summary["results"]
    assert (result["tokens_scored"], result["has_breakdown"]) == (400, True)


def test_what_is_missing_is_said(lmtools, folder):
    (folder / "scores.npy").unlink()
    ran = lmtools("report", folder / "result.json", "-o", folder / "page.html")
    assert ran.code == 0
    assert "not shown: result: the tokens' scores are not at" in ran.out


def test_it_shows_what_eval_wrote(lmtools, golden, tmp_path):
    """From a genuine model to the page; the result remembers where its scores are."""
    arguments = [golden / "bin", "--path", golden / "mp4", "--context-window", 24, "--batch-size", 100]
    scores = tmp_path / "scores.npy"
    ran = lmtools("eval", *arguments, "--output", tmp_path / "result.json", "--scores", scores)
    assert ran.code == 0
    ran = lmtools("report", tmp_path / "result.json", "-o", tmp_path / "page.html", "--json")
    [result] = json.loads(ran.out)["results"]
    assert result["has_breakdown"]
    assert "Loss by position in the window" in (tmp_path / "page.html").read_text()


# --- faults: one line, and no page ---


def refused(lmtools, folder, *arguments, code=1):
    ran = lmtools("report", *arguments, "-o", folder / "page.html")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("lmtools: ")
    assert ran.err.count("\n") == 1
    assert not (folder / "page.html").exists()
    return ran.err


def test_scores_of_another_evaluation(lmtools, folder):
    np.save(folder / "scores.npy", np.zeros(400, dtype=np.float32))
    assert "scores.npy: has sha256" in refused(lmtools, folder, folder / "result.json")


def test_data_that_was_made_again(lmtools, folder):
    shutil.rmtree(folder / "bin")
    write_data(folder / "again", sentences=[[4, 2]] * 200)
    (folder / "again" / "bin").rename(folder / "bin")
    assert "bin: test.bin has sha256" in refused(lmtools, folder, folder / "result.json")


def test_what_is_no_run_and_no_result(lmtools, folder):
    assert "no such file" in refused(lmtools, folder, folder / "nowhere.json")
    assert "metrics.jsonl: no such file" in refused(lmtools, folder, folder / "bin")
    assert "not JSON" in refused(lmtools, folder, folder / "bin" / "dict.txt")
    assert "--scores" in refused(lmtools, folder, folder / "run", "--scores", folder / "scores.npy")
    assert "named twice" in refused(lmtools, folder, folder / "run", folder / "bin" / ".." / "run", code=2)
    assert "named twice" in refused(lmtools, folder, folder / "run", folder / "run" / "metrics.jsonl", code=2)
    assert "--manifests" in refused(lmtools, folder, folder / "run", "--manifests", folder / "nowhere", code=2)
    assert lmtools("report").code == 2


def test_where_it_cannot_be_written(lmtools, folder):
    ran = lmtools("report", folder / "run", "-o", folder / "nowhere" / "page.html")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "does not exist" in ran.err
    ran = lmtools("report", folder / "run", "-o", "-")
    assert (ran.code, ran.out) == (2, "")
    ran = lmtools("report", folder / "run", "-o", folder / "page.html", "--png", folder / "result.json")
    assert (ran.code, ran.err) == (2, f"lmtools: --png {folder / 'result.json'}: is a file, expected a folder\n")


def test_without_matplotlib_there_is_the_page(lmtools, folder, monkeypatch):
    genuine = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return genuine(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'lmtools[plot]'" in refused(lmtools, folder, folder / "run", "--png", folder / "png")
    assert lmtools("report", folder / "run", "-o", folder / "page.html").code == 0


def test_a_page_needs_no_torch(folder):
    script = (
        "import sys; from lmtools.report.content import collect; from lmtools.report.page import render; "
        "from pathlib import Path; render('x', collect([Path(sys.argv[1])])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, folder / "result.json"], check=False).returncode == 0
