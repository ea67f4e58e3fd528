"""`lmtools quickstart`: the whole way on a small scale, on text that every Python carries, with no download.

Each step is an ordinary command in a process of its own, printed before it runs: what is shown can be typed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lmtools.cli.options import WorkersOption
from lmtools.errors import CheckpointError
from lmtools.files import disk_errors

# The dictionary is made from all of the text, as GPT-2's has ids for any text: no token is <unk>.
_COMMANDS = """\
lmtools detok topics.raw train.raw valid.raw test.raw --output-dir . --workers {workers}
lmtools bpe-encode --inputs topics.detok --outputs topics.bpe --workers {workers}
lmtools bpe-encode --inputs train.detok --outputs train.bpe --workers {workers}
lmtools bpe-encode --inputs valid.detok --outputs valid.bpe --workers {workers}
lmtools bpe-encode --inputs test.detok --outputs test.bpe --workers {workers}
lmtools binarize --only-source --trainpref topics.bpe --dict-only --destdir . --workers {workers}
lmtools binarize --only-source --trainpref train.bpe --validpref valid.bpe --testpref test.bpe --srcdict dict.txt \
--destdir topics-bin --workers {workers}
lmtools train topics-bin --save-dir run --mp 2 --arch transformer_lm_megatron_tiny --decoder-layers 2 \
--decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4 --tokens-per-sample 128 \
--batch-size 16 --optimizer adam --lr 3e-3 --lr-scheduler cosine --warmup-updates 10 --max-update {max_update} \
--no-epoch-checkpoints --resume never
lmtools eval topics-bin --path run/checkpoint_best --mp 2 --context-window 64 --batch-size 16 --output two-ranks.json
lmtools reshard run/checkpoint_best one-part --mp 1
lmtools eval topics-bin --path one-part --context-window 64 --batch-size 16 --scores scores.npy --output one-rank.json
"""

_NUMBERS = """\
lmtools renorm-ppl --result one-rank.json
lmtools generate --path run/checkpoint_best --prompts prompts.txt --max-new-tokens 40 --temperature 0.8 --seed 1
lmtools report run one-rank.json --output report.html
"""

_PRODUCED = {
    "train.raw": "Python's help topics, written as WikiText writes text",
    "train.detok": "the text detokenised",
    "train.bpe": "its lines as GPT-2 BPE ids",
    "topics-bin/train.bin": "the ids as a model reads them",
    "topics-bin/dict.txt": "the ids that occur, and how often",
    "run/metrics.jsonl": "every update and validation of the training run",
    "run/checkpoint_best/lmtools.json": "the best checkpoint's configuration; its tensors lie beside it",
    "one-rank.json": "the perplexity, with every count and setting that went into it",
    "report.html": "all of it to look at",
    "scores.npy": "the log probability of each token of test.raw",
}

_AGREE = 1e-5
"""Relative difference of two float32 losses that are sums in another order."""


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Folder for all that it makes.")] = Path("quickstart"),
    workers: WorkersOption = 2,
    max_update: Annotated[int, typer.Option(min=1, help="Updates of training.")] = 80,
) -> None:
    """From raw text to a trained model, its perplexity and its own words, one ordinary command after the other.

    Needs no download. The model is small and hardly trained, the way is the whole one: two model-parallel ranks train
    and evaluate it, and one rank, given the same weights in one part, must find the same loss.
    """
    started = time.monotonic()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    if (folder / "one-part").is_dir():  # of an earlier quickstart, which `reshard` would not write over
        shutil.rmtree(folder / "one-part")
    run_commands(_COMMANDS.format(workers=workers, max_update=max_update), folder)
    print(f"\n# {agreement(folder / 'two-ranks.json', folder / 'one-rank.json')}")
    run_commands(_NUMBERS, folder)
    print(f"\n# done in {time.monotonic() - started:.0f} s; in {folder}:")
    for name, meaning in _PRODUCED.items():
        print(f"{name:33} {(folder / name).stat().st_size:9,} bytes  {meaning}")


def write_text(folder: Path) -> None:
    """All of it as topics.raw, eight tenths as train.raw, a tenth each as valid.raw and test.raw; prompts.txt."""
    from lmtools.files import atomic_write_text

    lines = [f"{line}\n" for line in raw_lines()]
    tenth = len(lines) // 10
    parts = {"topics": lines, "train": lines[: -2 * tenth], "valid": lines[-2 * tenth : -tenth], "test": lines[-tenth:]}
    for name, part in parts.items():
        atomic_write_text(folder / f"{name}.raw", "".join(part))
    starts = [words for line in parts["test"] if all(map(str.isalpha, words := line.split()[:3])) and len(words) == 3]
    atomic_write_text(folder / "prompts.txt", "".join(f"{' '.join(words)}\n" for words in starts[:3]))


def raw_lines() -> Iterator[str]:
    """Python's help topics as lines of WikiText: a title between = signs, a paragraph a line, punctuation set apart."""
    from pydoc_data.topics import topics

    for title, body in sorted(topics.items()):
        yield from (" ", f" = {title} = ", " ")
        for paragraph in body.split("\n\n"):
            separated = re.sub(r"([,;:?!()]|\.(?=\s|$))", r" \1 ", paragraph)
            words = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", separated).split()
            if words:
                yield f" {' '.join(words)} "


def run_commands(commands: str, folder: Path) -> None:
    """Run lines of `lmtools ...` in a folder, and stop at the first that fails or is told to stop."""
    from lmtools.recipes.run import ending_first

    for line in commands.splitlines():
        print(f"\n$ {line}", flush=True)
        with ending_first([sys.executable, "-m", *shlex.split(line)], cwd=folder) as child:
            code = child.wait()
        if code != 0:
            raise typer.Exit(code if code > 0 else 128 - code)


def agreement(*results: Path) -> str:
    """How two evaluations of the same weights compare.

    Raises:
        CheckpointError: they differ by more than rounding.
    """
    first, second = (json.loads(path.read_text(encoding="utf-8"))["loss_base2"] for path in results)
    difference = abs(first / second - 1)
    losses = f"{results[0].stem} {first:.7f} bits, {results[1].stem} {second:.7f} bits"
    if difference > _AGREE:
        raise CheckpointError(f"{losses}: expected the same loss from the same weights; please report this")
    return f"{losses}: the same to {difference:.0e}"
