"""`lmtools plot`: curves on the terminal, or as a picture."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from lmtools.cli import main

PNG_SIZE = slice(16, 24)


def metrics(folder: Path, *, losses: list[float], valid: dict[int, float]) -> Path:
    folder.mkdir()
    lines = []
    for number, loss in enumerate(losses, start=1):
        common = {"num_updates": number, "seconds": number * 60.0}
        lines.append({"kind": "update", "loss_base2": loss, "num_tokens": 1000, "skipped": None, **common})
        if number in valid:
            lines.append({"kind": "valid", "subset": "valid", "loss_base2": valid[number], "num_tokens": 9, **common})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """300 updates; the validation is best in the middle."""
    losses = [10 - 5 * (n / 300) ** 0.5 for n in range(1, 301)]
    return metrics(tmp_path / "one", losses=losses, valid={100: 7.5, 200: 6.25, 300: 6.5})


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return metrics(tmp_path / "two", losses=[9.0, 8.0, 7.0], valid={3: 7.0})


def plot(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["lmtools", "plot", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("in_80_columns")
def test_a_run_on_a_terminal_of_80_by_24(monkeypatch, capsys, run):
    assert plot(monkeypatch, run) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) <= 23, "the prompt stays below it"
    assert max(map(len, rows)) < 80
    assert rows[0].strip() == "loss, bits per token"
    assert rows[-3].endswith("updates")
    assert sum("★" in row for row in rows[:-2]) == 1
    assert sum(row.count("●") for row in rows[:-2]) == 2
    assert rows[-2] == "one  300 updates, 300,000 tokens, 5.0 h"
    assert rows[-1] == "  ⠤⠤ train 5.004   ● valid 6.500   ★ best 6.250 at update 200"
    assert "\x1b" not in "".join(rows), "no colours where no terminal is"


@pytest.mark.usefixtures("in_80_columns")
def test_several_runs_have_letters_where_they_end(monkeypatch, capsys, run, other):
    assert plot(monkeypatch, run, other, "--x", "seconds", "--y", "ppl") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].strip() == "perplexity per token"
    assert rows[-5].endswith("hours")
    assert sum(row.count("a") for row in rows[1:-5]) == 1
    assert sum(row.count("b") for row in rows[1:-5]) <= 1, "a mark may cover it"
    assert rows[-4].startswith("a one  ")
    assert rows[-2] == "b two  3 updates, 3,000 tokens, 3.0 min"
    assert rows[-1] == "  ⠤⠤ train 128.00   ● valid 128.00   ★ best 128.00 at update 3"


@pytest.mark.parametrize(("columns", "lines"), [(20, 5), (40, 12), (500, 200)])
def test_any_terminal_will_do(monkeypatch, capsys, run, columns, lines):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    assert plot(monkeypatch, run) == 0
    rows = capsys.readouterr().out.splitlines()
    assert max(len(row) for row in rows[:-2]) == min(max(columns, 40), 160) - 1
    assert "★" in "".join(rows[:-2])


@pytest.mark.usefixtures("in_80_columns")
def test_colours_are_for_terminals(monkeypatch, capsys, run):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert plot(monkeypatch, run) == 0
    out = capsys.readouterr().out
    assert "\x1b[36m" in out
    assert "one  300 updates" in re.sub(r"\x1b\[[0-9;]*m", "", out)


@pytest.mark.usefixtures("in_80_columns")
def test_a_terminal_that_knows_ascii_only(monkeypatch, run):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert plot(monkeypatch, run) == 0
    out = stdout.buffer.getvalue().decode("ascii")
    assert "  .. train 5.004   o valid 6.500   * best 6.250 at update 200" in out


@pytest.mark.usefixtures("in_80_columns")
def test_smoothing_and_scales_are_options(monkeypatch, capsys, run):
    assert plot(monkeypatch, run, "--smooth", "1", "--log-x", "--log-y", "--x", "tokens") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1].startswith("  ⠤⠤ train 5.000 ")
    assert re.search(r"\b1,000\b.*\b10k\b.*\b100k\b.*tokens$", rows[-3])


@pytest.mark.usefixtures("in_80_columns")
def test_perplexity_has_a_logarithmic_axis_unless_told_otherwise(monkeypatch, capsys, run):
    drawn = []
    for options in ([], ["--log-y"], ["--no-log-y"]):
        assert plot(monkeypatch, run, "--y", "ppl", *options) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_json_is_where_each_run_stands(monkeypatch, capsys, run, other):
    assert plot(monkeypatch, run, other, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["best"] == {"subset": "valid", "num_updates": 200, "loss_base2": 6.25}
    assert first["valid_loss_base2"] == {"valid": 6.5}
    assert (second["num_updates"], second["num_tokens"], second["seconds"]) == (3, 3000, 180.0)
    assert second["train_loss_base2"] == 7.0


@pytest.mark.parametrize(
    "options",
    [[], ["--y", "ppl", "--x", "seconds"], ["--log-x", "--log-y"], ["--y", "ppl", "--no-log-y", "--smooth", "1"]],
)
def test_a_png(monkeypatch, capsys, tmp_path, run, other, options):
    assert plot(monkeypatch, run, other, "-o", tmp_path / "curves.png", *options) == 0
    image = (tmp_path / "curves.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n")
    assert image[PNG_SIZE] == (1440).to_bytes(4, "big") + (864).to_bytes(4, "big")
    assert len(image) > 20_000
    assert capsys.readouterr().out.splitlines()[0].startswith("one  300 updates"), "the numbers, no second chart"


def test_an_svg_says_what_is_what(monkeypatch, tmp_path, run, other):
    """matplotlib writes each text as a comment too, beside its outlines."""
    assert plot(monkeypatch, run, other, "-o", tmp_path / "curves.SVG", "--x", "tokens") == 0
    texts = re.findall(r"<!-- (.*) -->", (tmp_path / "curves.SVG").read_text())
    assert {"tokens", "loss, bits per token", "100k"} <= set(texts)
    assert "one: train, mean of 3 updates" in texts
    assert {"one: best valid, 6.25 at update 200", "two: best valid, 7 at update 3"} <= set(texts)


def test_an_svg_in_hours(monkeypatch, tmp_path, run):
    assert plot(monkeypatch, run, "-o", tmp_path / "curves.svg", "--x", "seconds") == 0
    texts = re.findall(r"<!-- (.*) -->", (tmp_path / "curves.svg").read_text())
    assert {"hours", "1", "5"} <= set(texts), "300 updates of a minute"
    assert not any(text.endswith("k") for text in texts)


@pytest.mark.slow
def test_a_pdf(monkeypatch, tmp_path, run):
    assert plot(monkeypatch, run, "-o", tmp_path / "curves.pdf") == 0
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_a_picture_needs_matplotlib_and_says_so(monkeypatch, capsys, tmp_path, run):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot(monkeypatch, run, "-o", tmp_path / "curves.png") == 1
    assert "pip install 'lmtools[plot]'; without --output the curves are text\n" in capsys.readouterr().err
    assert plot(monkeypatch, run) == 0


@pytest.mark.parametrize("name", ["curves", "curves.gif", "curves.jsonl"])
def test_another_kind_of_file_is_refused(monkeypatch, capsys, tmp_path, run, name):
    assert plot(monkeypatch, run, "-o", tmp_path / name) == 2
    assert capsys.readouterr().err == "lmtools: --output: expected a name that ends in .png, .pdf, .svg\n"
    assert not (tmp_path / name).exists()


def test_a_folder_without_metrics_is_one_line(monkeypatch, capsys, tmp_path):
    assert plot(monkeypatch, tmp_path) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("metrics.jsonl: no such file; expected the --save-dir of a run, or its metrics.jsonl")
