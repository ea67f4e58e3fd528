"""`lmtools eval --task truncated_bptt_lm` as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def txl(golden: Path) -> list[object]:
    command = ["eval", golden / "bin", "--path", golden / "txl" / "checkpoint_last.pt"]
    return [*command, "--task", "truncated_bptt_lm", "--device", "cpu"]


def test_the_result_says_which_rule_was_used_and_how_many_tokens(lmtools, txl, golden, tmp_path):
    ran = lmtools(*txl, "--fairseq-compat", "--json", "--output", tmp_path / "r.json", "--scores", tmp_path / "s.npy")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result == json.loads((tmp_path / "r.json").read_text())
    published = json.loads((golden / "txl" / "eval" / "mem16_t16.json").read_text())
    assert result["loss_base2"] == pytest.approx(published["loss_base2"], rel=1e-5)
    assert (result["task"], result["counting"]) == ("truncated_bptt_lm", "fairseq")
    assert (result["tokens_scored"], result["tokens_in_split"], result["tokens_skipped"]) == (4860, 5184, 324)
    assert (result["tokens_per_sample"], result["mem_len"], result["batch_size"]) == (16, 16, 1)
    scores = np.load(tmp_path / "s.npy")
    assert np.isnan(scores).sum() == 324
    assert result["total_nats"] == -float(np.nansum(scores, dtype=np.float64))


def test_by_default_every_token_is_scored(lmtools, txl):
    ran = lmtools(*txl, "--mem-len", 32, "--clamp-len", 20, "--same-length", "--tokens-per-sample", 8, "--json")
    result = json.loads(ran.out)
    assert (result["counting"], result["tokens_scored"], result["tokens_skipped"]) == ("every token", 5184, 0)
    assert (result["mem_len"], result["clamp_len"], result["same_length"]) == (32, 20, True)
    assert result["model"]["mem_len"] == 32


def test_the_summary_says_what_fairseq_leaves_out(lmtools, txl):
    out = lmtools(*txl, "--fairseq-compat").out
    assert "over 4,860 tokens (chunks of 16, memory 16, float32)" in out
    assert "NOT scored: 324 of 5,184 tokens, as in fairseq: the first of each chunk, and the tail" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-window", 8], "--context-window: a stream is read in order"),
        (["--sample-break-mode", "eos"], "--sample-break-mode: a stream"),
        (["--max-tokens", 100], "--max-tokens: a stream"),
        (["--add-bos-token"], "--add-bos-token: a stream"),
        (["--mem-len", 0, "--same-length"], "--same-length: attends to the last --mem-len positions"),
        (["--batch-size", 400, "--fairseq-compat"], "none of its 5184 tokens is predicted in 400 streams"),
        (["--mp", 4], "--mp 4: does not divide the model's 2 attention heads"),
    ],
)
def test_options_that_cannot_work_are_refused(lmtools, txl, arguments, message):
    ran = lmtools(*txl, *arguments)
    assert ran.code in (1, 2)
    assert message in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fairseq-compat", "--mem-len", 10**13], r"out of memory \(\d+ bytes [^\n]+ a smaller --mem-len 10{13}"),
        (
            ["--tokens-per-sample", 8, "--batch-size", 10**15],
            r"out of memory \([\d.]+ PiB [^\n]+ a smaller --batch-size 10{15}",
        ),
        ([f"--tokens-per-sample={10**25}"], "a size is too large [^\n]+ a smaller --tokens-per-sample 10{25}"),
        (["--clamp-len", 10**25], "a size is too large to compute with; use a smaller --clamp-len 10{25}"),
    ],
)
def test_what_no_memory_holds_is_one_line(lmtools, txl, arguments, message):
    ran = lmtools(*txl, *arguments)
    assert (ran.code, ran.out) == (1, "")
    assert re.fullmatch(f"lmtools: {message}\n", ran.err)


def test_each_task_names_the_other(lmtools, golden):
    data = golden / "bin"
    ran = lmtools("eval", data, "--path", golden / "txl" / "checkpoint_last.pt")
    assert "holds a Transformer-XL; use --task truncated_bptt_lm" in ran.err
    ran = lmtools("eval", data, "--path", golden / "mp4", "--task", "truncated_bptt_lm")
    assert "holds a plain transformer, which has no memory; use --task language_modeling" in ran.err
    ran = lmtools("eval", data, "--path", golden / "mp4", "--mem-len", 0)
    assert "--mem-len: is of --task truncated_bptt_lm" in ran.err
    ran = lmtools("eval", data, "--path", golden / "mp4", "--fairseq-compat")
    assert "--fairseq-compat: is of --task truncated_bptt_lm" in ran.err


def test_what_was_trained_here_has_the_loss_that_it_was_validated_with(lmtools, golden, tmp_path):
    model = {"--n-layer": 2, "--d-model": 16, "--n-head": 2, "--d-head": 8, "--d-inner": 32, "--mem-len": 12}
    model |= {"--cutoffs": "40,80", "--tokens-per-sample": 16, "--batch-size": 8, "--max-update": 3, "--lr": 0.01}
    flags = [word for option in model.items() for word in option]
    task = ["--task", "truncated_bptt_lm", "--device", "cpu"]
    ran = lmtools(
        *("train", golden / "bin", *task, "--arch", "transformer_xl", *flags),
        *("--save-dir", tmp_path, "--log-format", "none"),
    )
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [validated] = [line["loss_base2"] for line in lines if line["kind"] == "valid"]
    command = ["eval", golden / "bin", "--path", tmp_path / "checkpoint_last", *task, "--gen-subset", "valid"]
    result = json.loads(lmtools(*command, "--batch-size", 8, "--json").out)
    assert (result["mem_len"], result["tokens_per_sample"]) == (12, 16)
    assert result["loss_base2"] == pytest.approx(validated, rel=1e-6)
