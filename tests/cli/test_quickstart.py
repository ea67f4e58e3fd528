"""The quickstart is the main job: a fresh clone's raw text goes all the way to a renormalised perplexity."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import typer

from lmtools.checkpoints.fairseq import open_fairseq
from lmtools.cli import main
from lmtools.cli.quickstart import raw_lines, run_commands, write_model

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


def test_runs_the_main_job(monkeypatch, capfd, tmp_path):
    folder = tmp_path / "quickstart"
    assert run(monkeypatch, str(folder), "--workers", "1") == 0
    out = capfd.readouterr().out

    shown = re.findall(r"^\$ lmtools ([a-z-]+) ", out, flags=re.MULTILINE)
    assert shown == ["detok", "bpe-encode", "binarize", "binarize", "eval", "renorm-ppl"]

    result = json.loads((folder / "result.json").read_text())
    original = (folder / "topics.raw").read_text()
    num_tokens = len((folder / "topics.bpe").read_text().split()) + len(
        (folder / "topics.bpe").read_text().splitlines()
    )
    assert result["tokens_scored"] == num_tokens
    assert result["original"]["tokens"] == len(original.split()) + len(original.splitlines())
    assert (result["mp"], result["num_parts"]) == (2, 2)

    renormalized = 2 ** (result["loss_base2"] * num_tokens / result["original"]["tokens"])
    assert f"= {renormalized:,.2f}\n" in out

    table = out.rpartition("# done in ")[2].splitlines()[1:]
    listed = {Path(line.split()[0]) for line in table}
    made = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    extras = {path for path in made if path.name.endswith(".meta.json")} | {Path("topics-bin/dict.txt")}
    assert listed == made - extras


def test_model_is_written_over_that_of_an_earlier_quickstart(tmp_path):
    for num_types in (4, 12):
        (tmp_path / "dict.txt").write_text("".join(f"{index} 1\n" for index in range(num_types)))
        write_model(tmp_path)
        assert open_fairseq(tmp_path / "model").config.vocab_size == num_types + 4


def test_stops_at_the_first_command_that_fails(capfd, tmp_path):
    with pytest.raises(typer.Exit) as caught:
        run_commands("lmtools renorm-ppl --nonsense\nlmtools --version\n", tmp_path)
    assert caught.value.exit_code == 2
    assert capfd.readouterr().out == "\n$ lmtools renorm-ppl --nonsense\n"
