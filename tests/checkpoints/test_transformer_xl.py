"""Transformer-XLs of other programs: files of all three kinds, whole and damaged, onto any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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


def write_safetensors(folder: Path, state: dict[str, Tensor], num_files: int = 1) -> list[Path]:
    """In place of pytorch_model.bin what newer versions write; returns the files."""
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    if num_files == 1:
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
        return [folder / "model.safetensors"]
    files = [f"model-{index + 1:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]
    places = {name: files[index * num_files // len(state)] for index, name in enumerate(state)}
    for file in files:
        save_file({name: state[name].clone() for name in state if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return [folder / file for file in files]


def without_copies(config: TransformerXLConfig) -> dict[str, Tensor]:
    """A state dict as it is in a safetensors file, which shared tensors are in once."""
    state = huggingface_state(config)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}


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


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("options", [{}, {"div_val": 2}, {"untie_r": False}], ids=["one width", "narrowing", "shared"])
def test_a_hugging_face_folder_with_safetensors(tmp_path, options, num_files):
    config = write_hugging_face(tmp_path, options)
    expected = open_checkpoint(tmp_path)
    values = parameters(tmp_path)
    state = without_copies(config)
    assert len(state) < len(huggingface_state(config))
    files = write_safetensors(tmp_path, state, num_files)
    opened = open_checkpoint(tmp_path)
    assert isinstance(opened, TransformerXLCheckpoint)
    assert isinstance(expected, TransformerXLCheckpoint)
    assert (opened.config, opened.tokens_per_sample, opened.says_lengths) == (expected.config, 4, True)
    assert list(opened.paths) == files
    assert_equal(parameters(tmp_path), values)
    write_safetensors(tmp_path, huggingface_state(config), num_files)  # with the copies too
    assert_equal(parameters(tmp_path), values)


def test_parts_of_pytorch_model_bin(tmp_path):
    config = write_hugging_face(tmp_path, {})
    values = parameters(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    state = list(huggingface_state(config).items())
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, items in zip(names, (state[:5], state[5:]), strict=True):
        torch.save(dict(items), tmp_path / name)
    places = {name: names[index >= 5] for index, (name, _) in enumerate(state)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert_equal(parameters(tmp_path), values)


def test_of_two_files_the_safetensors_are_taken_as_transformers_takes_them(tmp_path):
    config = write_hugging_face(tmp_path, {})
    save_file({name: tensor + 1 for name, tensor in without_copies(config).items()}, tmp_path / "model.safetensors")
    assert [path.name for path in open_checkpoint(tmp_path).paths] == ["model.safetensors"]
    found = parameters(tmp_path)["layers.1.fc1.bias"]
    assert torch.equal(found, huggingface_state(config)["transformer.layers.1.pos_ff.CoreNet.0.bias"] + 1)


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


@pytest.mark.parametrize("num_files", [1, 2])
def test_shared_tensors_that_differ_in_safetensors(tmp_path, num_files):
    state = huggingface_state(write_hugging_face(tmp_path, {}))
    state["crit.out_layers.0.weight"] = state["crit.out_layers.0.weight"] + 1
    write_safetensors(tmp_path, dict(sorted(state.items())), num_files)
    with pytest.raises(CheckpointError, match=r"crit.out_layers.0.weight differs from transformer.word_emb"):
        parameters(tmp_path)


@pytest.mark.parametrize("num_files", [1, 3])
def test_safetensors_that_are_not_the_model(tmp_path, num_files):
    config = write_hugging_face(tmp_path, {})
    whole = without_copies(config)
    norm, table = "transformer.layers.1.pos_ff.layer_norm.bias", "transformer.word_emb.emb_layers.0.weight"

    def refused(state: dict[str, Tensor], message: str) -> None:
        write_safetensors(tmp_path, state, num_files)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(tmp_path)
        assert str(caught.value).startswith(str(tmp_path))

    refused({name: whole[name] for name in whole if name != norm}, f"has no {norm}")
    refused({name: whole[name] for name in whole if name != table}, f"has no {table}")
    refused(whole | {"lm_head.weight": torch.zeros(1)}, "lm_head.weight is no tensor of a Transformer-XL")
    refused(whole | {norm: torch.zeros(7)}, rf"\.safetensors: {norm} has shape \(7,\), expected \(8,\)")
    refused(whole | {table: torch.zeros(13)}, r"has shape \(13,\), expected \(5, 8\)")


def test_parts_that_are_not_one_model(tmp_path):
    config = write_hugging_face(tmp_path, {})
    files = write_safetensors(tmp_path, without_copies(config), 3)
    name = "transformer.layers.0.pos_ff.CoreNet.3.bias"
    held = load_file(files[2])
    save_file(held | {name: torch.zeros(8)}, files[2])
    with pytest.raises(CheckpointError, match=f"{files[2].name}: has {name}, which {files[1].name} has too"):
        open_checkpoint(tmp_path)
    save_file(held, files[2])
    assert open_checkpoint(tmp_path).num_parts == 3
    files[1].unlink()
    with pytest.raises(CheckpointError, match=f"{files[1].name}: cannot be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index.json: not an index of parts"):
        open_checkpoint(tmp_path)


def test_a_part_that_is_cut_short(tmp_path):
    files = write_safetensors(tmp_path, without_copies(write_hugging_face(tmp_path, {})), 2)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{files[1].name}: cut short"):
        open_checkpoint(tmp_path)


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


def test_safetensors_without_a_word_of_what_they_are(tmp_path):
    write_safetensors(tmp_path, without_copies(write_hugging_face(tmp_path, {})))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no model.json, nor transformers' config.json"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path):
    write_hugging_face(tmp_path, {})
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor pytorch_model.bin"):
        open_checkpoint(tmp_path)
