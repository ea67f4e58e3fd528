"""binarize against fairseq-preprocess, as whole commands in one run, on the same text with the same dictionary.

    python benchmarks/text_binarize.py --text wiki.test.bpe --srcdict dict.txt --fairseq-python FAIRSEQ/bin/python

Reports, for each command: wall time, tokens per second, CPU seconds of all its processes, CPU seconds of the parent
(for lmtools also of a run on an empty text, which is what starting up takes), and the largest process's memory. The
outputs are compared byte for byte. CPU seconds are the fairer number on a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import filecmp
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

LMTOOLS = "from lmtools.cli import main; main()"
FAIRSEQ = "from fairseq_cli.preprocess import cli_main; cli_main()"
REPORT_OWN_CPU = """
import atexit, os, resource
def report(pid=os.getpid()):
    if os.getpid() == pid:
        own = resource.getrusage(resource.RUSAGE_SELF)
        open(os.environ["OWN_CPU"], "w").write(str(own.ru_utime + own.ru_stime))
atexit.register(report)
"""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Usage:
    """What one command took: seconds, CPU seconds of all processes and of the parent, bytes of the largest process."""

    wall_s: float
    cpu_s: float
    parent_cpu_s: float
    peak_bytes: int


def measure(python: str, program: str, arguments: Sequence[object], scratch: Path) -> Usage:
    """Run a command in a process of its own and wait for everything that it started."""
    own_cpu = scratch / "own_cpu"
    environment = {**os.environ, "OWN_CPU": str(own_cpu)}
    command = [python, "-c", REPORT_OWN_CPU + program, *map(str, arguments)]
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    output = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    start = time.perf_counter()
    command_pid = os.posix_spawn(python, command, environment, file_actions=output)
    os.close(log)
    wall_s = cpu_s = 0.0
    peak_kib = 0
    while True:
        try:
            # Servers and workers that outlive the command are handed to this process: see main().
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        if pid == command_pid:
            wall_s = time.perf_counter() - start
            if status != 0:
                sys.exit(f"{' '.join(command[3:])}\n{(scratch / 'log').read_text()}")
        cpu_s += usage.ru_utime + usage.ru_stime
        peak_kib = max(peak_kib, usage.ru_maxrss)
    return Usage(wall_s, cpu_s, float(own_cpu.read_text()), peak_kib * 1024)


def repeat_text(text: Path, repeat: int, target: Path) -> int:
    """Write a text so many times over; returns its tokens, ends of line included."""
    content = text.read_bytes()
    with open(target, "wb") as stream:
        for _ in range(repeat):
            stream.write(content)
    return repeat * (len(content.split()) + content.count(b"\n"))


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


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {platform.system()} {platform.release()}"


def compare(ours: Path, theirs: Path) -> str:
    names = sorted(path.name for path in theirs.iterdir() if path.name != "preprocess.log")
    different = [name for name in names if not filecmp.cmp(ours / name, theirs / name, shallow=False)]
    return f"{', '.join(different)} differ" if different else f"{', '.join(names)} identical"


@dataclass(frozen=True)
class Bench:
    """Runs the two tools, and writes a table row for each command."""

    arguments: argparse.Namespace
    scratch: Path
    lines: list[str]

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def lmtools(self, name: str, tokens: int, *options: object) -> tuple[Usage, Path]:
        """The fastest of some runs."""
        destdir = self.scratch / name
        command = ["binarize", *options, "--workers", self.arguments.workers, "--destdir", destdir]
        usages = []
        for _ in range(self.arguments.runs):
            shutil.rmtree(destdir, ignore_errors=True)
            usages.append(measure(sys.executable, LMTOOLS, command, self.scratch))
        usage = min(usages, key=lambda usage: usage.wall_s)
        self.row(f"lmtools: {name}", tokens, usage)
        return usage, destdir

    def fairseq(self, name: str, tokens: int, workers: int, *options: object) -> tuple[Usage, Path]:
        destdir = self.scratch / f"fairseq, {name}, {workers}"
        command = ["--only-source", *options, "--workers", workers, "--destdir", destdir]
        usage = measure(self.arguments.fairseq_python, FAIRSEQ, command, self.scratch)
        self.row(f"fairseq: {name}, {workers} worker(s)", tokens, usage)
        return usage, destdir

    def row(self, name: str, tokens: int, usage: Usage) -> None:
        self.say(
            f"| {name} | {tokens:,} | {usage.wall_s:.2f} | {tokens / usage.wall_s:,.0f} | {usage.cpu_s:.2f} | "
            f"{usage.parent_cpu_s:.2f} ({usage.parent_cpu_s / usage.cpu_s:.1%}) | {usage.peak_bytes / 2**20:,.0f} |"
        )

    def run(self) -> None:
        text, tenth, empty = self.scratch / "text", self.scratch / "tenth", self.scratch / "empty"
        tokens = repeat_text(self.arguments.text, self.arguments.repeat, text)
        tokens_of_tenth = repeat_text(self.arguments.text, max(self.arguments.repeat // 10, 1), tenth)
        empty.touch()
        self.say(f"- machine: {machine()}; load average at the start {os.getloadavg()[0]:.1f}")
        self.say(f"- versions: Python {platform.python_version()}, lmtools {version('lmtools')}")
        names = [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]]
        self.say(f"- command: `python benchmarks/text_binarize.py {' '.join(names)}`")
        self.say(
            f"- text: {self.arguments.text.name}, {self.arguments.repeat} times over, {text.stat().st_size:,} bytes"
        )
        self.say("")
        self.say("| command | tokens | wall s | tokens/s | CPU s, all | CPU s, parent | largest process, MiB |")
        self.say("|---|---:|---:|---:|---:|---:|---:|")
        encode = ("--srcdict", self.arguments.srcdict, "--testpref")
        build = ("--dict-only", "--trainpref")
        self.lmtools("an empty text", 0, *encode, empty)
        self.lmtools("a tenth of the text", tokens_of_tenth, *encode, tenth)
        ours = {
            "dictionary given": self.lmtools("dictionary given", tokens, *encode, text),
            "dictionary built": self.lmtools("dictionary built", tokens, *build, text),
        }
        verdicts = []
        for workers in self.arguments.fairseq_workers if self.arguments.fairseq_python else []:
            for name, options in (("dictionary given", encode), ("dictionary built", build)):
                usage, destdir = self.fairseq(name, tokens, workers, *options, text)
                our_usage, our_destdir = ours[name]
                faster, cheaper = usage.wall_s / our_usage.wall_s, usage.cpu_s / our_usage.cpu_s
                verdicts.append(
                    f"- {name}, fairseq with {workers} worker(s): lmtools is {faster:.1f} times as fast and takes "
                    f"1/{cheaper:.1f} of the CPU time; {compare(our_destdir, destdir)}"
                )
        if self.arguments.words_mb:
            words = self.scratch / "words"
            num_tokens = write_words(words, self.arguments.words_types, self.arguments.words_mb * 10**6)
            name = f"{self.arguments.words_mb} MB of {self.arguments.words_types:,} types, built and binarized"
            self.lmtools(name, num_tokens, "--trainpref", words)
        self.say("")
        for verdict in verdicts:
            self.say(verdict)
        self.say(f"- load average at the end {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="BPE ids, a line for each line")
    parser.add_argument("--srcdict", type=Path, required=True, help="its dictionary")
    parser.add_argument("--repeat", type=int, default=100, help="how many times over the text is written")
    parser.add_argument("--workers", type=int, default=2, help="of lmtools")
    parser.add_argument("--runs", type=int, default=3, help="of each lmtools command; the fastest counts")
    parser.add_argument("--fairseq-python", help="a Python with fairseq; without it there is no comparison")
    parser.add_argument("--fairseq-workers", type=int, nargs="*", default=[2])
    parser.add_argument("--words-types", type=int, default=267_744, help="types of a text of words")
    parser.add_argument("--words-mb", type=int, default=500, help="size of that text; 0 leaves it out")
    parser.add_argument("--scratch", type=Path, help="folder for the texts, some GB")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        bench = Bench(arguments, Path(folder), [])
        bench.run()
    if arguments.output:
        title = "# binarize against fairseq-preprocess\n\nWhole commands, one after the other, in one run.\n\n"
        arguments.output.write_text(title + "\n".join(bench.lines) + "\n")


if __name__ == "__main__":
    main()
