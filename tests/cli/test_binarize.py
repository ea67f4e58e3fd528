"""`lmtools binarize` as a user types it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lmtools.cli import main
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from tests.support.processes import alive, descendants, wait_until


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def binarize(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["lmtools", "binarize", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, *capsys.readouterr())

    return binarize


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three texts and a dictionary."""
    (tmp_path / "train.txt").write_text("a a a b b c\n" * 20)
    (tmp_path / "valid.txt").write_text("a b\n")
    (tmp_path / "test.txt").write_text("a b c d\n\n")
    (tmp_path / "dict.txt").write_text("a 3\nb 2\nc 1\n")
    return tmp_path


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_fairseqs_command_line_makes_fairseqs_bytes(run: Run, golden: Path, tmp_path: Path) -> None:
    ran = run(
        *("--only-source", "--dataset-impl", "mmap", "--workers", 2, "--destdir", tmp_path / "bin"),
        *("--trainpref", golden / "train.txt", "--validpref", golden / "test.txt", "--testpref", golden / "test.txt"),
    )
    assert ran == (
        0,
        f"{tmp_path}/bin/dict.txt: 144 types\n"
        f"{tmp_path}/bin/train: 400 sentences, 5,255 tokens, 0.00% replaced by <unk>\n"
        f"{tmp_path}/bin/valid: 400 sentences, 5,184 tokens, 0.00% replaced by <unk>\n"
        f"{tmp_path}/bin/test: 400 sentences, 5,184 tokens, 0.00% replaced by <unk>\n",
        "",
    )
    for path in (golden / "bin").iterdir():
        assert (tmp_path / "bin" / path.name).read_bytes() == path.read_bytes()


def test_many_unknown_words_are_a_warning(run: Run, texts: Path) -> None:
    ran = run("--testpref", texts / "test.txt", "--srcdict", texts / "dict.txt", "--destdir", texts / "bin")
    assert ran.code == 0
    assert ran.out.splitlines()[1] == f"{texts}/bin/test: 2 sentences, 6 tokens, 16.67% replaced by <unk>"
    assert ran.err == (
        f"warning: {texts}/test.txt: 16.67% of its tokens are not in the dictionary and became <unk>; "
        "is it the dictionary of this text?\n"
    )


def test_json(run: Run, texts: Path) -> None:
    ran = run(
        *("--testpref", f"{texts}/test.txt,{texts}/valid.txt", "--srcdict", texts / "dict.txt"),
        *("--destdir", texts / "bin", "--json"),
    )
    assert json.loads(ran.out) == {
        "destdir": f"{texts}/bin",
        "num_types": 7,
        "splits": {
            "test": {
                "text": f"{texts}/test.txt",
                "sentences": 2,
                "tokens": 6,
                "unk_tokens": 1,
                "replaced_tokens": 1,
            },
            "test1": {
                "text": f"{texts}/valid.txt",
                "sentences": 1,
                "tokens": 3,
                "unk_tokens": 0,
                "replaced_tokens": 0,
            },
        },
        "skipped": False,
    }


def test_dictionary_options(run: Run, texts: Path) -> None:
    options = ("--trainpref", texts / "train.txt", "--dict-only", "--destdir")
    run(*options, texts / "plain")
    run(*options, texts / "threshold", "--thresholdsrc", 21)
    run(*options, texts / "nwords", "--nwordssrc", 5, "--padding-factor", 1)
    assert (texts / "plain" / "dict.txt").read_text() == "a 60\nb 40\nc 20\nmadeupword0000 0\n"
    assert (texts / "threshold" / "dict.txt").read_text() == "a 60\nb 40\nmadeupword0000 0\nmadeupword0001 0\n"
    assert (texts / "nwords" / "dict.txt").read_text() == "a 60\n"
    assert visible(texts / "plain") == ["dict.txt", "dict.txt.meta.json"]


def test_dictionary_options_do_nothing_to_a_given_dictionary_and_that_is_said(run: Run, texts: Path) -> None:
    ran = run(
        *("--validpref", texts / "valid.txt", "--srcdict", texts / "dict.txt", "--destdir", texts / "bin"),
        *("--thresholdsrc", 3),
    )
    assert ran.code == 0
    assert ran.err == (
        "warning: --srcdict is used as it is; --thresholdsrc, --nwordssrc and --padding-factor do nothing\n"
    )


def test_skip_unchanged(run: Run, texts: Path) -> None:
    command = ("--trainpref", texts / "train.txt", "--testpref", texts / "valid.txt", "--destdir", texts / "bin")
    first = run(*command, "--skip-unchanged")
    made = (texts / "bin" / "test.bin").stat().st_mtime_ns
    second = run(*command, "--skip-unchanged")
    assert second == (0, first.out, f"{texts}/bin: unchanged, skipped\n")
    assert (texts / "bin" / "test.bin").stat().st_mtime_ns == made
    assert run(*command) == first  # made again without the flag
    assert (texts / "bin" / "test.bin").stat().st_mtime_ns > made
    (texts / "valid.txt").write_text("b\n")
    third = run(*command, "--skip-unchanged")
    assert "skipped" not in third.err
    assert IndexedDataset(texts / "bin" / "test").tokens.tolist() == [5, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--testpref", "test.txt"], "build a dictionary from --trainpref, or name one with --srcdict"),
        (["--srcdict", "dict.txt"], "nothing to binarize"),
        (["--trainpref", "train.txt", "--dataset-impl", "raw"], "expected mmap, found raw"),
        (["--trainpref", "train.txt", "--workers", "0"], "--workers"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_an_error_is_one_line_and_leaves_no_folder(run: Run, texts: Path) -> None:
    (texts / "dict.txt").write_text("a 3\n<pad> 2\n")
    ran = run(
        *("--testpref", texts / "test.txt", "--srcdict", texts / "dict.txt", "--destdir", texts / "bin", "--workers", 2)
    )
    assert ran == (
        1,
        "",
        f"lmtools: {texts}/dict.txt:2: '<pad>' is a special symbol, which every dictionary has before its first row; "
        "remove this row\n",
    )
    assert not (texts / "bin").exists()


# Processes


def start(*arguments: object, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.Popen(
        [sys.executable, "-m", "lmtools", "binarize", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_is_full_is_one_line_and_leaves_what_was_there(run: Run, texts: Path, workers: int) -> None:
    (texts / "large.txt").write_text("a b c\n" * 100_000)
    command = ("--srcdict", texts / "dict.txt", "--destdir", texts / "bin", "--workers", workers, "--testpref")
    assert run(*command, texts / "valid.txt").code == 0
    before = {path.name: path.read_bytes() for path in (texts / "bin").iterdir()}
    process = start(*command, texts / "large.txt", limit_bytes=200_000)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err == f"lmtools: {texts}/bin: larger than this file system or process may write\n"
    assert {path.name: path.read_bytes() for path in (texts / "bin").iterdir()} == before


def test_killed_in_the_middle_nothing_looks_complete_and_no_worker_stays(texts: Path) -> None:
    with open(texts / "large.txt", "w") as stream:
        for _ in range(50):
            stream.write("a b c\n" * 50_000)
    command = ("--testpref", texts / "large.txt", "--srcdict", texts / "dict.txt", "--destdir", texts / "bin")
    process = start(*command, "--workers", 2)
    parts = wait_until(lambda: list((texts / "bin").glob(".binarize.*/test.*.bin")))
    workers = descendants(process.pid)
    process.kill()
    process.communicate()
    assert parts
    assert visible(texts / "bin") == []
    assert len(workers) >= 2
    wait_until(lambda: not any(alive(pid) for pid in workers))


def test_two_at_once_leave_the_whole_work_of_one(texts: Path) -> None:
    commands = []
    for name, words in (("one", "a b c"), ("two", "c b a a")):
        (texts / f"{name}.txt").write_text(f"{words}\n" * 2000)
        (texts / f"{name}.dict").write_text("".join(f"{word} 1\n" for word in dict.fromkeys(words.split())))
        text = texts / f"{name}.txt"
        dictionary = texts / f"{name}.dict"
        commands.append(("--trainpref", text, "--testpref", text, "--srcdict", dictionary, "--destdir", texts / "bin"))
    processes = [start(*command) for command in commands]
    assert [process.communicate()[1] for process in processes] == ["", ""]
    words = Dictionary.load(texts / "bin" / "dict.txt").symbols
    first_lines = {
        name: " ".join(words[token] for token in IndexedDataset(texts / "bin" / name)[0]) for name in ("train", "test")
    }
    assert first_lines in ({"train": line, "test": line} for line in ("a b c </s>", "c b a a </s>"))
    assert visible(texts / "bin") == [
        *("dict.txt", "test.bin", "test.idx", "test.meta.json", "train.bin", "train.idx", "train.meta.json")
    ]
