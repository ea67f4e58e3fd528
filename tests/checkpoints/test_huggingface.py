"""What is written of a model for transformers, and what is refused. tests/parity/test_huggingface.py loads it there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.huggingface import export_huggingface
from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.safetensors_files import read_safetensors
from lmtools.errors import ConfigError, LmtoolsError


@pytest.fixture
def mp4(golden: Path):
    return open_checkpoint(golden / "mp4")


def whole(source, name):
    shape = {"embed_tokens.weight": (160, 32)}.get(name, source.parts[0][name].shape)
    return source.read(name, tuple(slice(0, length) for length in shape))


def test_every_value_is_there_bit_for_bit(mp4, tmp_path):
    told: list[int] = []
    [path] = export_huggingface(mp4, tmp_path / "hf", progress=told.append)
    assert path == tmp_path / "hf" / "model.safetensors"
    tensors = read_safetensors(path)
    num_values = sum(tensor.num_elements for tensor in tensors.values())
    assert sum(told) == 4 * num_values
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(embedding.read(), whole(mp4, "embed_tokens.weight"))
    norm = tensors["model.layers.1.final_layer_norm.weight"]
    assert torch.equal(norm.read(), whole(mp4, "layers.1.final_layer_norm.weight"))
    assert "lm_head.weight" not in tensors, "it is the embedding"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"], config["vocab_size"]) == ("xglm", True, 160)


def test_a_large_model_is_cut_into_files_of_whole_tensors(mp4, tmp_path):
    paths = export_huggingface(mp4, tmp_path / "hf", shard_bytes=20_000)
    assert len(paths) > 2
    assert paths[1].name == f"model-00002-of-{len(paths):05d}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    shards = {path.name: read_safetensors(path) for path in paths}
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    sizes = [sum(tensor.num_bytes for tensor in tensors.values()) for tensors in shards.values()]
    assert max(sizes[1:]) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes)
    export_huggingface(mp4, tmp_path / "one")
    one = read_safetensors(tmp_path / "one" / "model.safetensors")
    for tensors in shards.values():
        for name, tensor in tensors.items():
            assert torch.equal(tensor.read(), one[name].read())


def test_dtype(mp4, tmp_path):
    [path] = export_huggingface(mp4, tmp_path / "hf", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in read_safetensors(path).values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("decoder_normalize_before", False),
        ("no_decoder_final_norm", True),
        ("decoder_learned_pos", True),
        ("no_token_positional_embeddings", True),
        ("layernorm_embedding", True),
    ],
)
def test_a_model_that_xglm_is_not_is_refused(mp4, tmp_path, option, value):
    other = dataclasses.replace(mp4, config=dataclasses.replace(mp4.config, **{option: value}))
    with pytest.raises(ConfigError, match=f"the model has .*{option}"):
        export_huggingface(other, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_left_alone(mp4, tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(LmtoolsError, match="exists already"):
        export_huggingface(mp4, tmp_path)


def test_a_failure_leaves_nothing(mp4, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lmtools.checkpoints.huggingface._write_json", fail)
    with pytest.raises(LmtoolsError, match="no space left"):
        export_huggingface(mp4, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
