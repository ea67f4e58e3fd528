"""The arithmetic between a loss and a perplexity, in nats, in bits, per token, per word and per byte.

A model that scores N tokens of a text with a total of L nats has

    loss         L / N nats, or L / N / ln 2 bits, per token
    perplexity   exp(L / N) = 2 ** (L / N / ln 2)

which depends on what a token is. Two tokenizations of one text share L, so that the perplexity per token of the other
one, say M words and line ends, is

    exp(L / M) = 2 ** (loss in bits * N / M)

(the renormalisation of the Megatron-11b example in fairseq, `examples/megatron_11b/README.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmtools.errors import DataError


@dataclass(frozen=True)
class Renormalized:
    """A loss per new token, expressed per original token, with every number that went into it.

    Attributes:
        loss_base2: bits per new token, as it was given.
        perplexity: per new token.
        new_tokens: how many tokens the model scored.
        orig_tokens: how many tokens the text has in the other tokenization.
        renormalized_loss_base2: bits per original token.
        renormalized_perplexity: per original token.
    """

    loss_base2: float
    perplexity: float
    new_tokens: int
    orig_tokens: int
    renormalized_loss_base2: float
    renormalized_perplexity: float


def renormalize(loss_base2: float, *, new_tokens: int, orig_tokens: int) -> Renormalized:
    """Express a loss per scored token as a perplexity per token of another tokenization of the same text.

    Args:
        loss_base2: bits per scored token, not rounded.
        new_tokens: how many tokens were scored; they make up the whole text.
        orig_tokens: how many tokens the whole text has in the other tokenization.

    Raises:
        DataError: the loss is not a positive number, a count is not positive, or the perplexity is too large for a
            float.
    """
    if not math.isfinite(loss_base2) or loss_base2 <= 0:
        raise DataError(
            f"loss of {loss_base2:g} bits per token: expected more than 0 (a perplexity above 1); "
            "0 is also what some tools print when they scored nothing"
        )
    _require_positive(new_tokens, "new tokens")
    _require_positive(orig_tokens, "original tokens")
    try:
        renormalized_loss_base2 = loss_base2 * (new_tokens / orig_tokens)
    except OverflowError as error:
        raise DataError("new tokens per original token: too large for a float") from error
    return Renormalized(
        loss_base2=loss_base2,
        perplexity=perplexity_of_bits(loss_base2),
        new_tokens=new_tokens,
        orig_tokens=orig_tokens,
        renormalized_loss_base2=renormalized_loss_base2,
        renormalized_perplexity=perplexity_of_bits(renormalized_loss_base2),
    )


def nats_to_bits(nats: float) -> float:
    """Natural to binary units."""
    return nats / math.log(2)


def bits_to_nats(bits: float) -> float:
    """Binary to natural units."""
    return bits * math.log(2)


def perplexity_of_bits(loss_base2: float) -> float:
    """The perplexity of a loss in bits per token.

    Raises:
        DataError: the loss is not a finite number, or the perplexity is too large for a float.
    """
    if not math.isfinite(loss_base2):
        raise DataError(f"loss of {loss_base2} bits per token: expected a finite number")
    try:
        return math.pow(2.0, loss_base2)
    except OverflowError as error:
        raise DataError(
            f"perplexity 2 ** {loss_base2:g}: too large for a float (the exponent's limit is 1024)"
        ) from error


def bits_of_perplexity(perplexity: float) -> float:
    """The loss in bits per token of a perplexity.

    Raises:
        DataError: the perplexity is not a positive finite number.
    """
    if not math.isfinite(perplexity) or perplexity <= 0:
        raise DataError(f"perplexity {perplexity:g}: expected a positive finite number")
    return math.log2(perplexity)


def word_perplexity(total_nats: float, num_words: int) -> float:
    """The perplexity per word of a text, whatever tokens it was scored in.

    Args:
        total_nats: negative log probability of the whole text.
        num_words: how many words it has, line ends included if they were predicted.

    Raises:
        DataError: a number is not finite or the count not positive, or the perplexity is too large for a float.
    """
    _require_positive(num_words, "words")
    return perplexity_of_bits(nats_to_bits(total_nats) / num_words)


def bits_per_byte(total_nats: float, num_bytes: int) -> float:
    """The bits that coding the text takes, per byte of it.

    Args:
        total_nats: negative log probability of the whole text.
        num_bytes: size of the text in bytes.

    Raises:
        DataError: a number is not finite or the count not positive.
    """
    _require_positive(num_bytes, "bytes")
    if not math.isfinite(total_nats):
        raise DataError(f"total loss of {total_nats} nats: expected a finite number")
    return nats_to_bits(total_nats) / num_bytes


def _require_positive(count: int, what: str) -> None:
    if count <= 0:
        raise DataError(f"{count:,} {what}: expected at least 1")
