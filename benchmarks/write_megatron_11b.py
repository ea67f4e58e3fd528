"""Writes a random Megatron-11b at full size, as the published one lies on a disk: 8 legacy files in float16, 22 GB.

    python benchmarks/write_megatron_11b.py FOLDER

For rehearsals: everything that takes the real model takes this one, and says a perplexity of about its vocabulary. A
tensor is made, written and forgotten before the next one, then a part at a time is written again as torch wrote it in
2020: 25 GB of disk while it lasts, and little memory. `--layers 2` writes a small
one to try a program with. The values depend on the parameter and the part alone; the folder is complete or absent.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.models.architectures import transformer_lm_megatron_11b
from lmtools.parallel.random import stream_seed

VOCAB_SIZE = 51_200
NUM_PARTS = 8


def random_values(name: str, slices: tuple[slice, ...]) -> Tensor:
    """Part of a parameter, as after some training: norms near 1, all else near 0."""
    seed = stream_seed(name, *(f"{piece.start}-{piece.stop}" for piece in slices))
    values = torch.empty([piece.stop - piece.start for piece in slices])
    values.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    return values.add_(1.0) if name.endswith("norm.weight") else values


def write(folder: Path, *, layers: int, embed_dim: int, ffn_dim: int, vocab_size: int) -> list[Path]:
    config = transformer_lm_megatron_11b(
        vocab_size,
        decoder_layers=layers,
        decoder_embed_dim=embed_dim,
        decoder_ffn_embed_dim=ffn_dim,
        share_decoder_input_output_embed=True,
    )
    paths = write_fairseq_parts(folder, config, random_values, num_parts=NUM_PARTS, dtype=torch.float16)
    for path in paths:
        rewrite_as_legacy(path)
    return paths


def rewrite_as_legacy(path: Path) -> None:
    """The same content in the container of torch before 1.6; our own file, so it may be unpickled freely."""
    content = torch.load(path, mmap=True, weights_only=False)
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary, _use_new_zipfile_serialization=False)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=72)
    parser.add_argument("--embed-dim", type=int, default=3072)
    parser.add_argument("--ffn-dim", type=int, default=18432)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    args = parser.parse_args()
    started = time.monotonic()
    paths = write(
        args.folder,
        layers=args.layers,
        embed_dim=args.embed_dim,
        ffn_dim=args.ffn_dim,
        vocab_size=args.vocab_size,
    )
    num_bytes = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} parts, {num_bytes:,} bytes, {time.monotonic() - started:.0f} s: {args.folder}")


if __name__ == "__main__":
    main()
