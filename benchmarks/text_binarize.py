"""binarize against fairseq-preprocess, as whole commands in one run, on the same text with the same dictionary.

    python benchmarks/text_binarize.py --text wiki.test.bpe --srcdict dict.txt --fairseq-python FAIRSEQ/bin/python

A run on an empty text shows what starting up takes. The outputs are compared byte for byte. CPU seconds are the fairer
number on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import random
import shutil
import sys
from itertools import accumulate
from pathlib import Path

from commands import Usage, in_turn, measure
from text_commands import main, options, report, write_texts

FAIRSEQ = "from fairseq_cli.preprocess import cli_main; cli_main()"
TABLE_HEAD = (
    "| command | tokens | wall s | tokens/s | CPU s, all processes | CPU s, first process | largest process, MiB |\n"
    "|---|---:|---:|---:|---:|---:|---:|"
)


def write_words(target: Path, num_types: int, num_bytes: int) -> int:
    """Write text whose words follow Zipf's law, with every type in it; returns its tokens."""
    generator = random.Random(1)
    words = [f"{chr(97 + n % 26)}{n:x}" for n in range(num_types)]
    cumulative = list(accumulate(1 / (rank + 3) for rank in range(num_types)))
    tokens = 0
    block: list[str] = []
    for _ in range(20):
        lines = [" ".join(generator.choices(words, cum_weights=cumulative, k=25)) for _ in range(10_000)]
        block.append("\n".join(lines) + "\n")
    with open(target, "w") as stream:
        for start in range(0, num_types, 25):
            stream.write(" ".join(words[start : start + 25]) + "\n")
        tokens += num_types + -(-num_types // 25)
        while stream.tell() < num_bytes:
            stream.write(generator.choice(block))
            tokens += 10_000 * 26
    return tokens


def compare(ours: Path, theirs: Path) -> str:
    names = sorted(path.name for path in theirs.iterdir() if path.name != "preprocess.log")
    different = [name for name in names if not filecmp.cmp(ours / name, theirs / name, shallow=False)]
    return f"{', '.join(different)} differ" if different else f"{', '.join(names)} identical"


def count_tokens(text: Path) -> int:
    """Words, and an end for each line."""
    with open(text, "rb") as lines:
        return sum(len(line.split()) + 1 for line in lines)


def row(name: str, tokens: int, usage: Usage) -> str:
    return (
        f"| {name} | {tokens:,} | {usage.wall_s:.2f} | {tokens / usage.wall_s:,.0f} | {usage.cpu_s:.2f} | "
        f"{usage.parent_cpu_s:.2f} ({usage.parent_cpu_s / usage.cpu_s:.1%}) | {usage.peak_bytes / 2**20:,.0f} |"
    )


def run(arguments: argparse.Namespace, scratch: Path) -> str:
    load_before = os.getloadavg()[0]
    texts = write_texts(arguments, scratch)
    log = scratch / "log"

    def lmtools(name: str, *command: object) -> Usage:
        shutil.rmtree(scratch / name, ignore_errors=True)
        names = ["--workers", arguments.workers, "--destdir", scratch / name]
        return measure([sys.executable, "-m", "lmtools", "binarize", *command, *names], log)

    given = ("--srcdict", arguments.srcdict, "--testpref")
    built = ("--dict-only", "--trainpref")
    ways = {"dictionary given": (*given, texts.whole), "dictionary built": (*built, texts.whole)}
    commands = {"an empty text": (*given, texts.empty), "a tenth of the text": (*given, texts.tenth), **ways}
    tokens = dict.fromkeys(ways, count_tokens(texts.whole)) | {
        "an empty text": 0,
        "a tenth of the text": count_tokens(texts.tenth),
    }
    if arguments.words_mb:
        name = f"{arguments.words_mb} MB of {arguments.words_types:,} types, built and binarized"
        tokens[name] = write_words(scratch / "words", arguments.words_types, arguments.words_mb * 10**6)
        commands[name] = ("--trainpref", scratch / "words")
    ours = in_turn(arguments.runs, **{name: lambda name=name: lmtools(name, *commands[name]) for name in commands})
    rows = [row(f"lmtools: {name}", tokens[name], ours[name]) for name in commands]

    findings = []
    for workers in arguments.fairseq_workers if arguments.fairseq_python else []:
        for name, way in ways.items():
            theirs = scratch / f"fairseq, {name}, {workers}"
            command = ["--only-source", *way, "--workers", workers, "--destdir", theirs]
            usage = measure([arguments.fairseq_python, "-c", FAIRSEQ, *command], log)
            rows.append(row(f"fairseq: {name}, {workers} worker(s)", tokens[name], usage))
            findings.append(
                f"- {name}, fairseq with {workers} worker(s): lmtools is {usage.wall_s / ours[name].wall_s:.1f} times "
                f"as fast and takes 1/{usage.cpu_s / ours[name].cpu_s:.1f} of the CPU time; "
                + compare(scratch / name, theirs)
            )
    return report(
        "binarize against fairseq-preprocess",
        arguments,
        texts,
        load_before=load_before,
        packages=[],
        rows=rows,
        findings=findings,
        table_head=TABLE_HEAD,
    )


if __name__ == "__main__":
    parser = options(__doc__, text="BPE ids, a line for each line")
    parser.add_argument("--srcdict", type=Path, required=True, help="its dictionary")
    parser.add_argument("--fairseq-workers", type=int, nargs="*", default=[2])
    parser.add_argument("--words-types", type=int, default=267_744, help="types of a text of words")
    parser.add_argument("--words-mb", type=int, default=500, help="size of that text; 0 leaves it out")
    main(parser, run)
