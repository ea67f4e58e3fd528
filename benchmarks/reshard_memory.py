"""Memory and throughput of `lmtools reshard`, for two sizes of a model and each kind of file.

    python benchmarks/reshard_memory.py --output benchmarks/results/reshard_memory.md

The models have the same largest tensor, the embedding, and 3 or 24 blocks. Each is written as legacy pickles, as zip
archives and as safetensors, and then written again in other numbers of parts and other formats, by the command in a
process of its own. Memory is the process's high-water mark, mapped pages included, less that of an interpreter which
has imported torch and nothing else. It is held against

    files that map into memory (zip, safetensors)    1.2 times the largest tensor, and one output buffer
    legacy pickles                                   one input part

where what lmtools itself imports counts too: the parts are large beside it. A mark above it ends the program with an
error. Throughput is bytes of the input by seconds from start to end, the interpreter's start included; it takes a quiet
machine, while memory does not depend on what else runs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import Usage, command_line, machine, measure, versions

VOCAB_SIZE, EMBED_DIM, NUM_HEADS = 32_768, 1024, 16
LARGEST_TENSOR_BYTES = 4 * VOCAB_SIZE * EMBED_DIM
OUTPUT_BUFFER_BYTES = 8 << 20  # what a writer has of a tensor at a time
PARTS = {"legacy": 2, "zip": 8, "safetensors": 2}
TARGETS = {
    "legacy": [("fairseq", 1), ("safetensors", 8)],
    "zip": [("safetensors", 1), ("fairseq", 16)],
    "safetensors": [("safetensors", 4), ("hf", 1)],
}


@dataclass(frozen=True)
class Measured:
    container: str
    input_bytes: int
    largest_part_bytes: int
    format: str
    num_parts: int
    usage: Usage

    def bound(self) -> int:
        if self.container == "legacy":
            return self.largest_part_bytes
        return LARGEST_TENSOR_BYTES * 12 // 10 + OUTPUT_BUFFER_BYTES


def write_inputs(folder: Path, num_layers: int, containers: Sequence[str]) -> None:
    """The same model in zip archives, and in each other container."""
    import torch
    from write_megatron_11b import random_values, rewrite_as_legacy

    from lmtools.checkpoints.fairseq_write import write_fairseq_parts
    from lmtools.checkpoints.reshard import reshard
    from lmtools.models.architectures import transformer_lm_megatron

    config = transformer_lm_megatron(
        VOCAB_SIZE,
        decoder_layers=num_layers,
        decoder_embed_dim=EMBED_DIM,
        decoder_ffn_embed_dim=4 * EMBED_DIM,
        decoder_attention_heads=NUM_HEADS,
        share_decoder_input_output_embed=True,
    )
    write_fairseq_parts(folder / "zip", config, random_values, num_parts=PARTS["zip"], dtype=torch.float32)
    if "safetensors" in containers:
        reshard(folder / "zip", folder / "safetensors", num_parts=PARTS["safetensors"], format="safetensors")
    if "legacy" in containers:
        reshard(folder / "zip", folder / "legacy", num_parts=PARTS["legacy"], format="fairseq")
        for path in (folder / "legacy").iterdir():
            rewrite_as_legacy(path)


def measure_reshard(folder: Path, container: str, format: str, num_parts: int) -> Measured:
    sizes = [path.stat().st_size for path in (folder / container).iterdir()]
    command = ["reshard", folder / container, folder / "out", "--format", format, "--mp", num_parts]
    usage = measure([sys.executable, "-m", "lmtools", *command], folder / "log")
    shutil.rmtree(folder / "out")
    return Measured(container, sum(sizes), max(sizes), format, num_parts, usage)


def measure_all(folder: Path, layers: Sequence[int], containers: Sequence[str]) -> list[Measured]:
    measured = []
    for num_layers in layers:
        there = folder / str(num_layers)
        # In a process of its own: a process hands its high-water mark on to its children.
        write = ["--write", str(there), "--layers", str(num_layers), "--inputs", *containers]
        subprocess.run([sys.executable, __file__, *write], check=True)
        for container in containers:
            measured += [measure_reshard(there, container, *target) for target in TARGETS[container]]
        shutil.rmtree(there)
    return measured


def report(measured: Sequence[Measured], bare_bytes: int, imports_bytes: int, *, with_throughput: bool) -> str:
    def mb(num_bytes: float) -> str:
        return f"{num_bytes / 1e6:,.0f}"

    def parts(number: int) -> str:
        return f"{number} part{'s' if number > 1 else ''}"

    lines = [
        "# Memory of resharding",
        "",
        f"{machine()}; {versions('torch', 'numpy', 'safetensors')}. `{command_line()}`",
        "",
        f"float32; largest tensor {mb(LARGEST_TENSOR_BYTES)} MB. Memory is a process's high-water mark less "
        f"{mb(bare_bytes)} MB, an interpreter's with torch; {mb(imports_bytes - bare_bytes)} MB of it is what lmtools "
        "imports, whatever the model.",
        "",
        "| input | MB | largest part, MB | output | memory, MB | at most, MB |" + " s | MB/s |" * with_throughput,
        "|---|---:|---:|---|---:|---:|" + "---:|---:|" * with_throughput,
    ]
    for one in measured:
        memory, seconds = one.usage.peak_bytes - bare_bytes, one.usage.wall_s
        lines.append(
            f"| {one.container}, {parts(PARTS[one.container])} | {mb(one.input_bytes)} | "
            f"{mb(one.largest_part_bytes)} | {one.format}, {parts(one.num_parts)} | {mb(memory)} | {mb(one.bound())} |"
            + f" {seconds:.1f} | {mb(one.input_bytes / seconds)} |"
            * with_throughput
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 24], help="blocks of each model, of 50 MB each")
    parser.add_argument("--inputs", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--folder", type=Path, help="where to write, 4 times the largest model; removed afterwards")
    parser.add_argument("--memory-only", action="store_true", help="leave out seconds and MB/s, on a busy machine")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_inputs(args.write, args.layers[0], args.inputs)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        log = Path(folder) / "log"
        bare = measure([sys.executable, "-c", "import torch"], log).peak_bytes
        imports = measure([sys.executable, "-c", "import lmtools.checkpoints.reshard"], log).peak_bytes
        measured = measure_all(Path(folder), args.layers, args.inputs)
    found = report(measured, bare, imports, with_throughput=not args.memory_only)
    print(found)
    if args.output:
        args.output.write_text(found)
    above = [one for one in measured if one.usage.peak_bytes - bare > one.bound()]
    if above:
        sys.exit(f"{len(above)} of {len(measured)} took more memory than they may")


if __name__ == "__main__":
    main()
