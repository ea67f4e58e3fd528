"""Genuine fairseq's Transformer-XL, token by token: log-probabilities, losses and gradients."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtools.checkpoints.transformer_xl_names import config_from_settings, parameter_sources
from lmtools.checkpoints.unpickle import plain, read_torch_file
from lmtools.data.indexed import IndexedDataset
from lmtools.models.transformer_xl import TransformerXL, zero_memories
from tests.support.arrays import read_npz


def load(path: Path, **overrides: Any) -> TransformerXL:
    """fairseq's checkpoint, with options overridden as by its --model-overrides."""
    content = read_torch_file(path).content
    state: Mapping[str, Tensor] = {name: lazy.read() for name, lazy in content["model"].items()}
    prefix = "decoder.model.transformer.word_emb.emb_layers."
    vocab_size = sum(tensor.shape[0] for name, tensor in state.items() if name.startswith(prefix))
    config = config_from_settings(plain(content["cfg"])["model"], vocab_size, str(path))
    model = TransformerXL(dataclasses.replace(config, **overrides))
    sources = parameter_sources(state, model.config, str(path))
    model.load_state_dict({name: source.take(state) for name, source in sources.items()}, strict=False)
    assert sources.keys() == dict(model.named_parameters()).keys()
    return model


def blocks(prefix: Path, tokens_per_sample: int, batch_size: int) -> list[Tensor]:
    """fairseq's batches: the list of blocks cut into `batch_size` runs, the rest dropped."""
    data = IndexedDataset(prefix)
    stream = torch.from_numpy(np.concatenate([data[i] for i in range(len(data))]).astype(np.int64))
    cut = stream.split(tokens_per_sample)
    length = len(cut) // batch_size
    return [torch.stack([cut[row * length + i] for row in range(batch_size)]) for i in range(length)]


def score(model: TransformerXL, batches: list[Tensor], *, keep_projections: bool) -> list[Tensor]:
    """fairseq's evaluation: the first of each block is never a target, and the memory starts as zeros."""
    nll = []
    memories = zero_memories(model.config, len(batches[0]), next(model.parameters())) or None
    with torch.no_grad():
        for tokens in batches:
            # fairseq also runs the last token of a block, whose target is padding: it is remembered.
            targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
            scores, memories = model(tokens, targets, memories, keep_projections=keep_projections)
            nll.append(scores[:, :-1])
    return nll


def assert_equal_to_fairseq(nll: list[Tensor], batches: list[Tensor], evaluation: Path) -> None:
    recorded = read_npz(evaluation.with_suffix(".npz"))
    targets = torch.cat([tokens[:, 1:].flatten() for tokens in batches])
    np.testing.assert_array_equal(targets, recorded["tokens"])
    scores = -torch.cat([block.flatten() for block in nll])
    np.testing.assert_allclose(scores, recorded["scores"], rtol=0, atol=1e-4)
    published = json.loads(evaluation.with_suffix(".json").read_text())["loss_base2"]
    assert -scores.double().mean().item() / math.log(2) == pytest.approx(published, rel=1e-5)


OWN: dict[str, tuple[int, dict[str, Any]]] = {
    "mem0_t16": (16, {"mem_len": 0}),
    "mem16_t16": (16, {"mem_len": 16}),
    "mem32_t8": (8, {"mem_len": 32}),
    "mem32_t8_clamp20_same": (8, {"mem_len": 32, "clamp_len": 20, "same_length": True}),
}


@pytest.mark.parametrize("keep_projections", [False, True])
@pytest.mark.parametrize("case", OWN)
def test_own_model(golden: Path, case, keep_projections):
    """Two layers, div_val 2, cutoffs [40, 80] of 144 types."""
    tokens_per_sample, overrides = OWN[case]
    model = load(golden / "txl" / "checkpoint_last.pt", **overrides)
    batches = blocks(golden / "bin" / "test", tokens_per_sample, 1)
    nll = score(model, batches, keep_projections=keep_projections)
    assert_equal_to_fairseq(nll, batches, golden / "txl" / "eval" / case)


SHARED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mem0_t32": (32, 1, {"mem_len": 0}),
    "mem32_t32": (32, 1, {"mem_len": 32}),
    "mem32_t32_bs4": (32, 4, {"mem_len": 32}),
    "mem64_t16_same": (16, 1, {"mem_len": 64, "same_length": True}),
    "mem64_t16_clamp10": (16, 1, {"mem_len": 64, "clamp_len": 10}),
    "mem64_t16_clamp40_same": (16, 1, {"mem_len": 64, "clamp_len": 40, "same_length": True}),
}


@pytest.mark.shared
@pytest.mark.parametrize("case", SHARED)
def test_wikitext_model(shared_golden: Path, case):
    """Three layers, div_val 1, cutoffs [200, 500] of 1,008 types."""
    tokens_per_sample, batch_size, overrides = SHARED[case]
    model = load(shared_golden / "txl" / "div1" / "checkpoint_last.pt", **overrides)
    batches = blocks(shared_golden / "bin" / "built_1k" / "test", tokens_per_sample, batch_size)
    nll = score(model, batches, keep_projections=True)
    assert_equal_to_fairseq(nll, batches, shared_golden / "txl" / "div1" / "eval" / case)


def assert_first_update_is_fairseqs(folder: Path, data: Path) -> None:
    """Loss and gradient norm of the first update, from the initial checkpoint and a memory of zeros.

    Here in float64, which is the same on every processor; fairseq's norm in float32 is up to 1.0e-5 from it.
    """
    with open(folder / "updates.rank0.jsonl", encoding="utf-8") as lines:
        update = json.loads(lines.readline())
    model = load(folder / "checkpoint_init.pt").double()
    tokens_per_sample = model.config.mem_len  # as these were trained
    tokens = blocks(data / "train", tokens_per_sample, 4)[0]
    nll, _ = model(tokens[:, :-1], tokens[:, 1:], zero_memories(model.config, 4, next(model.parameters())))
    assert nll.sum().item() == pytest.approx(update["micro"][0]["loss_sum"], rel=1e-6)
    (nll.sum() / tokens.numel()).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert norm.item() == pytest.approx(update["gnorm"], rel=1.1e-5)


def test_own_models_first_update(golden: Path):
    assert_first_update_is_fairseqs(golden / "txl", golden / "bin")


@pytest.mark.shared
def test_wikitext_models_first_update(shared_golden: Path):
    assert_first_update_is_fairseqs(shared_golden / "txl" / "div1", shared_golden / "bin" / "built_1k")
