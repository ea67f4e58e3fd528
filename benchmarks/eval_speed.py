"""eval with a context window against fairseq-eval-lm and Hugging Face's XGLM, on one model and split, in one run.

    python benchmarks/eval_speed.py --fairseq-python FAIRSEQ/bin/python

The model is small (6 layers, d 512, 8 heads) with random weights, written as a plain fairseq checkpoint; windows have
1,024 tokens of which 992 are context; the text is one that every Python carries. lmtools and fairseq score the same
windows in batches of 8, and their losses must agree; XGLM gets fewer. Reported are tokens scored
per second, without start-up and loading, and the share of the matrix-product peak measured in the same run: the
floating-point operations that the result needs (the last layer's queries and feed-forward, and the logits, only where
tokens are scored) per second.
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
from pathlib import Path

import numpy as np
import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.models.architectures import TransformerLMConfig
from lmtools.models.transformer_lm import TransformerLM, initialize_parameter
from lmtools.parallel.parallelize import seeded_values

SAMPLE, CONTEXT, BATCH = 1024, 992, 8


def run(*command: object, threads: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def make_data(folder: Path, num_tokens: int, vocab_size: int) -> Path:
    """A split of about `num_tokens` words of a text that ships with Python, with a dictionary of `vocab_size` types."""
    from pydoc_data.topics import topics

    lines, count = [], 0
    for text in topics.values():
        for line in text.splitlines():
            if line.strip() and count < num_tokens:
                lines.append(line)
                count += len(line.split()) + 1
    (folder / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "all").write_text("\n".join(topics.values()), encoding="utf-8")
    lmtools = (sys.executable, "-m", "lmtools", "binarize", "--only-source")
    run(
        *lmtools,
        "--trainpref",
        folder / "all",
        "--testpref",
        folder / "text",
        "--nwordssrc",
        vocab_size,
        "--destdir",
        folder / "bin",
        threads=2,
    )
    return folder / "bin"


def make_checkpoint(folder: Path, vocab_size: int) -> tuple[Path, TransformerLMConfig]:
    config = TransformerLMConfig(
        vocab_size=vocab_size,
        decoder_layers=6,
        decoder_embed_dim=512,
        decoder_ffn_embed_dim=2048,
        decoder_attention_heads=8,
        max_target_positions=SAMPLE,
        activation_fn="gelu",
        decoder_normalize_before=True,
        share_decoder_input_output_embed=True,
        dropout=0.0,
    )
    with torch.device("meta"):
        model = TransformerLM(config)
    read = seeded_values(model, initialize_parameter, seed=1)
    write_fairseq_parts(folder / "model", config, read, num_parts=1, dtype=torch.float32)
    return folder / "model" / "model.pt", config


def needed_flops(config: TransformerLMConfig, num_windows: int) -> float:
    """For windows of full length: what cannot be left out."""
    d, ffn, layers = config.decoder_embed_dim, config.decoder_ffn_embed_dim, config.decoder_layers
    scored = SAMPLE - CONTEXT
    layer = 8 * d * d * SAMPLE + 4 * d * ffn * SAMPLE + 4 * d * SAMPLE * (SAMPLE + 1) / 2
    last = 4 * d * d * (SAMPLE + scored) + 4 * d * ffn * scored + 4 * d * scored * (CONTEXT + scored / 2)
    return num_windows * ((layers - 1) * layer + last + 2 * scored * d * config.vocab_size)


def matmul_peak(dtype: torch.dtype, threads: int) -> float:
    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 3072).to(dtype), torch.randn(3072, 3072).to(dtype)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 1024 * 3072 * 3072 / best


def eval_lmtools(data: Path, checkpoint: Path, folder: Path, dtype: str, threads: int) -> tuple[float, np.ndarray]:
    scores = folder / f"{dtype}.npy"
    run(
        sys.executable,
        "-m",
        "lmtools",
        "eval",
        data,
        "--path",
        checkpoint,
        "--context-window",
        CONTEXT,
        "--batch-size",
        BATCH,
        "--dtype",
        dtype,
        "--output",
        folder / "result.json",
        "--scores",
        scores,
        threads=threads,
    )
    return json.loads((folder / "result.json").read_text())["tokens_per_second"], np.load(scores)


def eval_fairseq(python: str, data: Path, checkpoint: Path, threads: int) -> tuple[float, float]:
    program = "from fairseq_cli.eval_lm import cli_main; cli_main()"
    output = run(
        python,
        "-c",
        program,
        data,
        "--path",
        checkpoint,
        "--cpu",
        "--gen-subset",
        "test",
        "--tokens-per-sample",
        SAMPLE,
        "--context-window",
        CONTEXT,
        "--batch-size",
        BATCH,
        "--sample-break-mode",
        "none",
        threads=threads,
    )
    rate = re.search(r"Evaluated [\d,]+ tokens in [\d.]+s \(([\d.]+) tokens/s\)", output)
    loss = re.search(r"Loss \(base 2\): ([\d.]+)", output)
    if rate is None or loss is None:
        raise SystemExit(f"fairseq printed no result:\n{output}")
    return float(rate[1]), float(loss[1])


def eval_xglm(data: Path, config: TransformerLMConfig, num_windows: int, threads: int) -> float:
    """Hugging Face's class of the same architecture with random weights, over full windows, logits where needed."""
    from transformers import XGLMConfig, XGLMForCausalLM

    torch.set_num_threads(threads)
    model = XGLMForCausalLM(  # type: ignore[no-untyped-call]
        XGLMConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=SAMPLE,
            d_model=config.decoder_embed_dim,
            ffn_dim=config.decoder_ffn_embed_dim,
            num_layers=config.decoder_layers,
            attention_heads=config.decoder_attention_heads,
            activation_function="gelu",
            scale_embedding=True,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
        )
    ).eval()
    stream = IndexedDataset(data / "test").tokens.astype(np.int64)
    windows = np.stack([np.resize(stream[32 * window :], SAMPLE) for window in range(num_windows)])
    start = time.perf_counter()
    with torch.no_grad():
        for first in range(0, num_windows, BATCH):
            tokens = torch.from_numpy(windows[first : first + BATCH])
            logits = model(tokens, use_cache=False, logits_to_keep=SAMPLE - CONTEXT).logits
            logits.float().log_softmax(-1)
    return num_windows * (SAMPLE - CONTEXT) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fairseq-python", help="Python of an environment with fairseq; without it, it is left out")
    parser.add_argument("--tokens", type=int, default=2500, help="tokens to score")
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    rates: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    with tempfile.TemporaryDirectory(prefix="eval-speed-") as name:
        folder = Path(name)
        data = make_data(folder, options.tokens, options.vocab_size)
        vocab_size = len(Dictionary.load(data / "dict.txt"))
        checkpoint, config = make_checkpoint(folder, vocab_size)
        scores = {}
        for _ in range(options.repeats):
            for dtype in ("float32", "bfloat16"):
                peaks[dtype].append(matmul_peak(getattr(torch, dtype), options.threads))
                rate, scores[dtype] = eval_lmtools(data, checkpoint, folder, dtype, options.threads)
                rates.setdefault(f"lmtools {dtype}", []).append(rate)
            if options.fairseq_python:
                rate, loss = eval_fairseq(options.fairseq_python, data, checkpoint, options.threads)
                rates.setdefault("fairseq float32", []).append(rate)
                ours = -float(np.sum(scores["float32"], dtype=np.float64)) / len(scores["float32"]) / np.log(2)
                assert abs(ours / loss - 1) < 1e-4, (ours, loss)
            try:
                rate = eval_xglm(data, config, 16, options.threads)
                rates.setdefault("XGLM float32", []).append(rate)
            except ImportError:
                print("transformers is not installed: XGLM is left out")

    num_tokens = len(scores["float32"])
    print(
        f"\n{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}, "
        f"{num_tokens:,} tokens, vocabulary {vocab_size:,}, median of {options.repeats}\n"
    )
    print("| what | tokens/s | of lmtools float32 | GFLOP/s needed | share of peak |\n|---|---|---|---|---|")
    per_token = needed_flops(config, 1) / (SAMPLE - CONTEXT)
    base = statistics.median(rates["lmtools float32"])
    for what, values in rates.items():
        rate = statistics.median(values)
        peak = statistics.median(peaks[what.split()[1]])
        flops = rate * per_token
        print(f"| {what} | {rate:.1f} | {rate / base:.2f} | {flops / 1e9:.0f} | {flops / peak:.0%} |")
    for dtype, values in peaks.items():
        print(f"| bare matrix product, {dtype} | | | {statistics.median(values) / 1e9:.0f} | |")


if __name__ == "__main__":
    main()
