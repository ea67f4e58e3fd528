"""`lmtools inspect` on everything that the pipeline reads and writes, whole and broken."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmtools.checkpoints.reshard import reshard
from tests.cli.conftest import Lmtools
from tests.support.ranks import run_ranks
from tests.support.training import train_a_leg
from tests.support.transformer_xl_states import config_of, huggingface_state, original_state, write_huggingface_folder


def inspected(lmtools: Lmtools, path: Path, code: int = 0) -> dict[str, Any]:
    ran = lmtools("inspect", path, "--json")
    assert ran.code == code, ran.err
    found = json.loads(ran.out)
    assert isinstance(found, dict)
    return found


def names_of(tensors: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {tensor["name"]: tensor["shape"] for tensor in tensors}


@pytest.mark.parametrize("name", ["", "model.pt", "model-model_part-2.pt"])
def test_a_part_checkpoint_by_any_of_its_names(lmtools, golden, name):
    found = inspected(lmtools, golden / "mp4" / name)
    assert found["kind"] == "fairseq checkpoint"
    assert (found["container"], found["options"], found["arch"]) == ("zip", "cfg", "transformer_lm_megatron")
    assert (found["num_parts"], found["parts_missing"]) == (4, [])
    assert (found["num_updates"], found["optimizer_state"]) == (120, True)
    assert found["num_parameters"] == 22272
    assert found["model"]["decoder_attention_heads"] == 4
    assert names_of(found["tensors"])["layers.1.fc2.weight"] == [32, 64]
    part = golden / "mp4" / "model-model_part-3.pt"
    assert found["files"][3] == {
        "path": part.name,
        "num_bytes": part.stat().st_size,
        "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
    }


def test_parts_with_their_dictionary_beside_them(lmtools, golden, tmp_path):
    """As they are published, and as reshard writes them: a checkpoint, and no folder of data without a split."""
    for part in (golden / "mp2_2020").glob("*.pt"):
        shutil.copy(part, tmp_path)
    shutil.copy(golden / "bin" / "dict.txt", tmp_path)
    found = inspected(lmtools, tmp_path)
    assert (found["kind"], found["num_parts"]) == ("fairseq checkpoint", 2)


def test_a_checkpoint_of_2020(lmtools, golden):
    found = inspected(lmtools, golden / "mp2_2020")
    assert (found["container"], found["options"], found["num_parts"]) == ("legacy", "args", 2)


def test_a_transformer_xl(lmtools, golden):
    found = inspected(lmtools, golden / "txl" / "checkpoint_last.pt")
    assert found["kind"] == "fairseq checkpoint of a Transformer-XL"
    assert (found["arch"], found["num_updates"], found["tokens_per_sample"]) == ("transformer_xl", 900, 16)
    assert (found["num_parts"], found["model"]["mem_len"], found["model"]["cutoffs"]) == (1, 16, [40, 80])
    assert names_of(found["tensors"])["embed_tokens.clusters.2.weight"] == [64, 6]
    tied = [[40, 24], [40, 12], [64, 6]]
    assert found["num_parameters"] == sum(math.prod(shape) for shape in names_of(found["tensors"]).values())
    assert [shape for shape in names_of(found["tensors"]).values() if shape in tied] == tied, "once, though it is tied"


@pytest.mark.parametrize("name", ["", "pytorch_model.bin", "model.safetensors", "original.pt"])
def test_transformer_xls_of_other_programs(lmtools, tmp_path, name):
    config = config_of(div_val=2)
    if name == "model.safetensors":
        save_file({key: tensor.clone() for key, tensor in huggingface_state(config).items()}, tmp_path / name)
    else:
        torch.save(huggingface_state(config), tmp_path / "pytorch_model.bin")
    torch.save(original_state(config_of(div_val=2, untie_r=False)), tmp_path / "original.pt")
    fields = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "vocab_size", "div_val", "cutoffs", "untie_r")
    settings = {field: getattr(config, field) for field in fields}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "transfo-xl", "mem_len": 6, **settings}))
    found = inspected(lmtools, tmp_path / name)
    of_original = name == "original.pt"
    assert found["kind"] == (
        "the original's state dict of a Transformer-XL" if of_original else "checkpoint of transformers"
    )
    assert (found["model"]["mem_len"], found["model"]["untie_r"]) == ((0, False) if of_original else (6, True))
    assert names_of(found["tensors"])["layers.1.self_attn.r_proj.weight"] == [6, 8]
    [file] = found["files"]
    assert file["path"] == (name or "pytorch_model.bin")


def test_of_two_files_of_one_model_the_one_that_is_not_read_is_described_by_itself(lmtools, tmp_path):
    write_huggingface_folder(tmp_path, config_of())
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert [file["path"] for file in inspected(lmtools, tmp_path)["files"]] == ["model.safetensors"]
    found = inspected(lmtools, tmp_path / "pytorch_model.bin")
    assert (found["kind"], [file["path"] for file in found["files"]]) == ("torch file", ["pytorch_model.bin"])
    assert names_of(found["tensors"])["transformer.word_emb.emb_layers.0.weight"] == [13, 8]


def test_a_broken_transformer_xl_says_where(lmtools, tmp_path):
    state = original_state(config_of(div_val=2, untie_r=False))
    del state["layers.1.pos_ff.CoreNet.3.bias"]
    torch.save(state, tmp_path / "model.pt")
    found = inspected(lmtools, tmp_path / "model.pt", code=1)
    assert "layers.1.pos_ff.CoreNet.3.bias" in found["problems"][0]
    assert names_of(found["tensors"])["word_emb.emb_layers.0.weight"] == [5, 8]


def test_a_safetensors_set_and_one_of_its_files(lmtools, golden, tmp_path):
    reshard(golden / "mp4", tmp_path / "set", num_parts=2, format="safetensors")
    for name in ("", "model.json", "model-1-of-2.safetensors"):
        found = inspected(lmtools, tmp_path / "set" / name)
        assert (found["kind"], found["num_parts"], found["num_parameters"]) == ("lmtools checkpoint", 2, 22272)
        assert found["origin"]["num_parts"] == 4
    shutil.copy(tmp_path / "set" / "model-1-of-2.safetensors", tmp_path / "alone.safetensors")
    found = inspected(lmtools, tmp_path / "alone.safetensors")
    assert found["kind"] == "safetensors file"
    assert names_of(found["tensors"])["layers.0.fc2.weight"] == [32, 32]


def test_a_training_run_and_its_checkpoint(lmtools, tmp_path):
    run_ranks(1, train_a_leg, {"save_dir": str(tmp_path / "run"), "max_update": 2})
    assert "checkpoint_last" in inspected(lmtools, tmp_path / "run")["checkpoints"]
    found = inspected(lmtools, tmp_path / "run" / "checkpoint_last")
    assert (found["kind"], found["num_updates"]) == ("training checkpoint", 2)
    assert found["model"]["decoder_embed_dim"] == 16


def test_a_training_checkpoint_of_a_transformer_xl(lmtools, tmp_path):
    run_ranks(1, train_a_leg, {"arch": "transformer_xl", "save_dir": str(tmp_path), "max_update": 2})
    found = inspected(lmtools, tmp_path / "checkpoint_last")
    assert (found["kind"], found["num_updates"], found["model"]["mem_len"]) == ("training checkpoint", 2, 16)
    assert found["num_parameters"] == sum(math.prod(shape) for shape in names_of(found["tensors"]).values())


def test_binarized_data(lmtools, golden):
    found = inspected(lmtools, golden / "bin")
    assert (found["kind"], found["types"]) == ("binarized data", 144)
    assert found["splits"]["test"]["tokens"] == 5184
    assert inspected(lmtools, golden / "bin" / "test.bin")["sentences"] == 400
    found = inspected(lmtools, golden / "bin" / "dict.txt")
    assert (found["kind"], found["types"], found["padding_rows"]) == ("dictionary", 144, 1)


def test_text_with_and_without_a_manifest(lmtools, golden, tmp_path):
    raw, detok = tmp_path / "a.raw", tmp_path / "a.detok"
    raw.write_text(" The <unk> , a line .\n\n")
    assert lmtools("detok", raw, detok).code == 0
    assert inspected(lmtools, raw)["lines"] == 2
    found = inspected(lmtools, detok)
    assert (found["kind"], found["manifest_fits"], found["original_tokens"]) == ("text", True, 8)
    assert found["made_from"] == ["a.raw"]
    detok.write_text("changed\n")
    assert inspected(lmtools, detok)["manifest_fits"] is False
    assert inspected(lmtools, tmp_path / "a.detok.meta.json")["kind"] == "manifest"


def test_a_result(lmtools, golden, tmp_path):
    options = ["--path", golden / "plain" / "model.pt", "--tokens-per-sample", 32, "--output", tmp_path / "result.json"]
    assert lmtools("eval", golden / "bin", *options).code == 0
    found = inspected(lmtools, tmp_path / "result.json")
    assert (found["kind"], found["tokens_scored"]) == ("result of eval", 5184)


# --- broken ---


def test_a_missing_part_is_among_what_is_said_of_the_others(lmtools, golden, tmp_path):
    for part in (0, 2, 3):
        shutil.copy(golden / "mp4" / f"model-model_part-{part}.pt", tmp_path)
    found = inspected(lmtools, tmp_path, code=1)
    assert (found["num_parts"], found["parts_found"], found["parts_missing"]) == (4, 3, ["model-model_part-1.pt"])
    assert found["problems"] == [f"{tmp_path}: 1 of 4 parts missing: model-model_part-1.pt"]
    assert names_of(found["tensors"])["decoder.layers.0.fc1.weight"] == [16, 32]


@pytest.mark.parametrize("num_bytes", [0, 3, 40, 5000, 100_000])
def test_a_part_that_is_cut_short_is_named(lmtools, golden, tmp_path, num_bytes):
    shutil.copytree(golden / "mp4", tmp_path / "mp4")
    path = tmp_path / "mp4" / "model-model_part-1.pt"
    path.write_bytes(path.read_bytes()[:num_bytes])
    found = inspected(lmtools, tmp_path / "mp4", code=1)
    assert len(found["problems"]) == 1
    assert str(path) in found["problems"][0]
    assert found["num_updates"] == 120


def test_a_broken_set_says_where(lmtools, golden, tmp_path):
    reshard(golden / "mp4", tmp_path / "set", num_parts=2, format="safetensors")
    path = tmp_path / "set" / "model-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = inspected(lmtools, tmp_path / "set", code=1)
    assert found["problems"][0].startswith(f"{path}: has 48,671 bytes")
    path.unlink()
    assert inspected(lmtools, tmp_path / "set", code=1)["parts_missing"] == [path.name]


def test_a_broken_split_is_said_beside_the_others(lmtools, golden, tmp_path):
    shutil.copytree(golden / "bin", tmp_path / "bin")
    os.truncate(tmp_path / "bin" / "valid.bin", 100)
    found = inspected(lmtools, tmp_path / "bin", code=1)
    assert found["splits"].keys() == {"test", "train"}
    assert str(tmp_path / "bin" / "valid.bin") in found["problems"][0]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("dict.txt", b"word one\n", "dict.txt:1: expected 'WORD COUNT'"),
        ("test.json", b"{", "not JSON"),
        ("other.json", b'{"format": "x"}', "JSON of another program (format 'x')"),
        ("noise", b"abc\0def", "not text (a zero byte at 3)"),
        ("some.safetensors", b"\0" * 100, "not a safetensors file"),
    ],
)
def test_what_is_broken_or_foreign_is_one_line(lmtools, tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    ran = lmtools("inspect", tmp_path / name)
    assert ran.code == 1
    assert problem in ran.err
    assert ran.err.count("\n") == 1


def test_what_is_not_there_is_one_line(lmtools, tmp_path):
    assert "no such file or folder" in lmtools("inspect", tmp_path / "nothing").err
    assert "an empty folder" in lmtools("inspect", tmp_path).err


def test_odd_values_in_a_checkpoint_are_shown_and_nothing_is_run(lmtools, tmp_path):
    odd = {
        "cfg": {"model": {"_name": torch.ones(2)}},
        "model": {"w": torch.ones(2)},
        "optimizer_history": [float("nan")],
    }
    torch.save(odd, tmp_path / "odd.pt")
    found = inspected(lmtools, tmp_path / "odd.pt", code=1)
    assert "LazyTensor" in found["arch"]
    torch.save({"a": torch.ones(3), "b": 1}, tmp_path / "plain.pt")
    found = inspected(lmtools, tmp_path / "plain.pt")
    assert (found["kind"], found["entries"], found["num_elements"]) == ("torch file", ["a", "b"], 3)


# --- the terminal ---


def test_the_table_fits_80_columns(lmtools, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = lmtools("inspect", golden / "mp4", "--no-hash")
    lines = [line.rstrip() for line in ran.out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "num_parameters   22,272" in lines
    assert any(line.split() == ["layers.*.fc1.weight", "2", "64", "x", "32", "float32", "column"] for line in lines)
    assert "model-model_part-0.pt  123,811" in lines


def test_names_in_a_file_cannot_speak_to_the_terminal(lmtools, tmp_path):
    torch.save({"\x1b[2J[red]weight": torch.ones(1)}, tmp_path / "a.pt")
    ran = lmtools("inspect", tmp_path / "a.pt")
    assert "\x1b" not in ran.out
    assert "[red]weight" in ran.out


@pytest.mark.parametrize("name", ["/dev/null", "pipe"])
def test_a_device_or_a_pipe_is_refused(lmtools, tmp_path, monkeypatch, name):
    """It would be read once to see what it is, and be empty, or never end, afterwards."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    ran = lmtools("inspect", name)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"lmtools: {name}: is a device or a pipe")
