"""The result of an evaluation: the perplexity, with every count and setting that went into it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmtools import __version__
from lmtools.data.indexed import bin_path, idx_path
from lmtools.evaluate.perplexity import bits_per_byte, nats_to_bits, perplexity_of_bits
from lmtools.evaluate.scoring import Scores
from lmtools.evaluate.splits import EvalSplit
from lmtools.files import sha256_file

FORMAT = "lmtools-eval"
FORMAT_VERSION = 1


def result_of(
    split: EvalSplit,
    scores: Scores,
    *,
    settings: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    original_from: str | None,
    seconds: float,
) -> dict[str, Any]:
    """Everything that is known about one evaluated split, as JSON values.

    Args:
        split: what was scored.
        scores: float32 natural-log probabilities of all its scored tokens.
        settings: the options, mesh and checkpoint of the run; merged into the result.
        original: counts of the original text, with the keys of `OriginalText`, or None.
        original_from: where these counts come from: `manifest` or `given`.
        seconds: wall-clock time of scoring.

    Returns:
        A mapping whose sums are float64 and whose counts are exact. `word_perplexity` and `bits_per_byte` are null
        when the original counts are unknown or part of the split was not scored.
    """
    num_scored = len(scores)
    assert num_scored == split.tokens_to_score, "every token of every window is scored exactly once"
    total_nats = -float(np.sum(scores, dtype=np.float64))
    loss_nats = total_nats / num_scored
    loss_base2 = nats_to_bits(loss_nats)
    whole: Mapping[str, Any] = original if original is not None and split.tokens_skipped == 0 else {}
    total_bits = nats_to_bits(total_nats)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "subset": split.name,
        "loss_base2": loss_base2,
        "loss_nats": loss_nats,
        "total_nats": total_nats,
        "perplexity": perplexity_of_bits(loss_base2),
        "tokens_scored": num_scored,
        "tokens_in_split": split.tokens_in_split,
        "tokens_skipped": split.tokens_skipped,
        "num_sentences": split.num_sentences,
        "num_windows": len(split.windows),
        "word_perplexity": perplexity_of_bits(total_bits / whole["tokens"]) if whole.get("tokens") else None,
        "bits_per_byte": bits_per_byte(total_nats, whole["num_bytes"]) if whole.get("num_bytes") else None,
        "original": original,
        "original_from": original_from,
        **settings,
        "data_sha256": data_hashes(split),
        "versions": versions(),
        "seconds": seconds,
        "tokens_per_second": num_scored / seconds if seconds > 0 else None,
    }


def data_hashes(split: EvalSplit) -> dict[str, str]:
    """The sha256 of each file that the split was read from."""
    files = [bin_path(split.prefix), idx_path(split.prefix), split.prefix.with_name("dict.txt")]
    return {path.name: sha256_file(path) for path in files}


def checkpoint_hashes(paths: Sequence[Path]) -> dict[str, str]:
    """The sha256 of each file of a checkpoint."""
    return {path.name: sha256_file(path) for path in paths}


def versions() -> dict[str, str]:
    """What computed a number."""
    return {
        "lmtools": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
