"""The blocks that the documentation shows: found, run, and what they need laid out."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# What a small machine and a small model have not, in place of what the documentation shows.
SMALLER = {
    "--mp 8": "--mp 2",
    "--dp 4": "--dp 2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--context-window 992": "--context-window 48",
    "--tokens-per-sample 1024": "--tokens-per-sample 64",
}


def fenced(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page, in order: language and content."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str | None = None) -> list[str]:
    """The fenced blocks of a page: all of them, or those marked with a language."""
    return [content for marked, content in fenced(page) if language in (None, marked)]


def commands(script: str) -> list[list[str]]:
    """What a script runs, as arguments: of each line the commands between `|` and `&`, without redirections.

    Assignments are the shell's own.
    """
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        if re.match(r"\w+=", line):
            continue
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                found += [words] if words else []
                words = []
            else:
                words.append(word)
    return [words[: words.index(">")] if ">" in words else words for words in found]


def run_block(block: str, folder: Path) -> str:
    """Run a block in a folder, with a shell that stops at the first failure; returns standard output.

    Numbers that are too large here become smaller: see `SMALLER`.
    """
    script = "".join(map(_smaller, block.splitlines(keepends=True)))
    return _run(["bash", "-euo", "pipefail", "-c", script], folder)


def _smaller(line: str) -> str:
    if not line.startswith("lmtools plan "):  # which needs no machine
        for large, small in SMALLER.items():
            line = re.sub(rf"{re.escape(large)}\b", small, line)
    return line


def run_python(block: str, folder: Path) -> str:
    """Run a block of Python in a folder; returns standard output."""
    return _run([sys.executable, "-c", block], folder)


def _run(command: list[str], folder: Path) -> str:
    programs = Path(sys.executable).parent
    path = f"{programs}:{os.environ['PATH']}"
    ran = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def lay_out_text(folder: Path, golden: Path) -> None:
    """A small text and dictionary under the names that the documentation uses."""
    text = (golden / "train.txt").read_bytes()
    for name in ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw", "wiki.train.tokens", "wiki.valid.tokens"):
        (folder / name).write_bytes(text)
    for name in ("wiki.test.bpe", "a.txt", "b.txt"):
        (folder / name).write_bytes((golden / "train.bpe").read_bytes())
    (folder / "wiki.test.detok").write_bytes((golden / "train.detok").read_bytes())
    (folder / "dict.txt").write_text("".join(f"{token} 1\n" for token in range(50257)))
    (folder / "prompts.txt").write_text("A text\nAnother one\n")


def lay_out_models(folder: Path, golden: Path) -> None:
    """Beside `lay_out_text`: models that know nothing, and data for them, under the documentation's names."""
    import shutil

    from tests.support.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(folder / "CHECKPOINT", vocab_size=50304, num_parts=8)
    (folder / "CHECKPOINT" / "dict.txt").symlink_to(folder / "dict.txt")
    write_random_checkpoint(folder / "one", vocab_size=50304, num_parts=1)
    [one] = (folder / "one").iterdir()
    one.rename(folder / "model.pt")
    for name in ("megatron_11b", "checkpoints/megatron_11b", "checkpoints/checkpoint_best"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "CHECKPOINT")
    (folder / "model-model_part-0.pt").symlink_to(golden / "mp4" / "model-model_part-0.pt")
    (folder / "transformer-xl").mkdir()
    shutil.copy(golden / "txl" / "checkpoint_last.pt", folder / "transformer-xl" / "checkpoint_best.pt")
    shutil.copy(golden / "bin" / "dict.txt", folder / "transformer-xl")
    _save_gpt2(folder / "gpt2")
    run_block(
        "lmtools binarize --only-source --testpref wiki.test.bpe --srcdict dict.txt --destdir data-bin\n"
        "cp -r data-bin wikitext103-bin\nln -s wikitext103-bin DATA\n",
        folder,
    )


def lay_out_run(folder: Path) -> None:
    """Beside `lay_out_text`: what training on a text of words leaves, twice."""
    run_block(
        "lmtools binarize --only-source --trainpref wiki.train.tokens --validpref wiki.valid.tokens "
        "--testpref wiki.test.raw --destdir data-bin\n"
        "lmtools train data-bin --arch transformer_lm_megatron_tiny --decoder-layers 1 --decoder-embed-dim 32 "
        "--decoder-ffn-embed-dim 64 --tokens-per-sample 32 --batch-size 8 --max-update 8 --save-dir run\n"
        "cp -r run other-run\nlmtools eval data-bin --path other-run/checkpoint_best --output other.json\n",
        folder,
    )


def _save_gpt2(folder: Path) -> None:
    """A GPT-2 of a few parameters, with GPT-2's own tokenizer, as transformers saves them."""
    from transformers import GPT2TokenizerFast

    from lmtools.preprocess.gpt2_vocabulary import find_vocabulary
    from tests.support.transformers_models import GPT2Config, save

    save(folder, GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=256))
    files = find_vocabulary(None, None)
    GPT2TokenizerFast(vocab_file=str(files.encoder_json), merges_file=str(files.vocab_bpe)).save_pretrained(folder)
