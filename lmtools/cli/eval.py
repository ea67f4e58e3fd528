"""`lmtools eval`: a checkpoint and a binarized split in, a perplexity with its counts out."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import JsonOption, print_json, progress_bar, say
from lmtools.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lmtools.checkpoints.fairseq import FairseqCheckpoint
    from lmtools.data.dictionary import Dictionary
    from lmtools.evaluate.scoring import Scores
    from lmtools.evaluate.splits import EvalSplit


class BreakMode(str, Enum):
    """fairseq's `--sample-break-mode`."""

    none = "none"
    complete = "complete"
    eos = "eos"


class DType(str, Enum):
    """What the model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def evaluate(
    data: Annotated[Path, typer.Argument(help="Folder that `lmtools binarize` made.")],
    path: Annotated[Path, typer.Option("--path", help="Checkpoint: a folder, a file, one part or the parts' stem.")],
    gen_subset: Annotated[str, typer.Option("--gen-subset", help="Split to score, or several with commas.")] = "test",
    tokens_per_sample: Annotated[
        int | None, typer.Option(min=1, help="Longest window; the checkpoint's maximum if not given.")
    ] = None,
    context_window: Annotated[
        int, typer.Option(min=0, help="Tokens at the head of each window that are seen but not scored.")
    ] = 0,
    sample_break_mode: Annotated[BreakMode, typer.Option(help="Where blocks may begin and end.")] = BreakMode.none,
    add_bos_token: Annotated[bool, typer.Option("--add-bos-token", help="Put <s> at the head of each window.")] = False,
    skip_invalid_size_inputs: Annotated[
        bool,
        typer.Option(
            "--skip-invalid-size-inputs-valid-test", help="Leave out sentences that do not fit a window, and say so."
        ),
    ] = False,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Windows at a time; no result depends on it.")
    ] = 8,
    mp: Annotated[
        int,
        typer.Option("--mp", "--model-parallel-size", min=1, help="Tensor-parallel workers to split the model over."),
    ] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Replicas that score disjoint windows.")] = 1,
    dtype: Annotated[DType, typer.Option(help="What the model computes in; sums are always float64.")] = DType.float32,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one, if not given.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this JSON file.")] = None,
    scores: Annotated[
        Path | None, typer.Option(help="Write the natural-log probability of every token to this .npy file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run with the same --output or --scores that was cut off.")
    ] = False,
    orig_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the original text, words + line ends, if no manifest says.")
    ] = None,
    orig_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of the original text, if no manifest says.")
    ] = None,
    num_workers: Annotated[
        int,
        typer.Option(min=0, help="Accepted for fairseq's sake: windows are cut from mapped memory, no worker loads."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Score every token of a split exactly once and report the perplexity with all its counts."""
    import torch

    from lmtools.checkpoints.load import load_model, open_checkpoint, require_divisible
    from lmtools.data.dictionary import Dictionary
    from lmtools.evaluate.result import checkpoint_hashes, result_of
    from lmtools.evaluate.run import score_split
    from lmtools.evaluate.splits import open_split
    from lmtools.parallel.launch import is_worker, run_workers
    from lmtools.parallel.mesh import open_mesh

    # Everything that can be refused is refused here, before a worker starts or a weight is read.
    checkpoint = open_checkpoint(path)
    require_divisible(checkpoint, mp)
    maximum = checkpoint.config.max_target_positions
    tokens_per_sample = tokens_per_sample or maximum
    if tokens_per_sample > maximum:
        raise ConfigError(
            f"--tokens-per-sample {tokens_per_sample}: the checkpoint was made for windows of at most {maximum} tokens"
        )
    dictionary = Dictionary.load(data / "dict.txt")
    _require_dictionary_fits(dictionary, checkpoint, data / "dict.txt")
    subsets = gen_subset.split(",")
    splits = [
        open_split(
            data,
            name,
            dictionary,
            tokens_per_sample=tokens_per_sample,
            context_window=context_window,
            break_mode=sample_break_mode.value,
            skip_too_long=skip_invalid_size_inputs,
        )
        for name in subsets
    ]
    _require_sensible_options(subsets, context_window, add_bos_token, output, scores, resume)

    if mp * dp > 1 and not is_worker():
        run_workers(sys.argv[1:], num_workers=mp * dp)
        return

    settings: dict[str, Any] = {
        "path": str(path),
        "data": str(data),
        "tokens_per_sample": tokens_per_sample,
        "context_window": context_window,
        "sample_break_mode": sample_break_mode.value,
        "add_bos_token": add_bos_token,
        "dtype": dtype.value,
    }
    scored: list[tuple[EvalSplit, Scores, float]] = []
    with open_mesh(dp=dp, tp=mp, device=device) as mesh:
        if mesh.rank == 0 and mesh.device.type == "cpu" and dtype is DType.float16:
            say("eval: float16 products are hundreds of times slower than float32 on a CPU; consider --dtype bfloat16")
        model = load_model(checkpoint, mesh, getattr(torch, dtype.value))
        for split in splits:
            started = time.monotonic()
            with progress_bar(f"eval {split.name}", total=split.tokens_to_score, unit="tokens") as advance:
                log_probs = score_split(
                    model,
                    split,
                    dictionary,
                    mesh,
                    batch_size=batch_size,
                    add_bos_token=add_bos_token,
                    journal_path=_journal_path(output or scores, split.name),
                    identity=settings | checkpoint.identity() | split.identity(),
                    resume=resume,
                    progress=advance,
                )
            scored.append((split, log_probs, time.monotonic() - started))
    if mesh.rank != 0:
        return

    settings |= {
        "batch_size": batch_size,
        "mp": mp,
        "dp": dp,
        "device": str(mesh.device),
        "num_parts": checkpoint.num_parts,
        "model": asdict(checkpoint.config),
        "checkpoint_sha256": checkpoint_hashes(checkpoint.paths),
    }
    results = []
    for split, log_probs, seconds in scored:
        original, original_from = _original(split, orig_tokens, orig_bytes)
        results.append(
            result_of(
                split,
                log_probs,
                settings=settings,
                original=original,
                original_from=original_from,
                seconds=seconds,
            )
        )
    _write(results, scored, output, scores)
    for split in splits:
        journal = _journal_path(output or scores, split.name)
        if journal is not None:
            journal.unlink(missing_ok=True)
    if as_json:
        print_json(results[0] if len(results) == 1 else {"results": results})
    else:
        for result in results:
            typer.echo(_summary(result))


def _require_dictionary_fits(dictionary: Dictionary, checkpoint: FairseqCheckpoint, where: Path) -> None:
    """The embedding has the dictionary's types, or these and what fairseq pads a vocabulary with to divide it."""
    rows = checkpoint.config.vocab_size
    multiple = 8 * checkpoint.num_parts
    padded = -(-len(dictionary) // multiple) * multiple
    if rows not in (len(dictionary), padded):
        raise CheckpointError(
            f"{where}: {len(dictionary)} types do not fit the {rows} rows of the checkpoint's embedding "
            f"(expected {rows}, or a number that fairseq pads to it); this is not the dictionary of the checkpoint"
        )


def _require_sensible_options(
    subsets: list[str],
    context_window: int,
    add_bos_token: bool,
    output: Path | None,
    scores: Path | None,
    resume: bool,
) -> None:
    if add_bos_token and context_window:
        raise ConfigError(
            "--add-bos-token with --context-window: <s> would stand before or inside the context; use one"
        )
    if resume and output is None and scores is None:
        raise ConfigError("--resume: needs the --output or --scores of the run that was cut off")
    if scores is not None and len(subsets) > 1:
        raise ConfigError("--scores: holds one split; give one --gen-subset")
    if len(set(subsets)) < len(subsets):
        raise ConfigError(f"--gen-subset {','.join(subsets)}: names a split twice")
    for target in (output, scores):
        if target is not None and not target.absolute().parent.is_dir():
            raise ConfigError(f"{target}: the folder {target.parent} does not exist")


def _journal_path(target: Path | None, subset: str) -> Path | None:
    return None if target is None else target.with_name(f"{target.name}.{subset}.partial")


def _original(
    split: EvalSplit, orig_tokens: int | None, orig_bytes: int | None
) -> tuple[dict[str, Any] | None, str | None]:
    """Counts of the original text, and where they come from. What is given by hand goes before the manifest."""
    if orig_tokens is None and orig_bytes is None:
        return (asdict(split.original), "manifest") if split.original else (None, None)
    given = {"path": None, "lines": None, "words": None, "tokens": orig_tokens, "num_bytes": orig_bytes}
    return given, "given"


def _write(
    results: list[dict[str, Any]],
    scored: list[tuple[EvalSplit, Scores, float]],
    output: Path | None,
    scores: Path | None,
) -> None:
    import numpy as np

    from lmtools.evaluate.run import scores_of_every_token
    from lmtools.files import atomic_write, atomic_write_text

    if scores is not None:
        split, log_probs, _ = scored[0]
        with atomic_write(scores) as stream:
            np.save(stream, scores_of_every_token(split, log_probs))
    if output is not None:
        document = results[0] if len(results) == 1 else {"results": results}
        atomic_write_text(output, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _summary(result: dict[str, Any]) -> str:
    lines = [
        f"{result['subset']}: loss {result['loss_base2']:.4f} bits, perplexity {result['perplexity']:.2f} "
        f"over {result['tokens_scored']:,} tokens (window {result['tokens_per_sample']}, "
        f"context {result['context_window']}, {result['dtype']})"
    ]
    if result["tokens_skipped"]:
        lines.append(
            f"  NOT scored: {result['tokens_skipped']:,} of {result['tokens_in_split']:,} tokens, in sentences that do "
            "not fit a window"
        )
    original = result["original"]
    if result["word_perplexity"] is not None:
        lines.append(
            f"  perplexity per original token {result['word_perplexity']:.2f} "
            f"(over {original['tokens']:,} words and line ends, {result['original_from']})"
        )
    if result["bits_per_byte"] is not None:
        lines.append(f"  {result['bits_per_byte']:.4f} bits per byte ({original['num_bytes']:,} bytes)")
    return "\n".join(lines)
