"""Transformer-XLs of other programs: files of all three kinds, whole and damaged, onto any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmtools.checkpoints.fairseq import FairseqCheckpoint
from lmtools.checkpoints.load import load_model, open_checkpoint, require_divisible, require_transformer_lm
from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint
from lmtools.errors import CheckpointError, ConfigError
from lmtools.models.architectures import TransformerXLConfig
from lmtools.parallel.mesh import make_mesh
from tests.support.ranks import run_ranks
from tests.support.transformer_xl_states import config_of, huggingface_state, original_state

SETTINGS = {"model_type": "transfo-xl", "cutoffs": [5, 8], "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 3}
SETTINGS |= {"d_inner": 12, "d_embed": 8, "mem_len": 6, "tgt_len": 4, "untie_r": True, "vocab_size": 13}


def write_hugging_face(folder: Path, options: dict[str, Any], **settings: Any) -> TransformerXLConfig:
    """A folder as `save_pretrained` of an older transformers wrote it."""
    config = config_of(**options)
    folder.mkdir(exist_ok=True)
    torch.save(huggingface_state(config), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(SETTINGS | options | settings))
    return config


def parameters(path: Path, tp: int = 1) -> dict[str, Tensor]:
    model = load_model(open_checkpoint(path), make_mesh(torch.device("cpu"), dp=1, tp=tp), torch.float32)
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()
        for name, parameter in model.named_parameters()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("options", [{}, {"div_val": 2}, {"untie_r": False}], ids=["one width", "narrowing", "shared"])
def test_a_hugging_face_folder(tmp_path, options):
    config = write_hugging_face(tmp_path / "hf", options)
    opened = open_checkpoint(tmp_path / "hf")
    assert isinstance(opened, TransformerXLCheckpoint)
    assert (opened.config.mem_len, opened.config.cutoffs, opened.tokens_per_sample) == (6, (5, 8), 4)
    found = parameters(tmp_path / "hf")
    torch.testing.assert_close(
        found["layers.1.self_attn.k_proj.weight"],
        huggingface_state(config)["transformer.layers.1.dec_attn.qkv_net.weight"][6:12],
        rtol=0,
        atol=0,
    )


def test_the_originals_state_dict(tmp_path):
    """Its file has no options; where the widths narrow, the tables say where clusters begin."""
    config = write_hugging_face(tmp_path / "hf", {"div_val": 2, "untie_r": False})
    torch.save(original_state(config), tmp_path / "model.pt")
    opened = open_checkpoint(tmp_path / "model.pt")
    assert (opened.config.cluster_bounds, opened.config.untie_r) == (config.cluster_bounds, False)
    assert_equal(parameters(tmp_path / "model.pt"), parameters(tmp_path / "hf"))


def test_the_originals_one_table_does_not_say_where_clusters_begin(tmp_path):
    torch.save(original_state(config_of(untie_r=False)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="has 2 clusters of rare types and one table"):
        open_checkpoint(tmp_path / "model.pt")


def test_fairseqs_file(golden: Path):
    opened = open_checkpoint(golden / "txl" / "checkpoint_last.pt")
    assert isinstance(opened, TransformerXLCheckpoint)
    assert (opened.config.mem_len, opened.tokens_per_sample, opened.config.div_val) == (16, 16, 2)
    with pytest.raises(ConfigError, match="holds a Transformer-XL; use another command"):
        require_transformer_lm(opened, "use another command")


def test_plain_transformers_are_opened_as_before(golden: Path):
    assert isinstance(open_checkpoint(golden / "plain" / "model.pt"), FairseqCheckpoint)
    assert isinstance(open_checkpoint(golden / "mp4"), FairseqCheckpoint)


def both_sizes(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    split = load_model(open_checkpoint(path), make_mesh(torch.device("cpu"), dp=1, tp=2), torch.float32)
    names = [name for name, parameter in split.named_parameters() if isinstance(parameter, DTensor)]
    return parameters(path, tp=2), names


def test_onto_two_ranks(golden: Path):
    """Also the rows of the tails, which the original has from the back, and clusters of an odd number of rows."""
    path = golden / "txl" / "checkpoint_last.pt"
    whole = parameters(path)
    for split, names in run_ranks(2, both_sizes, path):
        assert "layers.0.self_attn.r_w_bias.bias" in names
        assert_equal(split, whole)


def test_sizes_that_do_not_divide(golden: Path):
    checkpoint = open_checkpoint(golden / "txl" / "checkpoint_last.pt")
    require_divisible(checkpoint, 2)
    with pytest.raises(ConfigError, match=r"--mp 3: does not divide the model's 2 attention heads"):
        require_divisible(checkpoint, 3)


# --- what cannot be right ---


def test_shared_tensors_that_differ(tmp_path):
    write_hugging_face(tmp_path, {})
    state = torch.load(tmp_path / "pytorch_model.bin")
    state["crit.out_layers.0.weight"] = state["crit.out_layers.0.weight"] + 1
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"crit.out_layers.0.weight differs from transformer.word_emb"):
        parameters(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_inner": 14}, r"pos_ff.CoreNet.0.weight has shape \(12, 8\), expected \(14, 8\)"),
        ({"n_layer": 3}, r"has no transformer.layers.2"),
        ({"n_layer": 1}, r"transformer.layers.1.* is no tensor of a Transformer-XL with these options"),
        ({"n_layer": "2"}, r"config.json: has n_layer='2', expected int"),
        ({"cutoffs": [8, 5]}, r"expected positive, rising numbers"),
        ({"cutoffs": 5}, r"options of no Transformer-XL"),
        ({"cutoffs": [5.0, 8]}, r"--cutoffs 5.0,8: expected whole numbers"),
        ({"div_val": 0}, r"config.json: options of no Transformer-XL"),
        ({"d_head": -3}, r"config.json: options of no Transformer-XL.*--d-head: expected 1 or more, found -3"),
        ({"mem_len": -1}, r"--mem-len: expected 0 or more, found -1"),
        ({"layer_norm_epsilon": "1e-5"}, r"config.json: has layer_norm_epsilon='1e-5', expected float"),
        ({"model_type": "t5"}, r"config.json: model_type is 't5', lmtools loads xglm, gpt2 and transfo-xl"),
    ],
)
def test_options_that_do_not_fit_the_weights(tmp_path, settings, message):
    write_hugging_face(tmp_path, {}, **settings)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_lengths_that_a_config_json_does_not_say_are_transformers_own(tmp_path):
    write_hugging_face(tmp_path, {})
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["mem_len"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = open_checkpoint(tmp_path).config
    assert isinstance(config, TransformerXLConfig)
    assert (config.mem_len, config.clamp_len, config.same_length) == (1600, 1000, True)
    write_hugging_face(tmp_path, {}, mem_len=7, clamp_len=-1, same_length=False)
    config = open_checkpoint(tmp_path).config
    assert isinstance(config, TransformerXLConfig)
    assert (config.mem_len, config.clamp_len, config.same_length) == (7, -1, False)


@pytest.mark.parametrize("text", [None, "[", '{"model_type": "bert"}'])
def test_a_folder_whose_options_are_missing_or_broken(tmp_path, text):
    write_hugging_face(tmp_path, {})
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json: "):
        open_checkpoint(tmp_path)
