"""Hugging Face's Transformer-XL: scores, gradients and names, from a file that its last version made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.checkpoints.transformer_xl_names import config_from_settings, parameter_sources
from lmtools.models.transformer_xl import TransformerXL, zero_memories
from lmtools.parallel.mesh import make_mesh

FIXTURE = Path(__file__).with_name("transformer_xl.safetensors")
CASES = ("plain", "narrowing", "pre_lnorm", "projected", "unshared", "one_cluster")


def read(case: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What make_transformer_xl.py wrote: Hugging Face's config.json and the case's tensors."""
    with safe_open(FIXTURE, "pt") as file:
        config = json.loads(file.metadata()["configs"])[case]
        names = [name for name in file.keys() if name.startswith(f"{case}.")]  # noqa: SIM118 (it is no dict)
        return config, {name.removeprefix(f"{case}."): file.get_tensor(name) for name in names}


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def build(settings: dict[str, Any], state: dict[str, Tensor]) -> TransformerXL:
    model = TransformerXL(config_from_settings(settings, settings["vocab_size"], "config.json"))
    sources = parameter_sources(state, model.config, "state")
    assert sources.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict({name: source.take(state) for name, source in sources.items()}, strict=False)
    return model


def segments(tensors: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, their targets, and theirs of the scores; the last token of a segment has no target."""
    for index in range(2):
        tokens = tensors[f"tokens.{index}"]
        yield tokens, F.pad(tokens[:, 1:], (0, 1), value=-100), tensors[f"nll.{index}"]


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients(case):
    settings, tensors = read(case)
    state = part(tensors, "state.")
    model = build(settings, state)
    memories = zero_memories(model.config, 2, next(model.parameters()))
    total = torch.zeros(())
    for tokens, targets, expected in segments(tensors):
        nll, memories = model(tokens, targets, memories)
        torch.testing.assert_close(nll[:, :-1], expected, rtol=0, atol=1e-5)
        total = total + nll.sum()
    total.backward()
    gradients = part(tensors, "grad.")
    for name, source in parameter_sources(state, model.config, "state").items():
        torch.testing.assert_close(
            model.get_parameter(name).grad, source.take(gradients), rtol=1e-4, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_of_all_types(case):
    settings, tensors = read(case)
    model = build(settings, part(tensors, "state."))
    features, _ = model.features(tensors["tokens.0"], zero_memories(model.config, 2, next(model.parameters())))
    log_probs = model.adaptive_softmax.log_probs(features)
    torch.testing.assert_close(log_probs, tensors["log_probs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_scores_with_keys_and_values_as_memory(case):
    settings, tensors = read(case)
    model = build(settings, part(tensors, "state."))
    memories = zero_memories(model.config, 2, next(model.parameters()))
    with torch.no_grad():
        for tokens, targets, expected in segments(tensors):
            nll, memories = model(tokens, targets, memories, keep_projections=True)
            torch.testing.assert_close(nll[:, :-1], expected, rtol=0, atol=1e-5)


def save(folder: Path, case: str, num_files: int) -> None:
    """The case as `save_pretrained` saves it today: shared tensors once, and an index of the files if they are many."""
    with safe_open(FIXTURE, "pt") as file:
        names = json.loads(file.metadata()["names"])[case]
    settings, tensors = read(case)
    assert settings["model_type"] == "transfo-xl"
    (folder / "config.json").write_text(json.dumps(settings))
    state = part(tensors, "state.")
    assert set(names) <= state.keys()
    if num_files == 1:
        save_file({name: state[name] for name in names}, folder / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{index + 1:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]
    weight_map = {name: files[index % num_files] for index, name in enumerate(names)}
    for file_name in files:
        of_file = {name: state[name] for name, place in weight_map.items() if place == file_name}
        save_file(of_file, folder / file_name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_scores_of_a_folder_with_safetensors(tmp_path, case, num_files):
    save(tmp_path, case, num_files)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.num_parts == num_files
    model = load_model(checkpoint, make_mesh(torch.device("cpu"), dp=1, tp=1), torch.float32)
    assert isinstance(model, TransformerXL)
    memories = zero_memories(model.config, 2, next(model.parameters()))
    for tokens, targets, expected in segments(read(case)[1]):
        nll, memories = model(tokens, targets, memories)
        torch.testing.assert_close(nll[:, :-1], expected, rtol=0, atol=1e-5)
