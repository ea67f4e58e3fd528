"""`lmtools eval --task truncated_bptt_lm`: a split read as streams, by a model that remembers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtools.cli.eval_checks import require_inputs_stay
from lmtools.cli.eval_output import bar_of_rank_0, document_of, show, write
from lmtools.cli.machine_memory import require_memory_for_model
from lmtools.cli.memory_options import with_memory_options
from lmtools.cli.options import Device, DType
from lmtools.errors import ConfigError

if TYPE_CHECKING:
    from lmtools.checkpoints.load import Checkpoint
    from lmtools.checkpoints.training_read import TrainingCheckpoint
    from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint


def evaluate_streams(
    data: Path,
    path: Path,
    subsets: list[str],
    overrides: Mapping[str, Any],
    *,
    tokens_per_sample: int | None,
    batch_size: int,
    fairseq_compat: bool,
    mp: int,
    dp: int,
    dtype: DType,
    device: Device | None,
    output: Path | None,
    scores: Path | None,
    orig_tokens: int | None,
    orig_bytes: int | None,
    as_json: bool,
) -> None:
    """Score each split once and report the perplexity with all its counts.

    Args are options of `lmtools eval`; `overrides` are the fields of the model that were given: mem_len, clamp_len,
    same_length.
    """
    import torch

    from lmtools.checkpoints.load import (
        load_model,
        open_checkpoint,
        own_vocabulary,
        require_dictionary_fits,
        require_divisible,
    )
    from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint
    from lmtools.data.dictionary import Dictionary
    from lmtools.data.streams import cut_streams
    from lmtools.evaluate.result import checkpoint_hashes
    from lmtools.evaluate.splits import open_split, require_vocabulary
    from lmtools.evaluate.streams import score_streams, scored_part
    from lmtools.models.transformer_xl import TransformerXL
    from lmtools.parallel.allocator import tune_cpu_memory
    from lmtools.parallel.launch import is_worker, run_workers
    from lmtools.parallel.mesh import open_mesh

    # Everything that can be refused is refused here, before a worker starts or a weight is read.
    checkpoint = with_memory_options(_require_transformer_xl(open_checkpoint(path)), overrides)
    if "mem_len" not in overrides and isinstance(checkpoint, TransformerXLCheckpoint) and not checkpoint.says_lengths:
        raise ConfigError(f"{checkpoint.paths[0]}: does not say how long its memory was; give --mem-len, 0 for none")
    require_divisible(checkpoint, mp)
    require_memory_for_model(checkpoint.config, dtype, device, replicas=dp, instead="a larger machine")
    tokens_per_sample = tokens_per_sample or checkpoint.tokens_per_sample
    if tokens_per_sample is None:
        raise ConfigError("--tokens-per-sample: give the length of a chunk, this checkpoint does not say")
    dictionary = Dictionary.load(data / "dict.txt")
    vocabulary = own_vocabulary(checkpoint)
    if vocabulary is None:
        require_dictionary_fits(checkpoint, len(dictionary), data / "dict.txt")
    whole = [
        open_split(
            data,
            name,
            dictionary,
            tokens_per_sample=tokens_per_sample,
            context_window=0,
            break_mode="none",
            skip_too_long=False,
        )
        for name in subsets
    ]
    require_inputs_stay(output, scores, [*checkpoint.paths, *(file for split in whole for file in split.files)])
    rows_of_types = None
    if vocabulary is not None:
        rows_of_types = vocabulary.rows_of(dictionary)
        for split in whole:
            require_vocabulary(split, vocabulary, rows_of_types, dictionary)
    streams = [
        cut_streams(
            split.tokens_in_split,
            num_rows=batch_size * dp,
            chunk_len=tokens_per_sample,
            fairseq_compat=fairseq_compat,
        )
        for split in whole
    ]
    for split, cut in zip(whole, streams, strict=True):
        cut.require_targets(str(split.prefix))

    if mp * dp > 1 and not is_worker():
        run_workers(sys.argv[1:], num_workers=mp * dp)
        return

    splits = [scored_part(split, cut) for split, cut in zip(whole, streams, strict=True)]
    with open_mesh(dp=dp, tp=mp, device=device.value if device else None) as mesh:
        with bar_of_rank_0(mesh, "load model", None, "bytes") as advance:
            model = load_model(checkpoint, mesh, getattr(torch, dtype.value), progress=advance)
            assert isinstance(model, TransformerXL)
            words = () if vocabulary is None else (vocabulary.path,)
            hashes = checkpoint_hashes([*checkpoint.paths, *words], mesh, progress=advance)
        tune_cpu_memory(mesh.device)
        scored = []
        for split, cut in zip(whole, streams, strict=True):
            with bar_of_rank_0(mesh, f"eval {split.name}", cut.num_targets, "tokens") as advance:
                scored.append(score_streams(model, split, cut, mesh, rows_of_types=rows_of_types, progress=advance))
    if mesh.rank != 0:
        return

    settings: dict[str, Any] = {
        "task": "truncated_bptt_lm",
        "counting": "fairseq" if fairseq_compat else "every token",
        "tokens_per_sample": tokens_per_sample,
        "mem_len": model.config.mem_len,
        "clamp_len": model.config.clamp_len,
        "same_length": model.config.same_length,
        "batch_size": batch_size,
        "mp": mp,
        "dp": dp,
        "dtype": dtype.value,
        "device": str(mesh.device),
        "path": str(path),
        "data": str(data),
        "num_parts": checkpoint.num_parts,
        "vocabulary": "dict.txt" if vocabulary is None else vocabulary.path.name,
        "model": dataclasses.asdict(model.config),
        "checkpoint_sha256": hashes,
    }
    document = document_of(splits, scored, settings, scores=scores, orig_tokens=orig_tokens, orig_bytes=orig_bytes)
    write(document, output)
    show(document, as_json=as_json)


def _require_transformer_xl(checkpoint: Checkpoint) -> TrainingCheckpoint | TransformerXLCheckpoint:
    from lmtools.checkpoints.load import as_transformer_xl

    found = as_transformer_xl(checkpoint)
    if found is None:
        raise ConfigError(
            f"{checkpoint.paths[0]}: holds a plain transformer, which has no memory; use --task language_modeling"
        )
    return found
