"""What is written of a model for transformers, and what is refused. tests/parity/test_huggingface.py loads it there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.huggingface import require_xglm
from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.reshard import reshard
from lmtools.checkpoints.safetensors_files import read_safetensors
from lmtools.errors import ConfigError, LmtoolsError
from tests.support.transformers_models import MODELS, save


@pytest.fixture
def mp4(golden: Path) -> Path:
    return golden / "mp4"


def export(source: Path, folder: Path, **options: object) -> list[str]:
    return list(reshard(source, folder, num_parts=1, format="hf", verify=True, **options)["target"]["files"])


def test_every_value_is_there_bit_for_bit(mp4, tmp_path):
    """`verify` compares all of them, which this does for two by hand."""
    assert export(mp4, tmp_path / "hf", more_files={"x.txt": "é"}) == ["model.safetensors"]
    tensors = read_safetensors(tmp_path / "hf" / "model.safetensors")
    source = open_checkpoint(mp4)
    for name in ("layers.1.fc2.weight", "layer_norm.bias"):
        tensor = tensors[f"model.{name}"]
        assert torch.equal(tensor.read(), source.read(name, tuple(slice(0, length) for length in tensor.shape)))
    assert "lm_head.weight" not in tensors, "it is the embedding"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"], config["vocab_size"]) == ("xglm", True, 160)
    assert json.loads((tmp_path / "hf" / "origin.json").read_text())["num_parts"] == 4
    assert (tmp_path / "hf" / "x.txt").read_text("utf-8") == "é"


def test_a_large_model_is_cut_into_files_of_whole_tensors(mp4, tmp_path, monkeypatch):
    export(mp4, tmp_path / "one")
    one = read_safetensors(tmp_path / "one" / "model.safetensors")
    monkeypatch.setattr("lmtools.checkpoints.huggingface.SHARD_BYTES", 20_000)
    names = export(mp4, tmp_path / "hf")
    assert len(names) > 2
    assert names[1] == f"model-00002-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    shards = {name: read_safetensors(tmp_path / "hf" / name) for name in names}
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    sizes = [sum(tensor.num_bytes for tensor in tensors.values()) for tensors in shards.values()]
    assert max(sizes[1:]) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes)
    for tensors in shards.values():
        for name, tensor in tensors.items():
            assert torch.equal(tensor.read(), one[name].read())


def test_dtype(mp4, tmp_path):
    export(mp4, tmp_path / "hf", dtype=torch.bfloat16)
    tensors = read_safetensors(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_there_and_back(mp4, tmp_path):
    """An exported folder becomes parts again, with the tensors that it was made of."""
    export(mp4, tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "back", num_parts=4, format="fairseq", verify=True)
    source, back = open_checkpoint(mp4), open_checkpoint(tmp_path / "back")
    assert back.config == source.config
    for part, of_source in zip(back.parts, source.parts, strict=True):
        for name, tensor in part.items():
            assert torch.equal(tensor.read(), of_source[name].read())


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
def test_a_model_that_xglm_is_not_is_refused(mp4, option, value):
    config = open_checkpoint(mp4).config
    require_xglm(config, 1)
    with pytest.raises(ConfigError, match=f"the model has .*{option}"):
        require_xglm(dataclasses.replace(config, **{option: value}), 1)


def test_refused_before_anything_is_written(mp4, golden, tmp_path):
    with pytest.raises(ConfigError, match="decoder_normalize_before"):
        export(golden / "plain" / "model.pt", tmp_path / "hf")
    with pytest.raises(ConfigError, match="--mp 2: transformers has no parts for ranks"):
        reshard(mp4, tmp_path / "hf", num_parts=2, format="hf")
    save(tmp_path / "gpt2", MODELS["gpt2"])
    with pytest.raises(ConfigError, match="a GPT-2 model, whose vocabulary"):
        reshard(tmp_path / "gpt2", tmp_path / "hf", num_parts=1, format="fairseq")
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_a_failure_leaves_nothing(mp4, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lmtools.checkpoints.huggingface._write_json", fail)
    with pytest.raises(LmtoolsError, match="no space left"):
        export(mp4, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
