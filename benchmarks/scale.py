"""What 1 TB of text needs, from the rates in results/, and from how fast this machine joins parts and hashes files.

    python benchmarks/scale.py [--output results/scale.md]

A stage's tasks run on any number of cores. After them one process joins the parts, and one worker hashes the output for
the manifest: that is the serial part. CPU seconds are those of all processes, less what an empty text takes.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from commands import machine, versions

from lmtools.files import fsync_file, sha256_file
from lmtools.preprocess.lines import join_parts

RESULTS = Path(__file__).parent / "results"
TEXT_MB = 1e6  # 1 TB of detokenised text
CORES = (16, 64, 512)


class Stage(NamedTuple):
    """One stage: its input and output for a MB of detokenised text, and what the tasks take for a MB of input."""

    name: str
    input_mb: float
    output_mb: float
    cpu_seconds: float


def stages() -> list[Stage]:
    """All three, from the tables of their own benchmarks."""
    detok, bpe, binarize = ((RESULTS / f"{name}.md").read_text() for name in ("detok", "bpe", "binarize"))
    raw_mb, text_mb, ids_mb = (int(re.findall(r"([\d,]+) bytes", of)[0].replace(",", "")) / 1e6 for of in
                               (detok, bpe, binarize))  # fmt: skip
    raw_of_text = 1_290_590 / 1_238_056  # wiki.test.raw and wiki.test.detok
    ids_of_text = ids_mb / text_mb
    tokens = column(binarize, "dictionary given", 0)
    return [
        Stage("detok", raw_of_text, 1, net(detok, "lmtools detok --workers 2", 2) / raw_mb),
        Stage("bpe-encode", 1, ids_of_text, net(bpe, "lmtools bpe-encode --workers 2", 2) / text_mb),
        Stage("binarize", ids_of_text, 2 * tokens / 1e6 / text_mb, net(binarize, "dictionary given", 3) / ids_mb),
    ]


def net(report: str, row: str, number: int) -> float:
    return column(report, row, number) - column(report, "an empty text", number)


def column(report: str, row: str, number: int) -> float:
    """A number of the first row whose name ends in `row`."""
    cells = re.findall(rf"^\| [^|]*{re.escape(row)} \|(.*)\|$", report, flags=re.MULTILINE)[0].split("|")
    return float(cells[number].replace(",", ""))


def machine_rates(scratch: Path, num_mb: int = 512) -> tuple[float, float]:
    """MB/s of joining parts, to the disk and flushed, and of hashing a file."""
    part, joined = scratch / "part", scratch / "joined"
    part.write_bytes(os.urandom(1_000_000) * num_mb)
    fsync_file(part)
    start = time.perf_counter()
    with open(joined, "wb") as stream:
        join_parts([part], stream)
    fsync_file(joined)
    join = num_mb / (time.perf_counter() - start)
    start = time.process_time()
    sha256_file(joined)
    return join, num_mb / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join, hashing = machine_rates(Path(folder))
    lines = [
        "# 1 TB of detokenised text",
        "",
        f"- machine: {machine()}",
        f"- versions: {versions('lmtools')}",
        "- command: `python benchmarks/scale.py`; CPU time from detok.md, bpe.md and binarize.md here",
        f"- measured here: joining {join:,.0f} MB/s, flushed to the disk; sha256 {hashing:,.0f} MB/s",
        "",
        "| stage | reads GB | writes GB | MB/s a core | core hours | serial minutes | serial share of all work | "
        + " | ".join(f"hours on {cores} cores" for cores in CORES)
        + " |",
        "|---|" + "---:|" * (6 + len(CORES)),
    ]
    for stage in stages():
        input_mb, output_mb = stage.input_mb * TEXT_MB, stage.output_mb * TEXT_MB
        work = input_mb * stage.cpu_seconds
        serial = output_mb / join + output_mb / hashing
        hours = [f"{(work / cores + serial) / 3600:.1f}" for cores in CORES]
        lines.append(
            f"| {stage.name} | {input_mb / 1e3:,.0f} | {output_mb / 1e3:,.0f} | {1 / stage.cpu_seconds:.1f} | "
            f"{work / 3600:,.0f} | {serial / 60:.0f} | {serial / (work + serial):.1%} | {' | '.join(hours)} |"
        )
    report = "\n".join(lines) + "\n"
    print(report)
    if arguments.output:
        arguments.output.write_text(report)


if __name__ == "__main__":
    main()
