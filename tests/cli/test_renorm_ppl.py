"""`lmtools renorm-ppl` as a user types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmtools.cli import main

ORIGINAL = {"path": "wiki.test.raw", "lines": 4358, "words": 241_211, "tokens": 245_569, "num_bytes": 1_290_590}
RESULT: dict[str, Any] = {
    "subset": "test",
    "loss_base2": 3.0806576633452254,
    "loss_nats": 2.1353491819239837,
    "total_nats": 578_352.9198,
    "perplexity": 8.46,
    "tokens_scored": 270_847,
    "tokens_in_split": 270_847,
    "original": ORIGINAL,
    "original_from": "manifest",
}
COUNTS = ("--new-tokens", "270847", "--orig-tokens", "245566")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def renorm_ppl(*arguments: object, command: str = "renorm-ppl") -> Ran:
        monkeypatch.setattr(sys, "argv", ["lmtools", command, *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, *capsys.readouterr())

    return renorm_ppl


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def result_file(document: Any) -> Path:
        path = tmp_path / "result.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return result_file


Write = Callable[[Any], Path]


@pytest.mark.parametrize("command", ["renorm-ppl", "renormalize-ppl"])
def test_the_published_number_with_its_formula(run: Run, command: str) -> None:
    ran = run("8.46", *COUNTS, command=command)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "2 ** (3.0807 * 270,847 / 245,566) = 10.54",
        "  loss            3.0807 bits per token = perplexity 8.46 (the perplexity given)",
        "  new tokens      270,847 (--new-tokens)",
        "  original tokens 245,566 (--orig-tokens)",
    ]


def test_the_alias_is_not_in_the_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lmtools", "--help"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "renorm-ppl" in out
    assert "renormalize-ppl" not in out


@pytest.mark.parametrize("arguments", [("8.46",), ("--loss-base2", "3.0806576633"), ("--loss-nats", "2.13534918")])
def test_every_way_to_give_a_loss_gives_the_same(run: Run, arguments: tuple[str, ...]) -> None:
    report = json.loads(run(*arguments, *COUNTS, "--json").out)
    assert report["renormalized_perplexity"] == pytest.approx(10.54006, abs=1e-5)
    assert report["formula"] == "2 ** (3.0807 * 270,847 / 245,566) = 10.54"


def test_a_result_brings_its_counts_and_says_so(run: Run, write: Write) -> None:
    path = write(RESULT)
    ran = run("--result", path)
    assert ran.out.splitlines() == [
        "test: 2 ** (3.0807 * 270,847 / 245,569) = 10.54",
        f"  loss            3.0807 bits per token = perplexity 8.46 (loss_base2 in {path})",
        f"  new tokens      270,847 (tokens_scored in {path})",
        f"  original tokens 245,569 (original.tokens of wiki.test.raw in {path}, manifest)",
    ]


def test_a_loss_is_not_rounded_on_the_way(run: Run, write: Write) -> None:
    report = json.loads(run("--result", write(RESULT | {"perplexity": 99, "loss_nats": 0}), "--json").out)
    assert report["loss_base2"] == RESULT["loss_base2"]
    assert report["renormalized_perplexity"] == 2 ** (RESULT["loss_base2"] * (270_847 / 245_569))


def test_counts_by_hand_go_before_the_results(run: Run, write: Write) -> None:
    ran = run("--result", write(RESULT), "--orig-tokens", "245566")
    assert "2 ** (3.0807 * 270,847 / 245,566) = 10.54" in ran.out
    assert "245,566 (--orig-tokens)" in ran.out
    assert "270,847 (tokens_scored in" in ran.out


def test_a_result_comes_through_a_pipe(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with write(RESULT).open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert "(tokens_scored in -)" in run("--result", "-").out


def test_several_splits_are_renormalised_each(run: Run, write: Write) -> None:
    second = RESULT | {"subset": "valid", "loss_base2": 3.5}
    path = write({"results": [RESULT, second]})
    lines = [line for line in run("--result", path).out.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0] for line in lines] == ["test", "valid"]
    reports = json.loads(run("--result", path, "--json").out)["results"]
    assert [report["loss_base2"] for report in reports] == [RESULT["loss_base2"], 3.5]
    ran = run("--result", path, "--orig-tokens", "5")
    assert ran.code == 1
    assert "holds 2 splits (test, valid)" in ran.err


def test_a_result_of_part_of_the_split_is_refused_unless_told(run: Run, write: Write) -> None:
    path = write(RESULT | {"tokens_scored": 200_000})
    ran = run("--result", path)
    assert (ran.code, ran.out) == (1, "")
    assert "only 200,000 of 270,847 tokens were scored" in ran.err
    assert "2 ** (3.0807 * 270,847 / 245,569)" in run("--result", path, "--new-tokens", "270847").out


def test_counts_that_nobody_knows_are_asked_for(run: Run, write: Write) -> None:
    ran = run("--result", write(RESULT | {"original": None}))
    assert ran.code == 1
    assert "give --orig-tokens" in ran.err
    ran = run("--result", write({"loss_base2": 3.0, "original": ORIGINAL}))
    assert ran.code == 1
    assert "give --new-tokens" in ran.err


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("", "not JSON"),
        ("\x00\x01", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([RESULT], "expected an object"),
        ({"results": []}, "expected an object"),
        ({"results": [3]}, "expected an object"),
        ({}, "loss_base2 is None"),
        (RESULT | {"loss_base2": "3.08"}, "loss_base2 is '3.08'"),
        (RESULT | {"loss_base2": True}, "loss_base2 is True"),
        (RESULT | {"loss_base2": 10**400}, "expected a plain number"),
        (RESULT | {"tokens_scored": 1.5}, "tokens_scored is 1.5"),
        (RESULT | {"tokens_scored": True}, "tokens_scored is True"),
        (RESULT | {"original": [1]}, "expected an object"),
        (RESULT | {"original": ORIGINAL | {"tokens": "many"}}, "tokens is 'many'"),
        (RESULT | {"original": ORIGINAL | {"tokens": 0}}, "0 original tokens"),
        (RESULT | {"loss_base2": float("nan")}, "loss_base2 is nan, expected a plain number"),
        (RESULT | {"loss_base2": -float("inf")}, "loss_base2 is -inf, expected a plain number"),
        (RESULT | {"loss_base2": -1}, "expected more than 0"),
        (RESULT | {"loss_base2": 2000}, "too large"),
    ],
)
def test_a_file_that_is_no_result_is_one_line(run: Run, write: Write, document: Any, why: str) -> None:
    ran = run("--result", write(document))
    assert (ran.code, ran.out) == (1, "")
    assert why in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_file_that_is_not_there_is_one_line(run: Run, tmp_path: Path) -> None:
    assert run("--result", tmp_path / "none.json") == (1, "", f"lmtools: {tmp_path / 'none.json'}: no such file\n")


@pytest.mark.parametrize("perplexity", ["0", "nan", "inf", "1"])
def test_a_perplexity_that_none_can_be_is_one_line(run: Run, perplexity: str) -> None:
    ran = run(perplexity, *COUNTS)
    assert (ran.code, ran.out) == (1, "")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("8.46",),
        ("8.46", "--new-tokens", "5"),
        ("8.46", "--loss-nats", "3", *COUNTS),
        ("--loss-base2", "3", "--result", "x.json"),
        ("many", *COUNTS),
    ],
)
def test_wrong_usage_is_told(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "renorm-ppl" in ran.err


def test_a_perplexity_of_many_digits_is_printed_short(run: Run) -> None:
    assert run("1e200", "--new-tokens", "1", "--orig-tokens", "1").out.startswith("2 ** (664.3856 * 1 / 1) = 1e+200\n")
