"""The result of an evaluation: the perplexity, with every count and setting that went into it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lmtools import __version__
from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.perplexity import bits_per_byte, nats_to_bits, perplexity_of_bits, word_perplexity
from lmtools.evaluate.run import ScoredSplit
from lmtools.evaluate.splits import EvalSplit
from lmtools.files import sha256_file
from lmtools.parallel.mesh import Mesh

FORMAT = "lmtools-eval"
FORMAT_VERSION = 1


def result_of(
    split: EvalSplit,
    scored: ScoredSplit,
    *,
    settings: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    original_from: str | None,
) -> dict[str, Any]:
    """Everything that is known about one evaluated split, as JSON values.

    Args:
        split: what was scored.
        scored: all its scores.
        settings: the options, mesh and checkpoint of the run; merged into the result.
        original: counts of the original text, with the keys of `OriginalText`, or None.
        original_from: where these counts come from: `manifest` or `given`.

    Returns:
        A mapping whose sums are float64 and whose counts are exact. `word_perplexity` and `bits_per_byte` are null
        when the original counts are unknown or part of the split was not scored. `seconds` and `tokens_per_second` are
        of this run alone, `tokens_resumed` of the tokens were scored by one before it.

    Raises:
        DataError: the loss is so high that no float holds its perplexity.
    """
    num_scored = len(scored.log_probs)
    assert num_scored == split.tokens_to_score, "every token of every window is scored exactly once"
    total_nats = -float(np.sum(scored.log_probs, dtype=np.float64))
    loss_nats = total_nats / num_scored
    loss_base2 = nats_to_bits(loss_nats)
    whole: Mapping[str, Any] = original if original is not None and split.tokens_skipped == 0 else {}
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
        "tokens_unk": split.count_scored(Dictionary.unk_index),
        "num_sentences": split.num_sentences,
        "num_windows": len(split.windows),
        "word_perplexity": word_perplexity(total_nats, whole["tokens"]) if whole.get("tokens") else None,
        "bits_per_byte": bits_per_byte(total_nats, whole["num_bytes"]) if whole.get("num_bytes") else None,
        "original": original,
        "original_from": original_from,
        **settings,
        "data_sha256": data_hashes(split),
        "versions": versions(),
        "tokens_resumed": scored.tokens_resumed,
        "seconds": scored.seconds,
        "tokens_per_second": (num_scored - scored.tokens_resumed) / scored.seconds if scored.seconds > 0 else None,
    }


def summary_of(result: Mapping[str, Any]) -> str:
    """A result as a few lines for a person."""
    scored, original = result["tokens_scored"], result["original"]
    if result.get("task") == "truncated_bptt_lm":
        how = f"chunks of {result['tokens_per_sample']}, memory {result['mem_len']}, {result['dtype']}"
        left_out = "as in fairseq: the first of each chunk, and the tail"
    else:
        how = f"window {result['tokens_per_sample']}, context {result['context_window']}, {result['dtype']}"
        left_out = "in sentences that do not fit a window"
    lines = [
        f"{result['subset']}: loss {result['loss_base2']:.4f} bits, perplexity {result['perplexity']:,.2f} over "
        f"{scored:,} tokens ({how})"
    ]
    if result.get("vocabulary", "dict.txt") != "dict.txt":
        lines.append(f"  words are the model's own, of its {result['vocabulary']}, found by their spelling")
    if result["tokens_skipped"]:
        lines.append(f"  NOT scored: {result['tokens_skipped']:,} of {result['tokens_in_split']:,} tokens, {left_out}")
    if result["tokens_unk"]:
        lines.append(f"  <unk>: {result['tokens_unk']:,} of the tokens ({100 * result['tokens_unk'] / scored:.2f} %)")
    if result["word_perplexity"] is not None:
        source = "given by hand" if original["path"] is None else f"words and line ends of {original['path']}"
        lines.append(
            f"  per original token: perplexity {result['word_perplexity']:,.2f} over {original['tokens']:,} ({source})"
        )
    if result["bits_per_byte"] is not None:
        lines.append(f"  per original byte: {result['bits_per_byte']:.4f} bits over {original['num_bytes']:,}")
    return "\n".join(lines)


def data_hashes(split: EvalSplit) -> dict[str, str]:
    """The sha256 of each file that the split was read from."""
    return {path.name: sha256_file(path) for path in split.files}


def checkpoint_hashes(paths: Sequence[Path], mesh: Mesh, *, progress: Callable[[int], None]) -> dict[str, str]:
    """The sha256 of each file of a checkpoint. Every rank of the mesh must call it: each hashes its share.

    Args:
        paths: the files.
        mesh: where we are.
        progress: called with the number of bytes that were just hashed.
    """
    own = {}
    for path in paths[mesh.rank :: mesh.world_size]:
        own[path.name] = sha256_file(path)
        progress(path.stat().st_size)
    if mesh.world_size == 1:
        return own
    shares: list[dict[str, str]] = [{} for _ in range(mesh.world_size)]
    dist.all_gather_object(shares, own)
    hashes = {name: digest for share in shares for name, digest in share.items()}
    return {path.name: hashes[path.name] for path in paths}


def versions() -> dict[str, str]:
    """What computed a number."""
    return {
        "lmtools": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
