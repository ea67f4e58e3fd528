"""The split table fits the model: every parameter exactly once, and no dead row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmtools.models.architectures import transformer_lm
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.plans import TRANSFORMER_LM, Split, shard_bounds, split_of, unused_patterns

EVERY_PART = {"decoder_learned_pos": True, "layernorm_embedding": True, "decoder_normalize_before": True}


def model_with_every_part() -> TransformerLM:
    with torch.device("meta"):
        return TransformerLM(transformer_lm(32, decoder_layers=2, decoder_embed_dim=16, **EVERY_PART))


def test_every_parameter_matches_exactly_one_row():
    for name, _ in model_with_every_part().named_parameters():
        split_of(name, TRANSFORMER_LM)  # raises otherwise


def test_no_row_is_dead():
    names = [name for name, _ in model_with_every_part().named_parameters()]
    assert unused_patterns(names, TRANSFORMER_LM) == []


def test_a_name_outside_the_plan_or_twice_in_it_is_refused():
    with pytest.raises(KeyError, match="matches 0 rows"):
        split_of("layers.0.self_attn.qkv_proj.weight", TRANSFORMER_LM)
    with pytest.raises(KeyError, match="matches 2 rows"):
        split_of("fc1.weight", {"fc1.*": Split.COLUMN, "*.weight": Split.REPLICATED})


def test_split_parameters_have_the_dimension_that_is_cut_and_a_row_bias_is_whole():
    for name, parameter in model_with_every_part().named_parameters():
        split = split_of(name, TRANSFORMER_LM)
        assert split.dim is None or split.dim < parameter.dim(), name
    assert split_of("layers.0.fc2.bias", TRANSFORMER_LM) is Split.REPLICATED
    assert split_of("layers.0.self_attn.out_proj.bias", TRANSFORMER_LM) is Split.REPLICATED


@given(st.integers(0, 200), st.integers(1, 17))
def test_shards_are_those_of_torch_chunk(length, num_shards):
    bounds = [shard_bounds(length, num_shards, shard) for shard in range(num_shards)]
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(num_shards)] if length else []
    assert [stop - start for start, stop in bounds] == chunks + [0] * (num_shards - len(chunks))
    assert [bounds[0][0], *[stop for _, stop in bounds]] == [0, *[start for start, _ in bounds[1:]], length]
