"""The quickstart goes the whole way from raw text to a trained model's renormalised perplexity."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import typer

from lmtools.cli import main
from lmtools.cli.quickstart import agreement, raw_lines, run_commands
from lmtools.errors import CheckpointError

TOPICS = {
    "truth": 'Truth Value Testing\n***********\n\nAny object can be tested (for truth value), e.g. in an "if".\n\n',
    "assert": "The one-line statement; it ends.\nA second line of it.\n\n\nx = y\n",
}


@pytest.fixture(autouse=True)
def topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that no version of Python changes, and that is short."""
    monkeypatch.setattr("pydoc_data.topics.topics", TOPICS)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lmtools", "quickstart", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_text_is_written_as_wikitext_writes_it():
    assert list(raw_lines()) == [
        " ",
        " = assert = ",
        " ",
        " The one @-@ line statement ; it ends . A second line of it . ",
        " x = y ",
        " ",
        " = truth = ",
        " ",
        " Truth Value Testing *********** ",
        ' Any object can be tested ( for truth value ) , e.g . in an "if" . ',
    ]


def test_a_file_in_the_folders_place_is_one_line(monkeypatch, capfd, tmp_path):
    (tmp_path / "file").touch()
    assert run(monkeypatch, str(tmp_path / "file")) == 1
    assert capfd.readouterr().err == f"lmtools: {tmp_path}/file: is a file, expected a folder\n"


@pytest.mark.slow
def test_goes_the_whole_way(monkeypatch, capfd, tmp_path):
    folder = tmp_path / "quickstart"
    (folder / "one-part").mkdir(parents=True)  # of an earlier quickstart
    assert run(monkeypatch, str(folder), "--workers", "1", "--max-update", "2") == 0
    out = capfd.readouterr().out

    shown = re.findall(r"^\$ lmtools ([a-z-]+) ", out, flags=re.MULTILINE)
    assert shown == [
        "detok",
        *["bpe-encode"] * 4,
        *["binarize"] * 2,
        "train",
        "eval",
        "reshard",
        "eval",
        "renorm-ppl",
        "generate",
        "report",
    ]
    two, one = (json.loads((folder / f"{name}.json").read_text()) for name in ("two-ranks", "one-rank"))
    assert (two["mp"], one["mp"], one["num_parts"]) == (2, 1, 1)
    assert one["loss_base2"] == pytest.approx(two["loss_base2"], rel=1e-6)
    num_tokens = len((folder / "test.bpe").read_text().split()) + len((folder / "test.bpe").read_text().splitlines())
    assert one["tokens_scored"] == num_tokens
    original = (folder / "test.raw").read_text()
    assert one["original"]["tokens"] == len(original.split()) + len(original.splitlines())
    renormalized = 2 ** (one["loss_base2"] * num_tokens / one["original"]["tokens"])
    assert f"= {renormalized:,.2f}\n" in out

    table = out.rpartition("# done in ")[2].splitlines()[1:]
    assert all((folder / line.split()[0]).is_file() for line in table)
    assert len(table) == 10


def test_losses_that_differ_are_an_error(tmp_path):
    paths = [tmp_path / name for name in ("two-ranks.json", "one-rank.json")]
    for path, loss in zip(paths, (8.0, 8.0000001), strict=True):
        path.write_text(json.dumps({"loss_base2": loss}))
    assert agreement(*paths) == "two-ranks 8.0000000 bits, one-rank 8.0000001 bits: the same to 1e-08"
    paths[1].write_text(json.dumps({"loss_base2": 8.001}))
    with pytest.raises(CheckpointError, match=r"two-ranks 8.0000000 bits, one-rank 8.0010000 bits: expected the same"):
        agreement(*paths)


def test_stops_at_the_first_command_that_fails(capfd, tmp_path):
    with pytest.raises(typer.Exit) as caught:
        run_commands("lmtools renorm-ppl --nonsense\nlmtools --version\n", tmp_path)
    assert caught.value.exit_code == 2
    assert capfd.readouterr().out == "\n$ lmtools renorm-ppl --nonsense\n"


def test_told_to_end_it_ends_its_command_first(tmp_path):
    """The command cleans up, and is gone when the quickstart is."""
    os.mkfifo(tmp_path / "a.raw")
    running = subprocess.Popen(
        [sys.executable, "-c", RUN_ONE, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with open(tmp_path / "a.raw", "wb", buffering=0) as pipe:  # as soon as the command has it open
        pipe.write(b"begun\n")
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=60)
        with pytest.raises(BrokenPipeError):
            pipe.write(b"nobody reads\n")
    assert (running.returncode, out, err) == (143, "\n$ lmtools detok a.raw b\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["a.raw"]


RUN_ONE = """
import pathlib, typer, lmtools.cli as cli
from lmtools.cli.quickstart import run_commands
run = typer.Typer()
run.command()(lambda folder: run_commands("lmtools detok a.raw b\\nlmtools --version", pathlib.Path(folder)))
cli.app = run
cli.main()
"""
