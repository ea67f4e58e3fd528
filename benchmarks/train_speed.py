"""Training speed: `lmtools train` against fairseq-train, a plain PyTorch loop and Hugging Face's XGLM, in one run.

    python benchmarks/train_speed.py --fairseq-python FAIRSEQ/bin/python > benchmarks/results/train_speed.md

One model for all: 6 layers, d 512, 8 heads, feed-forward 2048, pre-norm, tied, no dropout; 4 blocks of 1,024 tokens in
an update; Adam, clipping; the same splits, made by `lmtools binarize` of the help topics that come with Python. The
plain loop is one as people write it: a fused q, k, v, PyTorch's attention, `torch.optim.AdamW(fused=True)`, and
`torch.autocast` for bfloat16.

Every measurement is a process of its own that prints a line for each update; the time between these lines, as this
program sees them, is what is measured, after some updates to warm up. The contenders take turns; figures are the median
of the turns. GFLOP/s count the model's matrix products alone, by one formula for all; the peak is what bare matrix
products of the model's shapes reach in between. Where lmtools' time goes is measured apart, over one update, by
`train_profile.py`. `--quick` is a small model, to try the program.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.models.flops import training_flops_per_token
from lmtools.train.metrics import METRICS_NAME, read_metrics

LR, BETAS, CLIP_NORM = 5e-4, (0.9, 0.98), 1.0


@dataclass(frozen=True)
class Shape:
    """Of the model and of an update."""

    layers: int
    embed_dim: int
    heads: int
    length: int
    batch_size: int

    def flops_per_token(self, num_types: int) -> float:
        fields: dict[str, Any] = {
            "decoder_layers": self.layers,
            "decoder_embed_dim": self.embed_dim,
            "decoder_ffn_embed_dim": 4 * self.embed_dim,
        }
        return training_flops_per_token(vocab_size=num_types, tokens_per_sample=self.length, fields=fields)


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    kind: str
    dtype: str
    shape: Shape
    processes: int = 1
    threads: int = 2


# What the processes run.


class PlainBlock(nn.Module):
    """A pre-norm block with one matrix for q, k and v."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.embed_dim), nn.LayerNorm(shape.embed_dim)
        self.qkv, self.out = (
            nn.Linear(shape.embed_dim, 3 * shape.embed_dim),
            nn.Linear(shape.embed_dim, shape.embed_dim),
        )
        self.up = nn.Linear(shape.embed_dim, 4 * shape.embed_dim)
        self.down = nn.Linear(4 * shape.embed_dim, shape.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        fed_forward: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed_forward


class PlainModel(nn.Module):
    """A small GPT: tokens `(B, T)` to logits `(B, T, V)`."""

    def __init__(self, shape: Shape, num_types: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_types, shape.embed_dim)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.positions = nn.Embedding(shape.length, shape.embed_dim)
        self.blocks = nn.Sequential(*[PlainBlock(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.embed_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


def xglm(shape: Shape, num_types: int) -> nn.Module:
    from transformers import XGLMConfig, XGLMForCausalLM

    config = XGLMConfig(
        vocab_size=num_types,
        max_position_embeddings=shape.length,
        d_model=shape.embed_dim,
        ffn_dim=4 * shape.embed_dim,
        num_layers=shape.layers,
        attention_heads=shape.heads,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
        use_cache=False,
    )
    return XGLMForCausalLM(config)


def run_loop(kind: str, dtype: str, shape: Shape, data: Path, num_updates: int) -> None:
    """The plain loop, with a model of its own or Hugging Face's."""
    num_types = len(Dictionary.load(data / "dict.txt"))
    stream = torch.from_numpy(np.asarray(IndexedDataset(data / "train").tokens).astype(np.int64))
    model = PlainModel(shape, num_types) if kind == "plain" else xglm(shape, num_types)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_updates):
        starts = torch.randint(len(stream) - shape.length, (shape.batch_size,), generator=generator)
        tokens = torch.stack([stream[start : start + shape.length] for start in starts])
        targets = torch.stack([stream[start + 1 : start + shape.length + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(tokens) if kind == "plain" else model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(json.dumps({"num_tokens": tokens.numel(), "loss_base2": loss.item() / math.log(2)}), flush=True)


def matmul_gflops(shape: Shape, dtype: str) -> float:
    """The best that this process reaches with the feed-forward's matrix product, or with a square one."""
    best = 0.0
    torch.manual_seed(0)
    rows = shape.batch_size * shape.length
    for m, k, n in (
        (rows, shape.embed_dim, 4 * shape.embed_dim),
        (rows, 4 * shape.embed_dim, shape.embed_dim),
        (1024,) * 3,
    ):
        a, b = torch.randn(m, k, dtype=getattr(torch, dtype)), torch.randn(k, n, dtype=getattr(torch, dtype))
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            start = time.perf_counter()
            _ = a @ b
            best = max(best, 2 * m * k * n / (time.perf_counter() - start) / 1e9)
    return best


# What starts and times them.


def command_of(contender: Contender, data: Path, folder: Path, num_updates: int, fairseq_python: str) -> list[str]:
    shape = contender.shape
    if contender.kind in ("plain", "xglm"):
        measured = json.dumps([contender.kind, contender.dtype, vars(shape), str(data), num_updates])
        return [sys.executable, __file__, "--measure", measured]
    options = (
        f"--arch transformer_lm --decoder-normalize-before --share-decoder-input-output-embed --activation-fn gelu "
        f"--decoder-layers {shape.layers} --decoder-embed-dim {shape.embed_dim} "
        f"--decoder-ffn-embed-dim {4 * shape.embed_dim} --decoder-attention-heads {shape.heads} "
        f"--tokens-per-sample {shape.length} --batch-size {shape.batch_size} --sample-break-mode none --dropout 0 "
        f"--optimizer adam --adam-betas {BETAS[0]},{BETAS[1]} --weight-decay 0.01 --clip-norm {CLIP_NORM} --lr {LR} "
        f"--lr-scheduler inverse_sqrt --warmup-updates 100 --max-update {num_updates} --no-save --disable-validation "
        f"--num-workers 0 --log-format json --log-interval 1 --save-dir {folder} --cpu"
    ).split()
    if contender.kind == "fairseq":
        program = "from fairseq_cli.train import cli_main; cli_main()"
        # Without these its embedding is 512 wide, whatever the model is.
        widths = ["--decoder-input-dim", str(shape.embed_dim), "--decoder-output-dim", str(shape.embed_dim)]
        return [fairseq_python, "-c", program, str(data), "--task", "language_modeling", *options, *widths]
    precision = ["--bf16"] if contender.dtype == "bfloat16" else []
    return [sys.executable, "-m", "lmtools", "train", str(data), *options, *precision, "--mp", str(contender.processes)]


def updates_of(contender: Contender, line: str) -> bool:
    """Whether a line of the output is an update's."""
    return {
        "plain": '"num_tokens"',
        "xglm": '"num_tokens"',
        "fairseq": '"num_updates"',
        "lmtools": '"kind": "log"',
    }[contender.kind] in line and "{" in line


def tokens_per_second(
    contender: Contender, data: Path, scratch: Path, warm_up: int, num_updates: int, fairseq_python: str
) -> tuple[float, float]:
    """Speed after the warm-up, and the last update's loss in bits."""
    folder = scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    command = command_of(contender, data, folder, warm_up + num_updates, fairseq_python)
    environment = os.environ | {"OMP_NUM_THREADS": str(contender.threads), "PYTHONUNBUFFERED": "1"}
    times, lines, output = [], [], []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=scratch
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if updates_of(contender, line):
                times.append(time.perf_counter())
                lines.append(json.loads(line[line.index("{") :]))
    if process.returncode or len(times) != warm_up + num_updates:
        sys.exit(f"{' '.join(command)}\n{len(times)} updates, exit code {process.returncode}\n{''.join(output[-30:])}")
    if contender.kind == "lmtools":
        counts = [line["num_tokens"] for line in read_metrics(folder / METRICS_NAME) if line["kind"] == "update"]
    else:
        counts = [float(line.get("num_tokens") or line["wpb"]) for line in lines]
    loss = float(lines[-1].get("loss_base2") or lines[-1]["loss"])
    return sum(counts[warm_up:]) / (times[-1] - times[warm_up - 1]), loss


def make_data(scratch: Path) -> tuple[Path, int]:
    """The splits, by lmtools' own commands."""
    import pydoc_data.topics

    lines = re.sub(r"\n+", "\n", "\n".join(pydoc_data.topics.topics.values()))
    (scratch / "topics.txt").write_text(lines)
    command = ["-m", "lmtools", "binarize", "--only-source", "--trainpref", "topics.txt", "--validpref", "topics.txt"]
    options = ["--thresholdsrc", "3", "--destdir", "bin", "--workers", "1"]
    done = subprocess.run([sys.executable, *command, *options], cwd=scratch, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return scratch / "bin", len(Dictionary.load(scratch / "bin" / "dict.txt"))


def shares_of_time(contender: Contender, data: Path, scratch: Path) -> dict[str, float]:
    """Kind of work to its share of an update of lmtools', by `train_profile.py`."""
    environment = os.environ | {"OMP_NUM_THREADS": str(contender.threads)}
    command = [*command_of(contender, data, scratch / "profiled", 3, ""), "--print-config"]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=True)
    (scratch / "run.toml").write_text(done.stdout)
    program = [str(Path(__file__).parent / "train_profile.py"), str(scratch / "run.toml")]
    if contender.processes > 1:
        program = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(contender.processes),
            *program,
        ]
    done = subprocess.run([sys.executable, *program], cwd=scratch, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    shares: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return shares


def version_of_fairseq(python: str) -> str:
    program = "import fairseq; print(fairseq.__version__)"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()[-1]


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def contenders(quick: bool, with_fairseq: bool) -> list[Contender]:
    base = Shape(2, 128, 4, 128, 4) if quick else Shape(6, 512, 8, 1024, 4)
    wide = Shape(2, 192, 4, 128, 4) if quick else Shape(6, 768, 12, 1024, 4)
    rows = [Contender("fairseq-train", "fairseq", "float32", base)] if with_fairseq else []
    return [
        *rows,
        Contender("plain loop", "plain", "float32", base),
        Contender("Hugging Face XGLM", "xglm", "float32", base),
        Contender("lmtools train", "lmtools", "float32", base),
        Contender("plain loop, autocast", "plain", "bfloat16", base),
        Contender("lmtools train --bf16", "lmtools", "bfloat16", base),
        Contender(f"lmtools train, d {wide.embed_dim}, mp 1 x 2 threads", "lmtools", "float32", wide),
        Contender(f"lmtools train, d {wide.embed_dim}, mp 2 x 1 thread", "lmtools", "float32", wide, 2, 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fairseq-python", help="a Python with fairseq; without it there is no such row")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8, help="measured in each turn")
    parser.add_argument("--warm-up", type=int, default=2, help="updates before these")
    parser.add_argument("--quick", action="store_true", help="a small model and one turn")
    parser.add_argument("--only", default="", help="contenders whose name holds this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, dtype, shape, data, num_updates = json.loads(arguments.measure)
        if kind == "matmul":
            print(matmul_gflops(Shape(**shape), dtype))
        else:
            run_loop(kind, dtype, Shape(**shape), Path(data), num_updates)
        return
    turns = 1 if arguments.quick else arguments.turns
    rows = [row for row in contenders(arguments.quick, bool(arguments.fairseq_python)) if arguments.only in row.name]
    speeds: dict[str, list[float]] = {row.name: [] for row in rows}
    losses: dict[str, float] = {}
    peaks: dict[tuple[str, int], list[float]] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        data, num_types = make_data(Path(folder))
        for _ in range(turns):
            for row in rows:
                measured = json.dumps(["matmul", row.dtype, vars(row.shape), "", 0])
                done = subprocess.run(
                    [sys.executable, __file__, "--measure", measured],
                    check=True,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"OMP_NUM_THREADS": "2"},
                )
                peaks.setdefault((row.dtype, row.shape.embed_dim), []).append(float(done.stdout))
                speed, losses[row.name] = tokens_per_second(
                    row, data, Path(folder), arguments.warm_up, arguments.updates, arguments.fairseq_python
                )
                speeds[row.name].append(speed)
                print(f"{row.name}: {speed:,.0f} tokens/s, loss {losses[row.name]:.3f} bits", file=sys.stderr)
        shares = {row.name: shares_of_time(row, data, Path(folder)) for row in rows if row.kind == "lmtools"}
    fairseq = f", fairseq {version_of_fairseq(arguments.fairseq_python)}" if arguments.fairseq_python else ""
    report(rows, speeds, losses, peaks, num_types, turns, load, fairseq)
    report_shares(shares)


def report(
    rows: list[Contender],
    speeds: dict[str, list[float]],
    losses: dict[str, float],
    peaks: dict[tuple[str, int], list[float]],
    num_types: int,
    turns: int,
    load: float,
    fairseq: str,
) -> None:
    base = rows[0].shape
    print(
        f"""# Training speed

`python {" ".join([Path(sys.argv[0]).name, *(word for word in sys.argv[1:])])}`
on {machine()}, load average {load:.1f} at the start; {turns} turn(s).
Python {platform.python_version()}, torch {torch.__version__}, lmtools {version("lmtools")}, \
transformers {version("transformers")}{fairseq}.
{base.layers} layers, d {base.embed_dim}, {base.heads} heads, {base.length:,} tokens, batch {base.batch_size}, \
{num_types:,} types, no dropout.

| | dtype | tokens/s | GFLOP/s | bare matrix products | share | least to most tokens/s | last loss |
|---|---|---:|---:|---:|---:|---:|---:|"""
    )
    median: dict[str, float] = {}
    for row in rows:
        median[row.name] = statistics.median(speeds[row.name])
        gflops = median[row.name] * row.shape.flops_per_token(num_types) / 1e9
        peak = max(peaks[row.dtype, row.shape.embed_dim])
        print(
            f"| {row.name} | {row.dtype} | {median[row.name]:,.0f} | {gflops:.0f} | {peak:.0f} | {gflops / peak:.0%} | "
            f"{min(speeds[row.name]):,.0f} to {max(speeds[row.name]):,.0f} | {losses[row.name]:.2f} |"
        )
    print()
    wide = [row.name for row in rows if " mp " in row.name]
    for ours, theirs, wanted in (
        ("lmtools train", "fairseq-train", "at least 1.15"),
        ("lmtools train", "plain loop", "about 1"),
        ("lmtools train", "Hugging Face XGLM", ""),
        ("lmtools train --bf16", "fairseq-train", "at least 1.8"),
        ("lmtools train --bf16", "plain loop, autocast", ""),
        *([(wide[1], wide[0], "at least 0.85")] if len(wide) == 2 else []),
    ):
        if ours in median and theirs in median:
            note = f" (wanted: {wanted})" if wanted else ""
            print(f"- {ours} / {theirs}: {median[ours] / median[theirs]:.2f}{note}")


def report_shares(shares: dict[str, dict[str, float]]) -> None:
    if not shares:
        return
    kinds = list(next(iter(shares.values())))
    print("\n## Where the time of an update goes\n")
    print(f"| | {' | '.join(kinds)} |\n|---|{'---:|' * len(kinds)}")
    for name, of_kind in shares.items():
        print(f"| {name} | {' | '.join(f'{of_kind[kind]:.1%}' for kind in kinds)} |")


if __name__ == "__main__":
    main()
