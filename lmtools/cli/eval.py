"""`lmtools eval`: a checkpoint and a binarized split in, a perplexity with its counts out."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.eval_checks import journal_target, require_inputs_stay, require_sensible_options
from lmtools.cli.eval_output import bar_of_rank_0, document_of, show, write
from lmtools.cli.machine_memory import require_memory_for_model
from lmtools.cli.memory_options import (
    ClampLenOption,
    MemLenOption,
    SameLengthOption,
    given_memory_options,
    refuse_memory_options,
)
from lmtools.cli.options import Device, DType, JsonOption, require_none_given, say
from lmtools.errors import ConfigError

if TYPE_CHECKING:
    from lmtools.evaluate.run import ScoredSplit


class Task(str, Enum):
    """fairseq's `--task`."""

    language_modeling = "language_modeling"
    truncated_bptt_lm = "truncated_bptt_lm"


class BreakMode(str, Enum):
    """fairseq's `--sample-break-mode`."""

    none = "none"
    complete = "complete"
    eos = "eos"


def evaluate(
    data: Annotated[Path, typer.Argument(help="Folder that `lmtools binarize` made.")],
    path: Annotated[Path, typer.Option("--path", help="Checkpoint: a folder, a file, one part or the parts' stem.")],
    gen_subset: Annotated[str, typer.Option("--gen-subset", help="Split to score, or several with commas.")] = "test",
    task: Annotated[
        Task, typer.Option(help="truncated_bptt_lm reads the split as streams, with a memory: for Transformer-XL.")
    ] = Task.language_modeling,
    tokens_per_sample: Annotated[
        int | None,
        typer.Option(min=1, help="Longest window, or chunk of a stream; what the checkpoint says if not given."),
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
        int | None,
        typer.Option(
            "--batch-size",
            "--max-sentences",
            min=1,
            help="Windows at a time, 8 if --max-tokens is not given either; no result depends on it. Streams of a "
            "replica, 1 if not given; memory begins anew where one begins.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens at a time, padding included: as many windows as fit.")
    ] = None,
    mp: Annotated[
        int,
        typer.Option("--mp", "--model-parallel-size", min=1, help="Tensor-parallel workers to split the model over."),
    ] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Replicas that score disjoint windows.")] = 1,
    dtype: Annotated[DType, typer.Option(help="What the model computes in; sums are always float64.")] = DType.float32,
    device: Annotated[Device | None, typer.Option(help="Default: cuda where there is one.")] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Leave the model's blocks in their files and read each when its turn comes; for one process.",
        ),
    ] = False,
    offload_memory: Annotated[
        float,
        typer.Option(
            min=0, max=1e6, help="GiB that --offload may use; as many windows go through a block together as fit."
        ),
    ] = 6.0,
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
    mem_len: MemLenOption = None,
    clamp_len: ClampLenOption = None,
    same_length: SameLengthOption = None,
    fairseq_compat: Annotated[
        bool,
        typer.Option(
            "--fairseq-compat",
            help="Transformer-XL: count as fairseq does, without the first token of each chunk and the tail.",
        ),
    ] = False,
    num_workers: Annotated[
        int,
        typer.Option(min=0, help="Accepted for fairseq's sake: windows are cut from mapped memory, no worker loads."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Score every token of a split exactly once and report the perplexity with all its counts."""
    subsets = gen_subset.split(",")
    if offload and mp * dp > 1:
        raise ConfigError(f"--offload: is for one process, found --mp {mp} --dp {dp}")
    require_sensible_options(subsets, context_window, add_bos_token, output, scores, resume, orig_tokens or orig_bytes)
    overrides = given_memory_options(mem_len, clamp_len, same_length)
    if task is Task.truncated_bptt_lm:
        refused = {
            "--context-window": context_window,
            "--sample-break-mode": sample_break_mode is not BreakMode.none,
            "--add-bos-token": add_bos_token,
            "--max-tokens": max_tokens,
            "--skip-invalid-size-inputs-valid-test": skip_invalid_size_inputs,
            "--resume": resume,
            "--offload": offload,
        }
        require_none_given(refused, "a stream is read in order, with its memory: there are no windows")
        from lmtools.cli.eval_streams import evaluate_streams

        evaluate_streams(
            data,
            path,
            subsets,
            overrides,
            tokens_per_sample=tokens_per_sample,
            batch_size=batch_size or 1,
            fairseq_compat=fairseq_compat,
            mp=mp,
            dp=dp,
            dtype=dtype,
            device=device,
            output=output,
            scores=scores,
            orig_tokens=orig_tokens,
            orig_bytes=orig_bytes,
            as_json=as_json,
        )
        return
    refuse_memory_options(overrides, "is of --task truncated_bptt_lm")
    require_none_given({"--fairseq-compat": fairseq_compat}, "is of --task truncated_bptt_lm")

    import torch

    from lmtools import __version__
    from lmtools.checkpoints.load import (
        load_transformer_lm,
        open_checkpoint,
        require_divisible,
        require_transformer_lm,
        rows_of_dictionary,
    )
    from lmtools.checkpoints.offload import load_offloaded, windows_together
    from lmtools.data.dictionary import Dictionary
    from lmtools.evaluate.batches import cut_batches
    from lmtools.evaluate.result import checkpoint_hashes
    from lmtools.evaluate.run import score_split
    from lmtools.evaluate.splits import open_split, require_rows
    from lmtools.parallel.allocator import tune_cpu_memory
    from lmtools.parallel.launch import is_worker, run_workers
    from lmtools.parallel.mesh import open_mesh

    # Everything that can be refused is refused here, before a worker starts or a weight is read.
    checkpoint = open_checkpoint(path)
    config = require_transformer_lm(checkpoint, "use --task truncated_bptt_lm")
    require_divisible(checkpoint, mp)
    if not offload:
        require_memory_for_model(config, dtype, device, replicas=dp)
    maximum = config.max_target_positions
    tokens_per_sample = tokens_per_sample or maximum
    # Positions that were learned end with the last one; those that are computed have one more for <s>.
    longest = tokens_per_sample + (1 if add_bos_token and config.decoder_learned_pos else 0)
    if longest > maximum:
        raise ConfigError(
            f"--tokens-per-sample {tokens_per_sample}: makes windows of {longest} tokens, the checkpoint was made for "
            f"at most {maximum}"
        )
    dictionary = Dictionary.load(data / "dict.txt")
    rows = rows_of_dictionary(checkpoint, dictionary, data / "dict.txt")
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
    require_inputs_stay(output, scores, [*checkpoint.paths, *(file for split in splits for file in split.files)])
    if rows is not None:
        for split in splits:
            require_rows(split, rows, dictionary)
    if batch_size is None and max_tokens is None:
        batch_size = 8
        if offload:
            batch_size = windows_together(
                config,
                memory_bytes=int(offload_memory * 2**30),
                length=tokens_per_sample + int(add_bos_token),
                dtype=getattr(torch, dtype.value),
            )
    batches = [
        cut_batches(split.windows, batch_size=batch_size, max_tokens=max_tokens, num_extra=int(add_bos_token))
        for split in splits
    ]

    if mp * dp > 1 and not is_worker():
        run_workers(sys.argv[1:], num_workers=mp * dp)
        return

    settings: dict[str, Any] = {
        "tokens_per_sample": tokens_per_sample,
        "context_window": context_window,
        "sample_break_mode": sample_break_mode.value,
        "add_bos_token": add_bos_token,
        "dtype": dtype.value,
    }
    journal_beside = journal_target(output, scores)
    scored: list[ScoredSplit] = []
    with open_mesh(dp=dp, tp=mp, device=device.value if device else None) as mesh:
        if mesh.rank == 0 and mesh.device.type == "cpu" and dtype is DType.float16:
            say("eval: float16 products are hundreds of times slower than float32 on a CPU; consider --dtype bfloat16")
        with bar_of_rank_0(mesh, "load model", None, "bytes") as advance:
            if offload:
                model = load_offloaded(checkpoint, mesh.device, getattr(torch, dtype.value), progress=advance)
            else:
                model = load_transformer_lm(checkpoint, mesh, getattr(torch, dtype.value), progress=advance)
            hashes = checkpoint_hashes(checkpoint.paths, mesh, progress=advance)
        if not offload:  # what is read block by block is to stay within --offload-memory
            tune_cpu_memory(mesh.device)
        for split, bounds in zip(splits, batches, strict=True):
            with bar_of_rank_0(mesh, f"eval {split.name}", split.tokens_to_score, "tokens") as advance:
                scored.append(
                    score_split(
                        model,
                        split,
                        dictionary,
                        mesh,
                        bounds=bounds,
                        rows=rows,
                        add_bos_token=add_bos_token,
                        journal_path=_journal_path(journal_beside, split.name),
                        identity={"lmtools": __version__} | settings | checkpoint.identity() | split.identity(),
                        resume=resume,
                        say=say,
                        progress=advance,
                    )
                )
    if mesh.rank != 0:
        return

    settings |= {
        "path": str(path),
        "data": str(data),
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "mp": mp,
        "dp": dp,
        "offload": offload,
        "device": str(mesh.device),
        "num_parts": checkpoint.num_parts,
        "model": asdict(checkpoint.config),
        "checkpoint_sha256": hashes,
    }
    document = document_of(splits, scored, settings, scores=scores, orig_tokens=orig_tokens, orig_bytes=orig_bytes)
    write(document, output)
    for split in splits:
        journal = _journal_path(journal_beside, split.name)
        if journal is not None:
            journal.unlink(missing_ok=True)
    show(document, as_json=as_json)


def _journal_path(target: Path | None, subset: str) -> Path | None:
    return None if target is None else target.with_name(f"{target.name}.{subset}.partial")
