"""`lmtools reproduce`, offline: from a text and a checkpoint to the table; what is there is left out; faults."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from typing import get_type_hints

import pytest

from lmtools.cli.reproduce import reproduce
from lmtools.recipes.run import files_of
from tests.support.random_checkpoint import write_random_checkpoint


@pytest.mark.slow
def test_whole_recipe_on_any_text(lmtools, golden, tmp_path):
    """A small text, GPT-2's dictionary and 8 random parts. The second time nothing is computed."""
    dictionary, checkpoint, work = tmp_path / "dict.txt", tmp_path / "parts", tmp_path / "work"
    dictionary.write_text("".join(f"{token} 1\n" for token in range(50257)))
    write_random_checkpoint(checkpoint, vocab_size=50304, num_parts=8)
    command = ["reproduce", "megatron-11b", "--mp", "1", "--workdir", work, "--checkpoint", checkpoint]
    command += ["--srcdict", dictionary, "--raw", golden / "train.txt", "--set", "context_window=48"]

    ran = lmtools(*command)
    assert ran.code == 0, ran.err
    assert (work / "wiki.test.detok").read_bytes() == (golden / "train.detok").read_bytes()
    result = json.loads((work / "test.json").read_text())
    assert (result["context_window"], result["mp"], result["num_parts"]) == (48, 1, 8)
    num_tokens, num_original = result["tokens_scored"], result["original"]["tokens"]
    per_word = 2 ** (result["loss_base2"] * num_tokens / num_original)
    shown = {line.rpartition(": ")[2].split("  ")[0]: line.split()[-3:] for line in ran.out.splitlines()}
    assert shown["scored tokens"] == ["270,847", f"{num_tokens:,}", f"{num_tokens - 270_847:,}"]
    assert shown["perplexity per original token"] == ["10.54", f"{per_word:,.4f}", f"{per_word - 10.54:+,.4f}"]

    stamp = (work / "test.json").stat().st_mtime_ns
    again = lmtools(*command, "--json")
    document = json.loads(again.out)
    assert [stage["status"] for stage in document["stages"]] == ["ran", "ran", "ran", "unchanged", "ran"]
    assert again.err.count("unchanged, skipped") == 4
    assert (work / "test.json").stat().st_mtime_ns == stamp
    by_name = {row["what"]: row["obtained"] for row in document["results"]}
    assert by_name["test: original tokens"] == num_original
    assert by_name["test: perplexity per original token"] == pytest.approx(per_word)


@pytest.mark.slow
def test_transformer_xl_from_a_checkpoint(lmtools, golden, tmp_path):
    """fairseq's own small one, on its own text: the perplexity that fairseq found, over as many tokens."""
    command = ["reproduce", "transformer-xl", "--workdir", tmp_path, "--raw", golden / "test.txt"]
    command += ["--checkpoint", golden / "txl" / "checkpoint_last.pt", "--srcdict", golden / "bin" / "dict.txt"]
    shape = {"mem_len": 32, "clamp_len": 20, "tokens_per_sample": 8}
    ran = lmtools(*command, *(f"--set={name}={value}" for name, value in shape.items()), "--json")
    assert ran.code == 0, ran.err
    published = json.loads((golden / "txl" / "eval" / "mem32_t8_clamp20_same.json").read_text())
    obtained = {row["what"]: row["obtained"] for row in json.loads(ran.out)["results"]}
    assert obtained["test: perplexity, as fairseq counts"] == pytest.approx(published["perplexity"], rel=1e-5)
    assert obtained["test: scored tokens, as fairseq counts"] == published["count"]
    assert obtained["test: scored tokens"] == 5184


@pytest.mark.slow
def test_transformer_xl_trained_first(lmtools, golden, tmp_path):
    """A copy of the recipe with a small model and few updates: text, dictionary, two replicas, the table; once."""
    work, recipe = tmp_path / "work", tmp_path / "my.toml"
    (work / "wikitext-103").mkdir(parents=True)
    for split in ("train", "valid"):
        (work / "wikitext-103" / f"wiki.{split}.tokens").write_bytes((golden / "test.txt").read_bytes())
    assert lmtools("reproduce", "transformer-xl", "--copy", recipe).code == 0
    text = recipe.read_text()
    for old, new in {
        "--tokens-per-sample 150 --batch-size 15": "--tokens-per-sample 16 --batch-size 2",
        "max_update = 200_000": "max_update = 60",
        "--n-layer 16 --d-model 410 --n-head 10 --d-head 41 --d-inner 2100": "--n-layer 1 --d-model 16 --n-head 2 "
        "--d-head 8 --d-inner 32",
        "--mem-len 150": "--mem-len 16",
        "--lr 0.00025": "--lr 0.01",
    }.items():
        assert old in text  # of the command, and of its plan
        text = text.replace(old, new)
    recipe.write_text(text)
    command = ["reproduce", recipe, "--workdir", work, "--raw", golden / "test.txt", "--set=dp=2", "--set=workers=1"]
    command += ["--set=tokens_per_sample=8", "--set=mem_len=32", "--set=clamp_len=20", "--json"]

    ran = lmtools(*command)

    assert ran.code == 0, ran.err
    obtained = {row["what"]: row["obtained"] for row in json.loads(ran.out)["results"]}
    assert obtained["test: scored tokens, as fairseq counts"] == 5184 // 8 * 7
    assert obtained["test: scored tokens"] == 5184
    best = json.loads((work / "checkpoints" / "checkpoint_best" / "lmtools.json").read_text())
    lines = (work / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    updates = [line for line in map(json.loads, lines) if line["kind"] == "update"]
    assert (len(updates), updates[-1]["num_updates"]) == (60, 60)
    # The text is the validation's, and the longer memory changes little: much better than a guess among 144 types.
    perplexity = obtained["test: perplexity of every token"]
    assert perplexity == pytest.approx(2 ** best["progress"]["best_loss"], rel=0.1)
    assert perplexity < 100

    again = lmtools(*command)
    assert [stage["status"] for stage in json.loads(again.out)["stages"]] == ["ran", "ran", "unchanged", "unchanged"]
    assert len((work / "checkpoints" / "metrics.jsonl").read_text().splitlines()) == len(lines)


RECIPE = """
description = "Two texts"
splits = ["a", "b"]
[values]
raw = "{split}.raw"
[[stages]]
name = "detok"
run = "lmtools detok {raw} {split}.detok --json"
stdout = "{split}.json"
makes = ["{split}.detok", "{split}.json"]
reads = ["{raw}"]
num_bytes = 10
[[results]]
what = "words"
file = "a.json"
key = "outputs"
"""


@pytest.fixture
def own(tmp_path):
    """A recipe of one's own, and its folder with one text of two."""
    (tmp_path / "my.toml").write_text(RECIPE)
    (tmp_path / "a.raw").write_text(" x @-@ y \n")
    return ["reproduce", tmp_path / "my.toml", "--workdir", tmp_path]


def test_failed_stage_says_how_to_go_on(lmtools, own, tmp_path):
    ran = lmtools(*own)
    assert ran.code == 1
    assert (tmp_path / "a.detok").read_text() == "x-y\n"
    fault, how = ran.err.splitlines()[-2:]
    assert fault.startswith("lmtools: b.raw: ")
    assert how == (
        "lmtools: the stage detok b failed, as said above; 1 of 2 are done. Run the same command again to go on there, "
        f"or by hand: cd {tmp_path} && lmtools detok b.raw b.detok --json > b.json"
    )

    (tmp_path / "b.raw").write_text("z\n")
    ran = lmtools(*own)
    assert "a.detok, a.json: unchanged, skipped" in ran.err
    assert (tmp_path / "b.detok").read_text() == "z\n"
    assert ran.err.splitlines()[-1].startswith(f"lmtools: {tmp_path}/a.json: outputs is [")  # the recipe's own fault


@pytest.mark.parametrize("changed", ["a.raw", pytest.param("a.json", marks=pytest.mark.slow)])
def test_stage_runs_again_when_a_file_has_changed(lmtools, own, tmp_path, changed):
    (tmp_path / "b.raw").write_text("z\n")
    lmtools(*own)
    (tmp_path / changed).write_text("other\n")
    ran = lmtools(*own)
    assert ran.err.count("unchanged, skipped") == 1
    assert (tmp_path / "a.detok").read_text() == ("other\n" if changed == "a.raw" else "x-y\n")


def test_sigterm_ends_the_command_first(start_lmtools, own, tmp_path):
    (tmp_path / "b.raw").write_text("z\n")
    (tmp_path / "a.raw").unlink()
    os.mkfifo(tmp_path / "a.raw")
    running = start_lmtools(*own)
    with open(tmp_path / "a.raw", "wb", buffering=0) as pipe:  # as soon as the command has it open
        pipe.write(b"begun\n")
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=60)
        assert running.returncode == 128 + signal.SIGTERM
        with pytest.raises(BrokenPipeError):
            pipe.write(b"nobody reads\n")
    assert b"the stage detok a was ended by SIGTERM; 0 of 2 are done. Run the same command again" in err
    assert not (tmp_path / "a.detok").exists()


def test_two_at_once_in_a_folder_are_refused(start_lmtools, lmtools, own, tmp_path):
    (tmp_path / "a.raw").unlink()
    os.mkfifo(tmp_path / "a.raw")
    running = start_lmtools(*own)
    with open(tmp_path / "a.raw", "wb"):
        ran = lmtools(*own)
        running.terminate()
        running.communicate(timeout=60)
    assert ran.code == 1
    assert f"{tmp_path}: another reproduce is at work here" in ran.err


@pytest.mark.slow
def test_dry_run_writes_nothing(lmtools, own, tmp_path):
    ran = lmtools("reproduce", "megatron-11b", "--workdir", tmp_path / "new", "--dry-run")
    assert ran.code == 0
    assert not (tmp_path / "new").exists()
    assert (
        "[1/12] text: to do, 192.0 MB to download, 540.0 MB on the disk\n$ lmtools download wikitext-103-raw\n"
        in ran.out
    )
    assert ran.out.count(" of memory on each rank, ") == 2
    hours = [float(hours) for hours in re.findall(r", (\S+) hours$", ran.out, flags=re.MULTILINE)]
    assert hours[1] / hours[0] == pytest.approx(237_000 / 270_847, rel=0.1)  # they have two digits
    assert ran.out.count("$ lmtools eval wikitext103-bin --path megatron_11b --gen-subset ") == 2

    for name in ("a.detok", "a.json"):
        (tmp_path / name).touch()
    document = json.loads(lmtools(*own, "--dry-run", "--json").out)
    assert [stage["outputs_there"] for stage in document["stages"]] == [True, False]
    assert document["disk_bytes"] == 10


@pytest.mark.parametrize(("given", "num_tokens"), [([], 10_000), (["--set", "num_tokens=7"], 7)])
def test_hours_of_a_text_of_ones_own_are_by_its_size(lmtools, tmp_path, monkeypatch, given, num_tokens):
    """As many tokens a byte as WikiText-103's test set has, also of a compressed text."""
    with gzip.open(tmp_path / "my.raw.gz", "wb") as raw:
        raw.write(b"x" * round(10_000 * 1_290_590 / 270_847))
    plans = []
    nothing = {"download_bytes": None, "disk_bytes": None, "memory_bytes": None, "hours": None}
    monkeypatch.setattr("lmtools.recipes.needs.needs_of", lambda step, ask: plans.append(step.plan) or nothing)
    ran = lmtools("reproduce", "megatron-11b", "--dry-run", "--raw", tmp_path / "my.raw.gz", *given)
    assert ran.code == 0, ran.err
    [plan] = filter(None, plans)
    assert plan[plan.index("--num-tokens") + 1] == str(num_tokens)


@pytest.mark.slow
def test_copied_recipe_is_one_to_run(lmtools, tmp_path):
    assert lmtools("reproduce", "megatron-11b", "--copy", tmp_path / "copy.toml").code == 0
    ran = lmtools("reproduce", tmp_path / "copy.toml", "--dry-run", "--workdir", tmp_path)
    assert ran.code == 0
    again = lmtools("reproduce", "megatron-11b", "--copy", tmp_path / "copy.toml")
    assert (again.code, "exists already" in again.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--checkpoint", "{}/none.pt"], 2, "--checkpoint {}/none.pt: no such file or folder"),
        (["--raw", "{}/none.raw", "--dry-run"], 2, "--raw {}/none.raw: no such file or folder"),
        (["--workdir", "{}/a.raw"], 1, "{}/a.raw: is a file, expected a folder"),
        (["--workdir", "{}/a.raw/new/er"], 1, "{}/a.raw: is a file, expected a folder"),
    ],
)
def test_paths_that_cannot_be_are_said_before_anything_runs(lmtools, own, tmp_path, arguments, code, said):
    ran = lmtools(*own, *(argument.format(tmp_path) for argument in arguments))
    assert (ran.code, ran.err) == (code, f"lmtools: {said.format(tmp_path)}\n")


def test_a_recipe_without_stages_is_one_line(lmtools, tmp_path):
    recipe = 'description = "d"\nsplits = []\nstages = []\nresults = []\n[values]\n'
    (tmp_path / "my.toml").write_text(recipe)
    ran = lmtools("reproduce", tmp_path / "my.toml", "--workdir", tmp_path / "new")
    assert (ran.code, ran.err) == (2, f"lmtools: {tmp_path}/my.toml: there is no stage to run\n")
    assert not (tmp_path / "new").exists()


def test_tab_completes_recipes():
    [argument] = get_type_hints(reproduce, include_extras=True)["recipe"].__metadata__
    assert argument.autocompletion("") == ["megatron-11b", "transformer-xl"]
    assert argument.autocompletion("tr") == ["transformer-xl"]
    assert argument.autocompletion("my.toml") == []


def test_value_without_a_name_is_wrong_usage(lmtools):
    assert lmtools("reproduce", "megatron-11b", "--set", "context_window").code == 2


def test_files_of_a_checkpoint(tmp_path):
    for name in ("model-model_part-0.pt", "model-model_part-1.pt", "dict.txt"):
        (tmp_path / name).touch()
    assert len(files_of(tmp_path)) == 3
    assert [path.name for path in files_of(tmp_path / "dict.txt")] == ["dict.txt"]
    assert [path.name for path in files_of(tmp_path / "model.pt")] == ["model-model_part-0.pt", "model-model_part-1.pt"]
    assert files_of(tmp_path / "nothing.pt") == []
    (tmp_path / "model [2]-model_part-0.pt").touch()
    assert [path.name for path in files_of(tmp_path / "model [2].pt")] == ["model [2]-model_part-0.pt"]
