"""The model alone: published sizes, positions as fairseq computes them, scoring from a position on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtools.checkpoints.models import new_model
from lmtools.models.architectures import ARCHITECTURES, TransformerLMConfig, transformer_lm, transformer_lm_megatron_11b
from lmtools.models.transformer_lm import (
    PAD_INDEX,
    TransformerLM,
    initialize_parameter,
    sinusoidal_positions,
)

VARIANTS = {
    "megatron": {
        "decoder_normalize_before": True,
        "activation_fn": "gelu",
        "share_decoder_input_output_embed": True,
    },
    "plain": {},
    "learned": {"decoder_learned_pos": True, "activation_fn": "gelu_accurate", "decoder_normalize_before": True},
    "no positions": {"no_token_positional_embeddings": True, "layernorm_embedding": True, "no_scale_embedding": True},
    "no final norm": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
}


def small_model(**overrides: object) -> TransformerLM:
    torch.manual_seed(0)
    shape = {
        "decoder_layers": 2,
        "decoder_embed_dim": 16,
        "decoder_ffn_embed_dim": 24,
        "decoder_attention_heads": 4,
        "max_target_positions": 12,
    }
    return TransformerLM(transformer_lm(11, **(shape | overrides))).double().eval()


def test_megatron_11b_has_its_published_size():
    with torch.device("meta"):
        model = TransformerLM(transformer_lm_megatron_11b(51_200, share_decoder_input_output_embed=True))
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_032_246_272


def test_presets_build():
    with torch.device("meta"):
        for name, preset in ARCHITECTURES.items():
            new_model(preset(vocab_size=100, **{"n_layer" if name == "transformer_xl" else "decoder_layers": 1}))


def test_sinusoidal_positions_are_the_formula():
    table = sinusoidal_positions(5, 8)
    for row in range(5):
        position = row + PAD_INDEX + 1
        angles = [position * math.exp(-i * math.log(10_000) / 3) for i in range(4)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert table[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_an_odd_width_ends_in_a_zero_column():
    assert (sinusoidal_positions(4, 7)[:, -1] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_scoring_from_a_position_gives_the_same_logits(variant):
    model = small_model(**VARIANTS[variant])
    tokens = torch.randint(4, 11, (3, 12))
    whole = model(tokens)
    for score_from in (0, 1, 7, 11):
        torch.testing.assert_close(model(tokens, score_from), whole[:, score_from:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_on_the_right_changes_nothing_before_it(variant):
    model = small_model(**VARIANTS[variant])
    tokens = torch.randint(4, 11, (3, 9))
    torch.testing.assert_close(model(F.pad(tokens, (0, 3), value=PAD_INDEX))[:, :9], model(tokens))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_a_later_token(variant):
    model = small_model(**VARIANTS[variant])
    tokens = torch.randint(4, 11, (1, 10))
    changed = tokens.clone()
    changed[0, 6] = 4 + (tokens[0, 6] - 4 + 1) % 7
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


def slow_reference(model: TransformerLM, tokens: Tensor) -> Tensor:
    """The pre-norm GELU model written out head by head from its definition, for one row of tokens."""
    config = model.config
    x = model.embed_tokens(tokens) * math.sqrt(config.decoder_embed_dim)
    x = x + sinusoidal_positions(len(tokens), config.decoder_embed_dim).double()
    for layer in model.layers:
        h = layer.self_attn_layer_norm(x)
        q, k, v = layer.self_attn.q_proj(h), layer.self_attn.k_proj(h), layer.self_attn.v_proj(h)
        heads = []
        for head in range(config.decoder_attention_heads):
            part = slice(head * config.head_dim, (head + 1) * config.head_dim)
            scores = q[:, part] @ k[:, part].T / math.sqrt(config.head_dim)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(dim=-1) @ v[:, part])
        x = x + layer.self_attn.out_proj(torch.cat(heads, dim=-1))
        h = layer.fc1(layer.final_layer_norm(x))
        x = x + layer.fc2(0.5 * h * (1 + torch.erf(h / math.sqrt(2))))
    return model.layer_norm(x) @ model.embed_tokens.weight.T


def test_the_model_is_its_definition():
    model = small_model(**VARIANTS["megatron"])
    tokens = torch.randint(4, 11, (12,))
    torch.testing.assert_close(model(tokens[None])[0], slow_reference(model, tokens))


def test_tied_weights_are_one_parameter():
    model = small_model(share_decoder_input_output_embed=True)
    assert model.output_projection.weight is model.embed_tokens.weight


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="3 heads do not divide decoder_embed_dim 16"):
        small_model(decoder_attention_heads=3)


def test_initial_values_depend_on_the_generator_alone():
    model = small_model(**VARIANTS["learned"])
    for name, parameter in model.named_parameters():
        first, second = torch.empty_like(parameter), torch.empty_like(parameter)
        for tensor in (first, second):
            initialize_parameter(name, tensor, torch.Generator().manual_seed(7))
        assert torch.equal(first, second), name


def test_initial_matrices_have_fairseqs_spread():
    config = TransformerLMConfig(vocab_size=500, decoder_embed_dim=64, decoder_ffn_embed_dim=256)
    generator = torch.Generator().manual_seed(1)
    q = torch.empty(64, 64)
    initialize_parameter("layers.0.self_attn.q_proj.weight", q, generator)
    bound = math.sqrt(6 / 128) / math.sqrt(2)
    assert bound * 0.98 < q.abs().max() <= bound
    embedding = torch.empty(config.vocab_size, 64)
    initialize_parameter("embed_tokens.weight", embedding, generator)
    assert embedding.std() == pytest.approx(64**-0.5, rel=0.02)
    assert (embedding[PAD_INDEX] == 0).all()


def test_a_parameter_that_the_model_does_not_have_is_refused():
    with pytest.raises(KeyError):
        initialize_parameter("layers.0.qkv.weight", torch.empty(2, 2), torch.Generator())
