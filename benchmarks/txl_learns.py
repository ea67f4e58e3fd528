"""Memory helps: a Transformer-XL that `lmtools train` made, against a plain Transformer of its size and its data.

    python benchmarks/txl_learns.py wiki.valid.tokens wiki.test.tokens --output benchmarks/results/txl_learns.md

The texts' first 85 % of lines are trained on, 5 % validate, 10 % test. Words seen fewer than 4 times are <unk>. Both
models read the same splits, learn from as many tokens in as many updates with the same optimizer, and are scored on
every token of the test part, ends of line included. The Transformer-XL learns from segments, with a memory as long as
one; the plain model from blocks of both together, so that neither ever looks back further than the other. Its
feed-forward layers are made as wide as gives it the other's number of parameters.

The Transformer-XL is evaluated with no memory and with 1, 2 and 4 segments of it; the plain one with as much to look
back to as it can: nothing, or one segment before the one that is scored. The picture shows both. Everything is done by
lmtools' own commands, which are printed. `--quick` makes a few updates, to try the program.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from commands import command_line, machine, versions
from learning import lmtools, split_text
from matplotlib.figure import Figure

from lmtools.checkpoints.models import new_model
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.models.architectures import ModelConfig, transformer_lm_megatron, transformer_xl

PREPARE = (
    "binarize --only-source --trainpref train.txt --validpref valid.txt --testpref test.txt --thresholdsrc 4 "
    "--destdir bin --workers 1"
)
LAYERS, WIDTH, HEADS, INNER = 4, 128, 4, 512
SEGMENT, STREAMS = 32, 32
"""Of the Transformer-XL: tokens of a segment, and rows of a batch. The plain model has half the rows, twice as long."""
MULTIPLES = (0, 1, 2, 4)

BOTH = (
    "--dropout 0.1 --optimizer adam --clip-norm 0.25 --lr 0.002 --lr-scheduler cosine --warmup-updates 100 "
    "--max-update {updates} --validate-interval-updates {interval} --validate-interval 1000 --keep-interval-updates 1 "
    "--no-epoch-checkpoints --log-format simple --log-interval 100 --seed 1"
)
TRAIN_XL = (
    f"train bin --task truncated_bptt_lm --arch transformer_xl --tokens-per-sample {SEGMENT} --batch-size {STREAMS} "
    f"--mem-len {SEGMENT} --batch-size-valid 4 --n-layer {LAYERS} --d-model {WIDTH} --n-head {HEADS} "
    f"--d-head {WIDTH // HEADS} --d-inner {INNER} --dropatt 0 {BOTH} --save-dir xl"
)
TRAIN_PLAIN = (
    f"train bin --arch transformer_lm_megatron --share-decoder-input-output-embed --tokens-per-sample {2 * SEGMENT} "
    f"--batch-size {STREAMS // 2} --batch-size-valid 32 --decoder-layers {LAYERS} --decoder-embed-dim {WIDTH} "
    f"--decoder-attention-heads {HEADS} --decoder-ffn-embed-dim {{inner}} --attention-dropout 0 {BOTH} --save-dir plain"
)
EVALUATE_XL = (
    "eval bin --path xl/checkpoint_best --gen-subset test --task truncated_bptt_lm --batch-size 1 "
    f"--tokens-per-sample {SEGMENT} --mem-len {{memory}} --json"
)
EVALUATE_PLAIN = (
    "eval bin --path plain/checkpoint_best --gen-subset test --batch-size 32 --tokens-per-sample {length} "
    "--context-window {context} --json"
)


def num_parameters(config: ModelConfig) -> int:
    """Of a model of this shape; tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in new_model(config).parameters())


def transformer_xl_size(vocab_size: int) -> int:
    """Parameters of what `TRAIN_XL` trains."""
    return num_parameters(
        transformer_xl(
            vocab_size,
            n_layer=LAYERS,
            d_model=WIDTH,
            n_head=HEADS,
            d_head=WIDTH // HEADS,
            d_inner=INNER,
            mem_len=SEGMENT,
        )
    )


def plain_size(vocab_size: int, inner: int) -> int:
    """Parameters of what `TRAIN_PLAIN` trains, with feed-forward layers of this width."""
    return num_parameters(
        transformer_lm_megatron(
            vocab_size,
            decoder_layers=LAYERS,
            decoder_embed_dim=WIDTH,
            decoder_attention_heads=HEADS,
            decoder_ffn_embed_dim=inner,
            share_decoder_input_output_embed=True,
            max_target_positions=2 * SEGMENT,
        )
    )


def inner_of_same_size(vocab_size: int) -> int:
    """The width of the plain model's feed-forward layers that comes nearest to the Transformer-XL's size."""
    smallest, per_unit = plain_size(vocab_size, 1), plain_size(vocab_size, 2) - plain_size(vocab_size, 1)
    return 1 + round((transformer_xl_size(vocab_size) - smallest) / per_unit)


def trained(command: str, run: str, folder: Path) -> tuple[float, float]:
    """Train; the best validation's perplexity, and minutes."""
    started = time.monotonic()
    lmtools(command, folder)
    minutes = (time.monotonic() - started) / 60
    [curves] = json.loads(lmtools(f"plot {run} --json", folder, capture=True))["runs"]
    return 2 ** curves["best"]["loss_base2"], minutes


def evaluated(command: str, folder: Path, num_tokens: int) -> float:
    """The test part's perplexity, over every one of its tokens."""
    result: dict[str, Any] = json.loads(lmtools(command, folder, capture=True))
    assert result["tokens_scored"] == num_tokens, "all are scored on the same tokens"
    return float(result["perplexity"])


def draw(with_memory: dict[int, float], plain: dict[int, float], path: Path) -> None:
    """Perplexity over how many tokens before the scored segment a model sees, in the colours of `lmtools plot`."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, colour, marker, side, offset, found in (
        ("Transformer-XL, by length of its memory", "#0072b2", "o", "right", (-4, -14), with_memory),
        ("plain Transformer, by length of its context", "#d55e00", "s", "left", (4, 6), plain),
    ):
        axes.plot(list(found), list(found.values()), color=colour, marker=marker, label=name)
        for tokens, perplexity in found.items():
            text = f"{perplexity:.1f}"
            place = (tokens, perplexity)
            axes.annotate(text, place, textcoords="offset points", xytext=offset, ha=side, color=colour)
    axes.set_xticks([multiple * SEGMENT for multiple in MULTIPLES])
    axes.set_xlabel(f"tokens seen before the segment of {SEGMENT} that is scored")
    axes.set_ylabel("test perplexity")
    axes.margins(x=0.1, y=0.2)
    axes.grid(color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report_of(
    lines: list[str], sizes: tuple[int, int], tokens: dict[str, int], num_types: int, minutes: float, updates: int
) -> str:
    """The Markdown page, but for its commands."""
    table = "\n".join(lines)
    return f"""# Memory helps

`{command_line()}`
{machine()}, {versions("lmtools", "torch")}; {minutes:.1f} minutes of training, both models together.

{tokens["train"]:,} tokens to train on, {tokens["valid"]:,} to validate, {tokens["test"]:,} to test; \
{num_types:,} types. Each model learns in {updates:,} updates of {SEGMENT * STREAMS:,} tokens.
Transformer-XL: {sizes[0]:,} parameters; plain Transformer: {sizes[1]:,} ({100 * (sizes[1] / sizes[0] - 1):+.2f} %).

| model | evaluated with | a scored token sees before it | validation perplexity | test perplexity | over tokens |
|---|---|---:|---:|---:|---:|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="one sentence or paragraph a line, words between spaces")
    parser.add_argument("--updates", type=int, default=700, help="of each model")
    parser.add_argument("--output", type=Path, help="write the report there, and the picture as .png beside it")
    parser.add_argument("--quick", action="store_true", help="a few updates")
    arguments = parser.parse_args()
    updates = 20 if arguments.quick else arguments.updates
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split_text(arguments.texts, folder)
        lmtools(PREPARE, folder)
        tokens = {split: IndexedDataset(folder / "bin" / split).num_tokens for split in ("train", "valid", "test")}
        num_types = len(Dictionary.load(folder / "bin" / "dict.txt"))
        inner = inner_of_same_size(num_types)
        filled = {"updates": updates, "interval": max(updates // 5, 1), "inner": inner}
        xl_valid, xl_minutes = trained(TRAIN_XL.format(**filled), "xl", folder)
        plain_valid, plain_minutes = trained(TRAIN_PLAIN.format(**filled), "plain", folder)
        with_memory = {
            multiple * SEGMENT: evaluated(EVALUATE_XL.format(memory=multiple * SEGMENT), folder, tokens["test"])
            for multiple in MULTIPLES
        }
        plain = {
            context: evaluated(EVALUATE_PLAIN.format(length=SEGMENT + context, context=context), folder, tokens["test"])
            for context in (0, SEGMENT)
        }

    def row(model: str, how: str, before: int, valid: float, test: float) -> str:
        seen = f"{before:,} to {before + SEGMENT - 1:,}"
        return f"| {model} | {how} | {seen} | {valid:.2f} | {test:.2f} | {tokens['test']:,} |"

    lines = [
        row("Transformer-XL", f"memory of {memory} ({memory // SEGMENT}x)", memory, xl_valid, perplexity)
        for memory, perplexity in with_memory.items()
    ]
    lines += [
        row("plain Transformer", f"context of {context}", context, plain_valid, perplexity)
        for context, perplexity in plain.items()
    ]
    sizes = transformer_xl_size(num_types), plain_size(num_types, inner)
    report = report_of(lines, sizes, tokens, num_types, xl_minutes + plain_minutes, updates)
    if arguments.output:
        picture = arguments.output.with_suffix(".png")
        draw(with_memory, plain, picture)
        report += f"\n![Test perplexity by tokens seen before the scored segment]({shlex.quote(picture.name)})\n"
    commands = [
        *(PREPARE, TRAIN_XL.format(**filled), TRAIN_PLAIN.format(**filled)),
        *(EVALUATE_XL.format(memory=SEGMENT), EVALUATE_PLAIN.format(length=2 * SEGMENT, context=SEGMENT)),
    ]
    report += "\n" + "\n".join(f"    lmtools {command}" for command in commands) + "\n"
    print(report)
    if arguments.output:
        arguments.output.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
