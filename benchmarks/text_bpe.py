"""bpe-encode against fairseq's encoder and against bare tiktoken, in one run, on the same text.

    python benchmarks/text_bpe.py --text wiki.test.detok [--fairseq-python FAIRSEQ/bin/python]

fairseq's encoder is a whole command, as lmtools' is. Bare tiktoken is given every advantage: the lines are in memory,
its clock runs only while it encodes, and it writes nothing; it runs with a thread for each worker and with a process
for each, and the faster counts. A second text has a million different words, so that no table of known words helps.
The numbers are medians; CPU seconds are the fairer ones on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from commands import Usage, in_turn, measure, row
from text_commands import main, options, report, write_texts

from lmtools.preprocess.gpt2_vocabulary import VocabularyFiles, find_vocabulary

BARE_TIKTOKEN = """
import multiprocessing, sys, time
import tiktoken
from lmtools.preprocess.bpe_reference import SPLIT
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary

path, workers, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
vocabulary = read_vocabulary(find_vocabulary(None, None))
tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in vocabulary.merges]
encoding = tiktoken.Encoding(
    "gpt2", pat_str=SPLIT.pattern, mergeable_ranks={t: vocabulary.ids[t] for t in tokens}, special_tokens={}
)
lines = [text for line in open(path, encoding="utf-8", newline="\\n") if (text := line.strip())]

def encode_share(share):
    for line in lines[share::workers]:
        encoding.encode_ordinary(line)

start = time.perf_counter()
if way == "threads":
    encoding.encode_ordinary_batch(lines, num_threads=workers)
else:
    others = [multiprocessing.get_context("fork").Process(target=encode_share, args=(n,)) for n in range(1, workers)]
    for other in others:
        other.start()
    encode_share(0)
    for other in others:
        other.join()
print(time.perf_counter() - start)
"""


def run(arguments: argparse.Namespace, scratch: Path) -> str:
    load_before = os.getloadavg()[0]
    texts = write_texts(arguments, scratch)
    text, words = texts.whole, scratch / "words"
    write_different_words(words)
    workers, log = arguments.workers, scratch / "log"
    vocabulary = find_vocabulary(None, None)

    def lmtools(source: Path) -> Usage:
        names = ["--inputs", source, "--outputs", f"{source}.lmtools"]
        return measure([sys.executable, "-m", "lmtools", "bpe-encode", *names, "--workers", workers], log)

    fairseq: dict[str, Usage] = {}
    if arguments.fairseq_python:
        command = fairseq_command(arguments.fairseq_python, vocabulary, text, workers)
        fairseq = in_turn(arguments.fairseq_runs, text=lambda: measure(command, log))
    taken = in_turn(
        arguments.runs,
        text=lambda: lmtools(text),
        tenth=lambda: lmtools(texts.tenth),
        empty=lambda: lmtools(texts.empty),
        words=lambda: lmtools(words),
    )
    bare = {source: bare_tiktoken(source, workers, arguments.runs) for source in (text, words)}

    megabytes, ours = text.stat().st_size / 1e6, taken["text"]
    words_megabytes = words.stat().st_size / 1e6
    rows = [row(f"fairseq's encoder, {workers} workers", megabytes, usage) for usage in fairseq.values()]
    rows += [
        row(f"lmtools bpe-encode --workers {workers}", megabytes, ours),
        row("the same, a tenth of the text", megabytes / 10, taken["tenth"]),
        row("the same, an empty text", 0, taken["empty"]),
        row(f"the same, {words_megabytes:.1f} MB of different words", words_megabytes, taken["words"]),
    ]
    findings = [
        f"- lmtools is {usage.wall_s / ours.wall_s:.1f} times as fast as fairseq's encoder and takes "
        f"1/{usage.cpu_s / ours.cpu_s:.1f} of its CPU time; outputs "
        + ("identical" if filecmp.cmp(f"{text}.fairseq", f"{text}.lmtools", shallow=False) else "DIFFERENT")
        for usage in fairseq.values()
    ]
    for source, name, usage in ((text, "the text", ours), (words, "the different words", taken["words"])):
        findings.append(
            f"- bare tiktoken takes {bare[source]:.2f} s for {name} ({source.stat().st_size / 1e6 / bare[source]:.1f} "
            f"MB/s): lmtools' whole command runs at {bare[source] / usage.wall_s:.0%} of its speed"
        )
    start_up, own = taken["empty"].parent_cpu_s, ours.parent_cpu_s
    findings.append(
        f"- lmtools' first process takes {own / ours.cpu_s:.1%} of the CPU time: {start_up:.2f} s to start up, as an "
        f"empty text shows, and {max(own - start_up, 0) / ours.cpu_s:.1%} for the text"
    )
    return report(
        "bpe-encode against fairseq's encoder and bare tiktoken",
        arguments,
        texts,
        load_before=load_before,
        packages=["tiktoken", "regex"],
        rows=rows,
        findings=findings,
    )


def write_different_words(path: Path) -> None:
    """A million words of 3 to 12 random letters, 20 a line; hardly one comes twice."""
    generator = random.Random(1)
    with open(path, "w") as stream:
        for _ in range(50_000):
            words = ("".join(generator.choices("etaoinshrdlu", k=generator.randint(3, 12))) for _ in range(20))
            stream.write(" ".join(words) + "\n")


def fairseq_command(python: str, vocabulary: VocabularyFiles, text: Path, workers: int) -> list[object]:
    return [
        *(python, "-m", "fairseq.examples.roberta.multiprocessing_bpe_encoder"),
        *("--encoder-json", vocabulary.encoder_json, "--vocab-bpe", vocabulary.vocab_bpe),
        *("--inputs", text, "--outputs", f"{text}.fairseq", "--workers", workers),
    ]


def bare_tiktoken(text: Path, workers: int, runs: int) -> float:
    """Seconds that tiktoken takes for all lines: the median of some runs, threads or processes, whichever is faster."""
    medians = []
    for way in ("threads", "processes"):
        command = [sys.executable, "-c", BARE_TIKTOKEN, str(text), str(workers), way]
        medians.append(
            statistics.median(json.loads(subprocess.check_output(command)) for _ in range(runs)),
        )
    return float(min(medians))


if __name__ == "__main__":
    parser = options(__doc__, text="text, a paragraph a line")
    parser.add_argument("--fairseq-runs", type=int, default=1, help="of fairseq's encoder, which takes long")
    main(parser, run)
