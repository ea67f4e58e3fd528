"""detok against one process of sacremoses, as whole commands in one run, on the same text.

    python benchmarks/text_detok.py --text wiki.test.raw [--fairseq-python FAIRSEQ/bin/python]

The peer is the plainest program that does the published step: sacremoses on each line, then five replacements. With
--fairseq-python the published script itself runs too. All outputs are compared byte for byte. The numbers are medians;
CPU seconds are the fairer ones on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import sys
from pathlib import Path

from commands import Usage, in_turn, measure, row
from text_commands import main, options, report, write_texts

ONE_PROCESS = """
import sys, sacremoses
detokenizer = sacremoses.MosesDetokenizer()
with open(sys.argv[1], encoding="utf-8", newline="\\n") as raw, open(sys.argv[2], "w", encoding="utf-8") as out:
    for line in raw:
        text = detokenizer.detokenize(line.strip().split(" "))
        text = text.replace(" @", "").replace("@ ", "").replace(" =", "=").replace("= ", "=").replace(" – ", "–")
        out.write(text + "\\n")
"""


def run(arguments: argparse.Namespace, scratch: Path) -> str:
    load_before = os.getloadavg()[0]
    texts = write_texts(arguments, scratch)
    raw = texts.whole
    megabytes = raw.stat().st_size / 1e6
    log = scratch / "log"

    def lmtools(text: Path, output: str, workers: int) -> Usage:
        command = ["detok", text, scratch / output, "--workers", workers]
        return measure([sys.executable, "-m", "lmtools", *command], log)

    def published() -> Usage:
        (scratch / "published").unlink(missing_ok=True)
        script = [arguments.fairseq_python, "-m", "fairseq.examples.megatron_11b.detok", raw]
        return measure(script, log, stdout=scratch / "published")

    commands = {
        "one": lambda: measure([sys.executable, "-c", ONE_PROCESS, raw, scratch / "one"], log),
        "lmtools": lambda: lmtools(raw, "lmtools", arguments.workers),
        "lmtools_one": lambda: lmtools(raw, "lmtools_one", 1),
        "tenth": lambda: lmtools(texts.tenth, "tenth.detok", arguments.workers),
        "empty": lambda: lmtools(texts.empty, "empty.detok", arguments.workers),
    }
    if arguments.fairseq_python:
        commands["published"] = published
    taken = in_turn(arguments.runs, **commands)
    outputs = [name for name in ("lmtools", "lmtools_one", "published") if name in taken]
    different = [name for name in outputs if not filecmp.cmp(scratch / name, scratch / "one", shallow=False)]

    one, ours = taken["one"], taken["lmtools"]
    rows = [row("sacremoses, one process", megabytes, one)]
    if "published" in taken:
        rows.append(row("the published script", megabytes, taken["published"]))
    rows += [
        row("lmtools detok --workers 1", megabytes, taken["lmtools_one"]),
        row(f"lmtools detok --workers {arguments.workers}", megabytes, ours),
        row("the same, a tenth of the text", megabytes / 10, taken["tenth"]),
        row("the same, an empty text", 0, taken["empty"]),
    ]
    findings = [
        f"- {arguments.workers} workers of lmtools are {one.wall_s / ours.wall_s:.2f} times as fast as one process",
        f"- its first process takes {ours.parent_cpu_s / ours.cpu_s:.1%} of the CPU time",
        f"- outputs: {', '.join(different) + ' differ' if different else 'all identical'}",
    ]
    return report(
        "detok against one process of sacremoses",
        arguments,
        texts,
        load_before=load_before,
        packages=["sacremoses"],
        rows=rows,
        findings=findings,
    )


if __name__ == "__main__":
    main(options(__doc__, text="WikiText as it is published"), run)
