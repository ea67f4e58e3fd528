"""Transformer-XL of fairseq's README, training and evaluation: lmtools against Hugging Face transformers.

    python benchmarks/txl_model.py > benchmarks/results/txl_model.md

Needs `transformers==4.30.2`, one of the last that has the model, beside lmtools. 16 layers of 410, 10 heads of 41,
feed-forward 2100, 267,744 types. Both have the same weights and read the same tokens, drawn from Zipf's law; their
losses are compared. transformers gets `labels`, with which its softmax computes only what the loss needs: faster than
fairseq's example, which asks it for the log-probabilities of all types.

Every measurement is a process of its own, so that the memory high-water mark is its own. The two take turns; times are
the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHAPE: dict[str, Any] = {"n_layer": 16, "d_model": 410, "n_head": 10, "d_head": 41, "d_inner": 2100, "div_val": 1}
VOCAB_SIZE = 267_744
CUTOFFS = [20_000, 40_000, 200_000]
TRAIN = {"clamp_len": -1, "same_length": False}
EVALUATE = {"clamp_len": 400, "same_length": True}
JOBS: dict[str, dict[str, Any]] = {
    "train, batch 4 x 150": {"batch": (4, 150), "steps": 2, "options": TRAIN | {"mem_len": 150}},
    "evaluate, batch 1 x 64": {"batch": (1, 64), "steps": 8, "options": EVALUATE | {"mem_len": 640}},
    "evaluate, batch 4 x 64": {"batch": (4, 64), "steps": 3, "options": EVALUATE | {"mem_len": 640}},
}
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""Tokens `(B, T)` and memory to the mean loss of tokens 1 to T - 1 given those before, and memory."""


def transformers_model(options: dict[str, Any]) -> tuple[nn.Module, Step]:
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel, logging  # type: ignore[attr-defined]

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = TransfoXLLMHeadModel(
        TransfoXLConfig(vocab_size=VOCAB_SIZE, cutoffs=CUTOFFS, d_embed=410, dropout=0.0, **SHAPE, **options)
    )

    def step(tokens: Tensor, memories: Any) -> tuple[Tensor, Any]:
        output = model(input_ids=tokens, labels=tokens.clone(), mems=memories)  # it writes into the labels
        return output.loss, output.mems

    return model, step


def save_weights(path: Path) -> None:
    """The weights that `transformers_model` starts with, under lmtools' names."""
    from lmtools.checkpoints.transformer_xl_names import parameter_sources
    from lmtools.models.architectures import transformer_xl

    state = transformers_model(TRAIN | {"mem_len": 0})[0].state_dict()
    sources = parameter_sources(state, transformer_xl(VOCAB_SIZE, **SHAPE), "transformers")
    torch.save({name: source.take(state).clone() for name, source in sources.items()}, path)


def lmtools_model(options: dict[str, Any], weights: Path) -> tuple[nn.Module, Step]:
    from lmtools.models.architectures import transformer_xl
    from lmtools.models.transformer_xl import TransformerXL, zero_memories

    with torch.device("meta"):
        model = TransformerXL(transformer_xl(VOCAB_SIZE, **SHAPE, **options))
    model.load_state_dict(torch.load(weights), strict=False, assign=True)
    model.tie_weights()

    def step(tokens: Tensor, memories: Any) -> tuple[Tensor, Any]:
        targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        memories = memories or zero_memories(model.config, len(tokens), next(model.parameters()))
        nll, memories = model(tokens, targets, memories, keep_projections=not model.training)
        return nll[:, :-1].mean(), memories

    return model, step


def peak_mib() -> float:
    """This process's own; getrusage's maximum begins at what the process that started it held."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def measure(which: str, job: str, threads: int, weights: Path) -> dict[str, Any]:
    """What one process does: one segment to warm up, then the timed ones."""
    torch.set_num_threads(threads)
    steps, options, (batch_size, length) = JOBS[job]["steps"], JOBS[job]["options"], JOBS[job]["batch"]
    training = job.startswith("train")
    model, step = lmtools_model(options, weights) if which == "lmtools" else transformers_model(options)
    model.train(training)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(steps + 1, batch_size, length, generator=generator, dtype=torch.float64)
    segments = ((VOCAB_SIZE + 1.0) ** uniform - 1).long()

    memories, losses, seconds, update_seconds = None, [], [], []
    with torch.set_grad_enabled(training):
        for tokens in segments:
            start = time.perf_counter()
            loss, memories = step(tokens, memories)
            if training:
                loss.backward()  # type: ignore[no-untyped-call]
            seconds.append(time.perf_counter() - start)
            if training:
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                optimizer.zero_grad()
            update_seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
    num_tokens = batch_size * length * steps
    return {
        "model": num_tokens / sum(seconds[1:]),
        "with Adam": num_tokens / sum(update_seconds[1:]),
        "peak MiB": peak_mib(),
        "losses": losses,
    }


def row(job: str, turns: dict[str, list[dict[str, Any]]], figure: str, label: str) -> str:
    theirs, ours = (statistics.median(turn[figure] for turn in turns[which]) for which in ("transformers", "lmtools"))
    ratio = ours / theirs
    return f"| {job} | {label} | {theirs:,.0f} | {ours:,.0f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--measure", nargs=3, metavar=("WHICH", "JOB", "WEIGHTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        which, job, weights = args.measure
        print(json.dumps(measure(which, job, args.threads, Path(weights))))
        return

    lines, difference = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        save_weights(weights)
        for job in args.jobs:
            turns: dict[str, list[dict[str, Any]]] = {"transformers": [], "lmtools": []}
            for _ in range(args.turns):
                for which, results in turns.items():
                    command = [sys.executable, __file__, "--threads", str(args.threads)]
                    done = subprocess.run(
                        [*command, "--measure", which, job, str(weights)], check=True, stdout=subprocess.PIPE
                    )
                    results.append(json.loads(done.stdout))
                    print(job, which, results[-1], file=sys.stderr)
            lines.append(row(job, turns, "model", "tokens/s, model"))
            if job.startswith("train"):
                lines.append(row(job, turns, "with Adam", "tokens/s, with clipping and Adam"))
            lines.append(row(job, turns, "peak MiB", "memory high-water mark, MiB"))
            theirs, ours = (torch.tensor(turns[which][0]["losses"]) for which in ("transformers", "lmtools"))
            difference = max(difference, ((theirs - ours) / theirs).abs().max().item())

    import transformers

    print(
        f"""# Transformer-XL: lmtools against transformers {transformers.__version__}

`python benchmarks/txl_model.py --turns {args.turns} --threads {args.threads}`, torch {torch.__version__}, \
Python {platform.python_version()}, {args.threads} threads of {os.cpu_count()} cores ({platform.machine()}),
load average of the machine {os.getloadavg()[2]:.1f}.
16 layers, d_model 410, 10 heads x 41, d_inner 2100, 267,744 types, float32; training with mem_len 150, evaluation with
mem_len 640, clamp_len 400, same_length. Largest relative difference of a segment's loss: {difference:.1e}.

| job | | transformers | lmtools | lmtools / transformers |
|---|---|---|---|---|
"""
        + "\n".join(lines)
    )


if __name__ == "__main__":
    main()
