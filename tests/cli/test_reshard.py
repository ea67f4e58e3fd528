"""`lmtools reshard` as a user types it, and the evaluation that must not change."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.cli.conftest import Lmtools
from tests.support.models import MANY_HEADS, write_random


def loss_of(lmtools: Lmtools, golden, checkpoint) -> float:
    ran = lmtools("eval", golden / "bin", "--path", checkpoint, "--tokens-per-sample", 32, "--json")
    assert ran.code == 0, ran.err
    return float(json.loads(ran.out)["loss_base2"])


@pytest.mark.parametrize("format", ["fairseq", "safetensors"])
@pytest.mark.parametrize("source", ["mp4", "mp2_2020", "plain/model.pt"])
def test_the_loss_is_equal_after_every_round_trip(lmtools, golden, tmp_path, source, format):
    expected = loss_of(lmtools, golden, golden / source)
    here = golden / source
    for num_parts in (1, 2, 4):
        ran = lmtools("reshard", here, tmp_path / str(num_parts), "--mp", num_parts, "--format", format, "--verify")
        assert ran.code == 0, ran.err
        here = tmp_path / str(num_parts)
        assert loss_of(lmtools, golden, here) == expected


def test_the_loss_is_equal_at_3_8_and_16_parts(lmtools, tmp_path, golden):
    """Of a model with the heads for it, and the rows that fairseq pads this dictionary to for 4 parts."""
    write_random(tmp_path / "source", replace(MANY_HEADS, vocab_size=160), 1)
    expected = loss_of(lmtools, golden, tmp_path / "source")
    here = tmp_path / "source"
    for num_parts in (3, 16, 8):
        for format in ("fairseq", "safetensors"):
            there = tmp_path / f"{format}{num_parts}"
            assert lmtools("reshard", here, there, "--mp", num_parts, "--format", format).code == 0
            assert loss_of(lmtools, golden, there) == expected
            here = there


@pytest.mark.slow
def test_a_set_is_evaluated_on_two_ranks(start_lmtools, golden, tmp_path, lmtools):
    assert lmtools("reshard", golden / "mp4", tmp_path / "set", "--mp", 1).code == 0
    arguments = ["eval", golden / "bin", "--path", tmp_path / "set", "--tokens-per-sample", 32, "--mp", 2, "--json"]
    process = start_lmtools(*arguments)
    out, _ = process.communicate(timeout=120)
    result = json.loads(out)
    assert result["loss_base2"] == pytest.approx(1.7122077941894531, rel=1e-5)
    assert result["checkpoint_sha256"].keys() == {"model.safetensors"}


def test_it_says_what_it_did(lmtools, golden, tmp_path):
    ran = lmtools("reshard", golden / "mp4", tmp_path / "set", "--mp", 2, "--verify")
    assert "4 parts (fairseq) -> " in ran.out
    assert "2 parts (safetensors)" in ran.out
    assert "22,272 parameters, float32" in ran.out
    assert "read again and equal" in ran.out
    assert ran.err == ""


def test_rows_that_were_added_are_reported(lmtools, tmp_path):
    write_random(tmp_path / "source", MANY_HEADS, 1)
    ran = lmtools("reshard", tmp_path / "source", tmp_path / "set", "--mp", 4, "--format", "fairseq")
    assert "3 rows of zeros added to the vocabulary of 157" in ran.out


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--mp", 3], 2, "--mp 3: does not divide the model's 4 attention heads"),
        (["--mp", 0], 2, "--mp"),
        (["--format", "onnx"], 2, "--format"),
    ],
)
def test_what_cannot_work_is_one_line(lmtools, golden, tmp_path, arguments, code, problem):
    ran = lmtools("reshard", golden / "mp4", tmp_path / "set", *arguments)
    assert ran.code == code
    assert problem in ran.err
    assert not (tmp_path / "set").exists()


def test_a_missing_part_is_named(lmtools, golden, tmp_path):
    (tmp_path / "source").mkdir()
    for part in (0, 1, 3):
        name = f"model-model_part-{part}.pt"
        (tmp_path / "source" / name).symlink_to(golden / "mp4" / name)
    ran = lmtools("reshard", tmp_path / "source", tmp_path / "set")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"lmtools: {tmp_path / 'source'}: 1 of 4 parts missing: model-model_part-2.pt",
    ]


def test_the_dictionary_goes_along_with_a_row_for_each_of_the_embedding(lmtools, golden, tmp_path):
    arguments = ["--format", "fairseq", "--dict", golden / "bin"]
    assert lmtools("reshard", golden / "mp4", tmp_path / "one", *arguments).code == 0
    own, padded = ((folder / "dict.txt").read_bytes() for folder in (golden / "bin", tmp_path / "one"))
    assert padded.startswith(own)
    assert padded.count(b"\n") == 160 - 4
    assert lmtools("reshard", tmp_path / "one", tmp_path / "set").code == 0  # found beside it
    assert (tmp_path / "set" / "dict.txt").read_bytes() == padded


def test_a_dictionary_of_another_model_is_refused(lmtools, golden, tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    ran = lmtools("reshard", golden / "mp4", tmp_path / "set", "--dict", tmp_path)
    assert ran.code == 1
    assert "has 5 types" in ran.err
    assert not (tmp_path / "set").exists()
