"""A Transformer-XL's memory as the cache: a row's probabilities are those of its own tokens, read one by one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtools.errors import ConfigError
from lmtools.generate import reading
from lmtools.generate.reading import MemoryReader, start_reading
from lmtools.models.transformer_xl import TransformerXL
from tests.generate.models import CPU, EOS, MEMORIES, NUM_TYPES, golden_model, slow_log_probs


def golden_transformer_xl(name: str) -> TransformerXL:
    model = golden_model(name)
    assert isinstance(model, TransformerXL)
    return model


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return [EOS, *random.Random(seed).choices(range(4, NUM_TYPES), k=count - 1)]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MEMORIES)
def test_probabilities_are_of_all_types_and_sum_to_one(name):
    reader = start_reading(golden_model(name), 2, capacity=9, device=CPU)
    log_probs = reader.read([[EOS, 5], [EOS, 90]])
    assert log_probs.shape == (2, NUM_TYPES)
    assert_close(log_probs.exp().sum(dim=-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("segment_len", [1, 4, 7, 256])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_prompt_longer_than_the_memory_is_read_in_any_segments(name, segment_len, monkeypatch):
    monkeypatch.setattr(reading, "_SEGMENT_LEN", segment_len)
    model, tokens = golden_transformer_xl(name), some_tokens(23)
    reader = MemoryReader(model, CPU)
    assert_close(reader.read([tokens])[0], slow_log_probs(model, tokens))
    assert_close(reader.read([[7]])[0], slow_log_probs(model, [*tokens, 7]))


def test_a_memory_of_everything_is_no_memory():
    """One pass over all tokens, with nothing remembered."""
    model, tokens = golden_transformer_xl("txl, long"), some_tokens(30)
    reader = MemoryReader(model, CPU)
    for end in range(12, 31):
        log_probs = reader.read([tokens[:12] if end == 12 else [tokens[end - 1]]])
        features, _ = model.features(torch.tensor([tokens[:end]]))
        assert_close(log_probs[0], model.adaptive_softmax.log_probs(features[0, -1]))


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_that_come_and_go_and_differ_in_length(name, seed, monkeypatch):
    """What one row has read, or lacks, is never seen by another."""
    monkeypatch.setattr(reading, "_SEGMENT_LEN", 5)
    model, choice = golden_transformer_xl(name), random.Random(seed)
    reader = MemoryReader(model, CPU)
    rows: list[list[int]] = [[] for _ in range(4)]
    for round_ in range(7):
        new = [
            choice.choices(range(4, NUM_TYPES), k=choice.choice([1, 1, 2, 9]) if round_ % 3 == 0 else 1) for _ in rows
        ]
        rows = [[*row, *tokens] for row, tokens in zip(rows, new, strict=True)]
        log_probs = reader.read(new)
        for row, found in zip(rows, log_probs, strict=True):
            assert_close(found, slow_log_probs(model, row))
        kept = choice.choices(range(len(rows)), k=choice.choice([2, 3, 5]))
        reader.select(kept)
        rows = [rows[row] for row in kept]


def test_padding_goes_with_the_row_that_needed_it():
    reader = MemoryReader(golden_transformer_xl("txl, long"), CPU)
    reader.read([some_tokens(20), some_tokens(3)])
    assert reader._remembered is not None
    assert reader._remembered.memories[0].keys.shape[:2] == (2, 20)
    reader.select([1])
    assert reader._remembered.memories[0].keys.shape[:2] == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_len": 0}, "remembers nothing \\(mem_len 0\\)"),
        ({"ext_len": 2}, "leaves the last 2 positions out of its memory"),
    ],
)
def test_a_model_that_cannot_read_on_is_refused(options: dict[str, Any], message):
    model = golden_transformer_xl("txl")
    model.config = dataclasses.replace(model.config, **options)
    with pytest.raises(ConfigError, match=message):
        MemoryReader(model, CPU)
