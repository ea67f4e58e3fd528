"""Results of `lmtools eval` as it writes them, from scores that are made up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmtools.artifacts import FileRecord, Manifest, OriginalText, write_manifest
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed_writer import write_dataset
from lmtools.files import sha256_file

WORDS = ("the", "cat", "<script>alert(1)</script>", "&amp;", "mat")
COUNTS = (5000, 300, 20, 20, 0)
SENTENCES = [[4, 5, 6, 2], [7, 8, 3, 2], [4, 4, 5, 2], [4, 6, 8, 2]] * 25


def write_data(folder: Path, *, words: Sequence[str] = WORDS, sentences: Sequence[Sequence[int]] = SENTENCES) -> Path:
    """A folder of data with the split `test`, the manifests of all steps, and the raw text, beside each other."""
    data = folder / "bin"
    data.mkdir(parents=True)
    Dictionary(words, COUNTS).save(data / "dict.txt")
    write_dataset(data / "test", sentences, vocab_size=len(words) + 4)
    (folder / "test.raw").write_text("raw\n")
    (folder / "test.detok").write_text("detok\n")
    raw, detok = FileRecord.of(folder / "test.raw"), FileRecord.of(folder / "test.detok")
    outputs = [FileRecord.of(data / name) for name in ("test.bin", "test.idx", "dict.txt")]
    original = OriginalText("test.raw", lines=100, words=250, tokens=350, num_bytes=2000)
    write_manifest(folder / "test.detok", Manifest("lmtools detok", {}, [raw], [detok], {"lines": 100}, original))
    write_manifest(
        data / "test", Manifest("lmtools binarize", {"threshold": 0}, [detok], outputs, {"tokens": 400}, original)
    )
    return data


def write_result(file: Path, data: Path, scores: Path, /, bits: float | None = None, **changes: Any) -> dict[str, Any]:
    """The result of an evaluation of `data` with windows of 8 and context 4, and its scores.

    `bits` is another loss per token than that of the scores.
    """
    rng = np.random.default_rng(1)
    num_tokens = sum(map(len, SENTENCES))
    log_probs = -rng.gamma(2.0, 1.5, num_tokens).astype(np.float32)
    np.save(scores, log_probs)
    total_nats = -float(log_probs.sum(dtype=np.float64)) if bits is None else bits * num_tokens * math.log(2)
    loss_base2 = total_nats / num_tokens / math.log(2)
    result: dict[str, Any] = {
        "format": "lmtools-eval",
        "format_version": 1,
        "subset": "test",
        "loss_base2": loss_base2,
        "loss_nats": total_nats / num_tokens,
        "total_nats": total_nats,
        "perplexity": 2**loss_base2,
        "tokens_scored": num_tokens,
        "tokens_in_split": num_tokens,
        "tokens_skipped": 0,
        "tokens_unk": 25,
        "num_sentences": len(SENTENCES),
        "num_windows": 100,
        "word_perplexity": math.exp(total_nats / 350),
        "bits_per_byte": total_nats / math.log(2) / 2000,
        "original": {"path": "test.raw", "lines": 100, "words": 250, "tokens": 350, "num_bytes": 2000},
        "original_from": "manifest",
        "tokens_per_sample": 8,
        "context_window": 4,
        "sample_break_mode": "none",
        "add_bos_token": False,
        "dtype": "float32",
        "path": "checkpoints/model.pt",
        "data": str(data),
        "batch_size": 8,
        "mp": 1,
        "dp": 1,
        "device": "cpu",
        "checkpoint_sha256": {"model.pt": "ab" * 32},
        "scores": {"path": str(scores), "sha256": sha256_file(scores)},
        "data_sha256": {name: sha256_file(data / name) for name in ("test.bin", "test.idx", "dict.txt")},
        "versions": {"lmtools": "0.1.0", "torch": "2.13.0", "numpy": "2.0.0", "python": "3.11.0"},
        "tokens_resumed": 0,
        "seconds": 2.0,
        "tokens_per_second": num_tokens / 2,
    } | changes
    file.write_text(json.dumps(result))
    return result


def write_metrics(folder: Path, *, losses: Sequence[float], valid: Mapping[int, float]) -> Path:
    """The folder of a training run."""
    folder.mkdir()
    lines = []
    for number, loss in enumerate(losses, start=1):
        common = {"num_updates": number, "seconds": number * 60.0}
        lines.append({"kind": "update", "loss_base2": loss, "num_tokens": 1000, "skipped": None, **common})
        if number in valid:
            lines.append({"kind": "valid", "subset": "valid", "loss_base2": valid[number], "num_tokens": 9, **common})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
