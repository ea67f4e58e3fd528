"""What is said of a model's size without building it is a little less than what it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmtools.checkpoints.models import model_config, new_model
from lmtools.models.architectures import ARCHITECTURES
from lmtools.models.size import num_matrix_elements

LM: dict[str, Any] = {"decoder_layers": 2, "decoder_embed_dim": 64, "decoder_ffn_embed_dim": 96}
XL: dict[str, Any] = {"n_layer": 2, "d_model": 64, "n_head": 4, "d_head": 12, "d_inner": 96, "cutoffs": (100, 300)}


def elements(config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in new_model(config).parameters())


@pytest.mark.parametrize(
    "fields",
    [
        LM,
        LM | {"share_decoder_input_output_embed": True},
        LM | {"decoder_normalize_before": True, "no_token_positional_embeddings": True},
        LM | {"decoder_learned_pos": True, "layernorm_embedding": True, "max_target_positions": 16},
        XL,
        XL | {"div_val": 2},
        XL | {"adaptive": False, "cutoffs": ()},
        XL | {"untie_r": False, "not_tied": True},
    ],
    ids=str,
)
def test_nearly_all_of_small_models(fields):
    config = model_config(fields, 1000)
    assert 0.6 < num_matrix_elements(config) / elements(config) <= 1


def test_megatron_11b():
    config = ARCHITECTURES["transformer_lm_megatron_11b"](51200, share_decoder_input_output_embed=True)
    assert num_matrix_elements(config) == 72 * (4 * 3072 * 3072 + 2 * 3072 * 18432) + 51200 * 3072 == 11_028_922_368
