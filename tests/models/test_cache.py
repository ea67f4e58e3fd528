"""Reading on with a cache gives what reading everything at once gives."""

from __future__ import annotations

import pytest
import torch

from lmtools.models.architectures import transformer_lm
from lmtools.models.cache import KeyValueCache
from lmtools.models.transformer_lm import PAD_INDEX, TransformerLM

VARIANTS = {
    "pre-norm": {"decoder_normalize_before": True, "activation_fn": "gelu"},
    "post-norm": {},
    "learned": {"decoder_learned_pos": True, "decoder_normalize_before": True},
    "no positions": {"no_token_positional_embeddings": True, "layernorm_embedding": True},
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
    return TransformerLM(transformer_lm(11, **(shape | overrides))).double().eval().requires_grad_(False)


def cache_of(num_rows: int, capacity: int = 12) -> KeyValueCache:
    return KeyValueCache(num_rows, capacity=capacity, device=torch.device("cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6]])
def test_in_any_pieces(variant, pieces):
    model = small_model(**VARIANTS[variant])
    tokens = torch.randint(4, 11, (3, 12))
    cache = cache_of(3)
    features = []
    for piece in tokens.split(pieces, dim=1):
        features.append(model.features(piece, cache=cache))
        cache.advance(torch.full((3,), piece.shape[1]))
    torch.testing.assert_close(torch.cat(features, dim=1), model.features(tokens))
    assert cache.lengths.tolist() == [12, 12, 12]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_different_lengths(variant):
    """A row's next token takes the place of its padding."""
    model = small_model(**VARIANTS[variant])
    tokens = torch.randint(4, 11, (3, 9))
    lengths = torch.tensor([2, 7, 4])
    padded = tokens[:, :7].masked_fill(torch.arange(7) >= lengths[:, None], PAD_INDEX)
    cache = cache_of(3)
    model.features(padded, cache=cache)
    cache.advance(lengths)
    for step in range(2):
        next_tokens = tokens.gather(1, (lengths + step)[:, None])
        features = model.features(next_tokens, cache=cache)
        cache.advance(torch.ones(3, dtype=torch.int64))
        for row in range(3):
            alone = model.features(tokens[row : row + 1, : lengths[row] + step + 1])[0, -1]
            torch.testing.assert_close(features[row, 0], alone)


def test_rows_may_be_dropped_repeated_and_reordered():
    model = small_model()
    tokens = torch.randint(4, 11, (3, 6))
    cache = cache_of(3)
    model.features(tokens[:, :5], cache=cache)
    cache.advance(torch.tensor([5, 5, 5]))
    rows = torch.tensor([2, 0, 2, 2])
    cache.select(rows)
    features = model.features(tokens[rows, 5:], cache=cache)
    torch.testing.assert_close(features[:, 0], model.features(tokens)[rows, -1])


def test_a_full_cache_takes_no_more():
    model, cache = small_model(), cache_of(1, capacity=3)
    with pytest.raises(ValueError, match="4 tokens for a cache of 3"):
        model.features(torch.full((1, 4), 5), cache=cache)
