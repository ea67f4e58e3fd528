"""Nats, bits, perplexities: the published numbers, the identities between them, and what is not a number of any use."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import DataError
from lmtools.evaluate.perplexity import (
    bits_of_perplexity,
    bits_per_byte,
    bits_to_nats,
    nats_to_bits,
    perplexity_of_bits,
    renormalize,
    word_perplexity,
)

PUBLISHED = (8.46, 270_847, 245_566)
"""Megatron-11b on WikiText-103: perplexity per BPE token, BPE tokens, words by `split(" ")`."""

losses = st.floats(0.01, 30.0)
counts = st.integers(1, 10**9)


def test_the_published_number() -> None:
    perplexity, new_tokens, orig_tokens = PUBLISHED
    outcome = renormalize(bits_of_perplexity(perplexity), new_tokens=new_tokens, orig_tokens=orig_tokens)
    assert f"{outcome.renormalized_perplexity:.2f}" == "10.54"
    assert f"{outcome.loss_base2:.4f}" == "3.0807"
    assert f"{outcome.perplexity:.2f}" == "8.46"
    assert (outcome.new_tokens, outcome.orig_tokens) == (new_tokens, orig_tokens)


def test_the_count_by_words_and_line_ends_gives_the_same_two_decimals() -> None:
    outcome = renormalize(bits_of_perplexity(8.46), new_tokens=270_847, orig_tokens=245_569)
    assert f"{outcome.renormalized_perplexity:.2f}" == "10.54"


def test_a_loss_that_was_rounded_first_gives_another_number() -> None:
    exact = renormalize(3.0806576633452254, new_tokens=270_847, orig_tokens=245_566)
    rounded = renormalize(3.08, new_tokens=270_847, orig_tokens=245_566)
    assert abs(exact.renormalized_perplexity - rounded.renormalized_perplexity) > 0.005


def test_known_units() -> None:
    assert nats_to_bits(math.log(2)) == 1.0
    assert bits_to_nats(1.0) == math.log(2)
    assert perplexity_of_bits(3.0) == 8.0
    assert bits_of_perplexity(8.0) == 3.0
    assert bits_per_byte(math.log(2) * 100, 50) == pytest.approx(2.0)
    assert word_perplexity(math.log(2) * 100, 50) == pytest.approx(4.0)


@given(bits=losses)
def test_conversions_undo_each_other(bits: float) -> None:
    assert nats_to_bits(bits_to_nats(bits)) == pytest.approx(bits)
    assert bits_of_perplexity(perplexity_of_bits(bits)) == pytest.approx(bits)
    assert perplexity_of_bits(bits) == pytest.approx(math.exp(bits_to_nats(bits)))


@given(bits=losses, count=counts)
def test_the_same_tokens_renormalise_to_the_same_perplexity(bits: float, count: int) -> None:
    outcome = renormalize(bits, new_tokens=count, orig_tokens=count)
    assert outcome.renormalized_loss_base2 == bits
    assert outcome.renormalized_perplexity == outcome.perplexity


@given(bits=losses, new_tokens=st.integers(1, 10**6), orig_tokens=st.integers(10**5, 10**6))
def test_renormalising_keeps_the_total(bits: float, new_tokens: int, orig_tokens: int) -> None:
    outcome = renormalize(bits, new_tokens=new_tokens, orig_tokens=orig_tokens)
    total_nats = bits_to_nats(bits) * new_tokens
    assert bits_to_nats(outcome.renormalized_loss_base2) * orig_tokens == pytest.approx(total_nats)
    assert outcome.renormalized_perplexity == pytest.approx(word_perplexity(total_nats, orig_tokens))


@pytest.mark.parametrize("loss", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_loss_that_none_can_be_is_refused(loss: float) -> None:
    with pytest.raises(DataError, match="bits per token: expected more than 0"):
        renormalize(loss, new_tokens=10, orig_tokens=10)


@pytest.mark.parametrize(
    ("new_tokens", "orig_tokens", "what"),
    [(0, 5, "0 new"), (-1, 5, "-1 new"), (5, 0, "0 original"), (5, -2, "-2 orig")],
)
def test_a_count_that_none_can_be_is_refused(new_tokens: int, orig_tokens: int, what: str) -> None:
    with pytest.raises(DataError, match=f"{what}.*expected at least 1"):
        renormalize(3.0, new_tokens=new_tokens, orig_tokens=orig_tokens)


@pytest.mark.parametrize("perplexity", [0.0, -8.46, math.nan, math.inf])
def test_a_perplexity_that_none_can_be_is_refused(perplexity: float) -> None:
    with pytest.raises(DataError, match="expected a positive finite number"):
        bits_of_perplexity(perplexity)


def test_what_no_float_can_hold_is_refused() -> None:
    with pytest.raises(DataError, match="too large for a float"):
        perplexity_of_bits(1024.0)
    with pytest.raises(DataError, match="too large for a float"):
        renormalize(3.0, new_tokens=1000, orig_tokens=2)
    with pytest.raises(DataError, match="too large for a float"):
        renormalize(3.0, new_tokens=10**400, orig_tokens=2)
    with pytest.raises(DataError, match="expected a finite number"):
        perplexity_of_bits(math.nan)


@pytest.mark.parametrize("total", [math.nan, math.inf])
def test_totals_that_are_no_numbers_are_refused(total: float) -> None:
    with pytest.raises(DataError, match="expected a finite number"):
        bits_per_byte(total, 10)
    with pytest.raises(DataError, match="expected a finite number"):
        word_perplexity(total, 10)


@pytest.mark.parametrize("function", [bits_per_byte, word_perplexity])
def test_nothing_to_divide_by_is_refused(function: object) -> None:
    with pytest.raises(DataError, match="expected at least 1"):
        function(1.0, 0)  # type: ignore[operator]


def test_needs_neither_torch_nor_numpy() -> None:
    code = "import lmtools.evaluate.perplexity, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
