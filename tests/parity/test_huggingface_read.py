"""Models that transformers made and saved, in lmtools: the same logits, on any mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.reshard import reshard
from lmtools.errors import CheckpointError
from tests.support.logits import logits_on_a_mesh, some_tokens
from tests.support.ranks import run_ranks
from tests.support.transformers_models import MODELS, save

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    expected = save(tmp_path, MODELS[name])(some_tokens()).logits
    torch.testing.assert_close(logits_on_a_mesh(tmp_path, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "xglm"])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_any_mesh(name, tp, tmp_path):
    """q, k and v of GPT-2 are one tensor, of which each rank reads its heads' part of each third."""
    expected = save(tmp_path, MODELS[name])(some_tokens()).logits
    for found in run_ranks(tp, logits_on_a_mesh, tmp_path, tp):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "xglm"])
def test_in_several_files_and_as_torch_saves_it(name, tmp_path):
    model = save(tmp_path / "parts", MODELS[name], max_shard_size="10kB")
    assert len(open_checkpoint(tmp_path / "parts").paths) > 2
    expected = logits_on_a_mesh(tmp_path / "parts", 1)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text((tmp_path / "parts" / "config.json").read_text())
    # The masks that GPT-2's old checkpoints hold, and names without a prefix, as OpenAI's own has them.
    state = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    state |= (
        {"h.0.attn.bias": torch.ones(1, 1, 20, 20), "h.1.attn.masked_bias": torch.tensor(-1e4)}
        if name == "gpt2"
        else {}
    )
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    assert torch.equal(logits_on_a_mesh(tmp_path / "bin", 1), expected)


def test_what_lmtools_exported_comes_back_bit_for_bit(tmp_path):
    source = open_checkpoint(GOLDEN / "mp4")
    reshard(GOLDEN / "mp4", tmp_path / "hf", num_parts=1, format="hf")
    back = open_checkpoint(tmp_path / "hf")
    assert back.config == source.config
    for name, tensor in back.tensors.items():
        slices = tuple(slice(0, length) for length in tensor.shape)
        assert torch.equal(back.read(name, slices), source.read(name, slices))


# --- what is refused ---


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED = {
    "another model": ({"model_type": "llama"}, "model_type is 'llama', lmtools loads xglm, gpt2 and transfo-xl"),
    "no layer": ({"n_layer": 0}, "has decoder_layers=0"),
    "a text for a number": ({"n_embd": "24"}, "has decoder_embed_dim='24'"),
    "no vocabulary": ({"vocab_size": None}, "has vocab_size=None"),
    "another epsilon": ({"layer_norm_epsilon": 1e-6}, "has layer_norm_epsilon=1e-06, lmtools has 1e-05 only"),
    "other attention": ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx=True"),
    "other activation": ({"activation_function": "silu"}, "activation_function='silu', expected one of relu, gelu"),
    "more layers": ({"n_layer": 3}, "layers.2.fc1.bias is missing"),
    "fewer layers": ({"n_layer": 1}, "layers.1.fc1.bias is not of the model"),
    "other width": ({"n_inner": 48}, r"fc1.bias has shape \(96,\), config.json says \(48,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_not_what_it_says(case, tmp_path):
    changes, message = REFUSED[case]
    save(tmp_path, MODELS["gpt2"])
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_config_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"not a readable config.json"):
        open_checkpoint(tmp_path)


def test_a_missing_part(tmp_path):
    save(tmp_path, MODELS["gpt2"], max_shard_size="10kB")
    path = open_checkpoint(tmp_path).paths[1]
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name}: cannot be read"):
        open_checkpoint(tmp_path)


def test_an_index_that_leads_elsewhere(tmp_path):
    save(tmp_path, MODELS["gpt2"], max_shard_size="10kB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="not an index of parts"):
        open_checkpoint(tmp_path)


def test_no_parameters(tmp_path):
    save(tmp_path, MODELS["gpt2"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor pytorch_model.bin"):
        open_checkpoint(tmp_path)


def test_learned_positions_read_in_slices(tmp_path):
    """Two rows that no token has stand on top of GPT-2's."""
    model = save(tmp_path, MODELS["gpt2"])
    checkpoint = open_checkpoint(tmp_path)
    whole = checkpoint.read("embed_positions.weight", (slice(0, 22), slice(0, 24)))
    assert torch.equal(whole[2:], model.transformer.wpe.weight)
    for start, stop in ((0, 1), (1, 2), (1, 5), (2, 22), (7, 9), (3, 3)):
        found = checkpoint.read("embed_positions.weight", (slice(start, stop), slice(3, 9)))
        assert torch.equal(found, whole[start:stop, 3:9])
