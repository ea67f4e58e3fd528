"""binarize: the bytes that fairseq writes, the counts, and what must never happen to a folder."""

from __future__ import annotations

import fcntl
import gzip
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtools.artifacts import (
    FileRecord,
    Manifest,
    OriginalText,
    manifest_path,
    read_fresh_manifest,
    read_manifest,
    write_manifest,
)
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.errors import ConfigError, DataError
from lmtools.preprocess import binarize as binarize_module
from lmtools.preprocess.binarize import (
    Binarized,
    BinarizeJob,
    DictionaryRules,
    SplitCounts,
    binarize,
    find_unchanged,
    name_splits,
)

SPACES = "\t\x0b\x0c\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000"
"""Every kind of white space that a line may hold, beside the carriage return."""


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut texts into ranges of a few lines."""
    cut_every(monkeypatch, 1000)


def cut_every(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    for bound in ("_MIN_RANGE_BYTES", "_MAX_ENCODE_BYTES", "_MAX_COUNT_BYTES"):
        monkeypatch.setattr(binarize_module, bound, num_bytes)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def build(tmp_path: Path, **texts: str | bytes) -> BinarizeJob:
    """A job that builds a dictionary from `train` and binarizes every text given."""
    splits = {name: str(write(tmp_path / f"{name}.txt", text)) for name, text in texts.items()}
    return BinarizeJob(splits, tmp_path / "bin", splits["train"], DictionaryRules())


def use(tmp_path: Path, dictionary: str, **texts: str | bytes) -> BinarizeJob:
    """A job that binarizes every text given with a dictionary of these rows."""
    splits = {name: str(write(tmp_path / f"{name}.txt", text)) for name, text in texts.items()}
    return BinarizeJob(splits, tmp_path / "bin", str(write(tmp_path / "given.txt", dictionary)), None)


def sentences(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[index].tolist() for index in range(len(dataset))]


def assert_same_files(made: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir() if path.suffix in {".bin", ".idx", ".txt"}}
    assert {path.name for path in made.iterdir() if path.suffix in {".bin", ".idx", ".txt"}} == names
    for name in sorted(names):
        assert (made / name).read_bytes() == (expected / name).read_bytes(), name


# What fairseq writes


def golden_job(golden: Path, destdir: Path) -> BinarizeJob:
    texts = {name: str(golden / f"{name}.txt") for name in ("train", "test")}
    return BinarizeJob({**texts, "valid": texts["test"]}, destdir, texts["train"], DictionaryRules())


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("workers", [1, 2])
def test_golden_folder_byte_for_byte(golden: Path, tmp_path: Path, workers: int) -> None:
    result = binarize(golden_job(golden, tmp_path / "bin"), workers=workers)
    assert_same_files(tmp_path / "bin", golden / "bin")
    assert result == Binarized(
        144,
        {
            "train": SplitCounts(sentences=400, tokens=5255),
            "test": SplitCounts(sentences=400, tokens=5184),
            "valid": SplitCounts(sentences=400, tokens=5184),
        },
    )


@pytest.mark.usefixtures("small_ranges")
def test_any_executor_makes_the_same(golden: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as executor:
        binarize(golden_job(golden, tmp_path / "bin"), workers=3, executor=executor)
    assert_same_files(tmp_path / "bin", golden / "bin")


def test_golden_folder_with_the_dictionary_given(golden: Path, tmp_path: Path) -> None:
    job = golden_job(golden, tmp_path / "bin")
    binarize(BinarizeJob(job.splits, job.destdir, str(golden / "bin" / "dict.txt"), rules=None))
    assert_same_files(tmp_path / "bin", golden / "bin")


@pytest.mark.shared
@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize(
    ("name", "rules"),
    [("built_full", DictionaryRules()), ("built_1k", DictionaryRules(threshold=3, nwords=1001)), ("gpt2_small", None)],
)
def test_wikitext_folders_byte_for_byte(
    shared_golden: Path, tmp_path: Path, name: str, rules: DictionaryRules | None
) -> None:
    texts = shared_golden / "bin"
    splits = name_splits(
        f"{texts}/train.bpe", f"{texts}/valid.bpe", f"{texts}/test_small.bpe,{texts}/test_keep_empty.bpe"
    )
    source = splits["train"] if rules is not None else str(texts / "gpt2_dict.txt")
    binarize(BinarizeJob(splits, tmp_path / "bin", source, rules))
    assert_same_files(tmp_path / "bin", texts / name)


@pytest.mark.shared
def test_wikitext_test_set_byte_for_byte(shared_golden: Path, tmp_path: Path) -> None:
    splits = {"test": str(shared_golden / "bpe" / "wiki.test.bpe")}
    result = binarize(BinarizeJob(splits, tmp_path / "bin", str(shared_golden / "bin" / "gpt2_dict.txt"), None))
    assert_same_files(tmp_path / "bin", shared_golden / "bin" / "gpt2_test")
    assert result == Binarized(50_261, {"test": SplitCounts(sentences=2891, tokens=270_847)})


@pytest.mark.shared
@pytest.mark.usefixtures("small_ranges")
def test_awkward_text_byte_for_byte(shared_golden: Path, tmp_path: Path) -> None:
    text = str(shared_golden / "hard" / "hard.txt")
    binarize(BinarizeJob({"train": text}, tmp_path / "bin", text, DictionaryRules()))
    assert_same_files(tmp_path / "bin", shared_golden / "hard" / "bin")


@pytest.mark.shared
def test_wikitext_words_byte_for_byte(shared_golden: Path, shared_data: Path, tmp_path: Path) -> None:
    splits = {
        "train": str(shared_data / "wikitext-2" / "wiki.valid.tokens"),
        "test": str(shared_data / "wikitext-2" / "wiki.test.tokens"),
    }
    result = binarize(BinarizeJob(splits, tmp_path / "bin", splits["train"], DictionaryRules()), workers=2)
    assert_same_files(tmp_path / "bin", shared_golden / "words")
    assert result.splits["test"].tokens == 245_569
    assert f"{result.splits['test'].replaced_share:.2%}" == "4.84%"  # as fairseq printed


# Lines and words


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(
        st.sampled_from(["a", "b", "é", "\U0001f600", "\u200b", "\ufeff", "\0", "\r", "\n", "\n", *SPACES]), max_size=60
    ),
    st.integers(1, 40),
)
def test_every_line_becomes_its_words_and_one_end(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, text: str, range_bytes: int
) -> None:
    cut_every(monkeypatch, range_bytes)
    job = use(tmp_path_factory.mktemp("lines"), "a 3\né 2\n\U0001f600 1\nab 1\n", test=text)
    counts = binarize(job).splits["test"]
    dictionary = Dictionary.load(job.dictionary_source)
    lines = text.removesuffix("\n").split("\n") if text else []
    expected = [[dictionary.index(word) for word in line.split()] + [dictionary.eos_index] for line in lines]
    assert sentences(job.destdir / "test") == expected
    flat = [token for sentence in expected for token in sentence]
    assert counts == SplitCounts(len(lines), len(flat), flat.count(3), flat.count(3))


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12), min_size=1, max_size=12), st.integers(1, 30))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_dictionary_does_not_depend_on_how_the_text_is_cut(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, lines: list[list[str]], range_bytes: int
) -> None:
    cut_every(monkeypatch, range_bytes)
    words = [word for line in lines for word in line] or ["a"]
    text = "\n".join([*map(" ".join, lines), words[0]])
    job = build(tmp_path_factory.mktemp("cut"), train=text)
    binarize(job)
    counts = {word: text.split().count(word) for word in words}
    assert (job.destdir / "dict.txt").read_bytes() == Dictionary.from_counts(counts).to_bytes()


def test_a_bare_carriage_return_is_white_space_and_no_line_end(tmp_path: Path) -> None:
    """fairseq reads it as a line end, and with several workers may read such lines twice."""
    job = use(tmp_path, "a 2\nb 1\n", test="a\rb\r\nb\r\n")
    binarize(job)
    assert sentences(job.destdir / "test") == [[4, 5, 2], [5, 2]]


def test_a_line_of_more_than_65535_tokens(tmp_path: Path) -> None:
    job = use(tmp_path, "a 1\n", test="a " * 70_000 + "\na\n")
    binarize(job)
    assert IndexedDataset(job.destdir / "test").sizes.tolist() == [70_001, 2]


def test_an_empty_text_is_an_empty_split(tmp_path: Path) -> None:
    job = use(tmp_path, "a 1\n", test="", valid="\n")
    result = binarize(job)
    assert sentences(job.destdir / "test") == []
    assert sentences(job.destdir / "valid") == [[2]]
    assert result.splits["test"] == SplitCounts()
    assert result.splits["test"].replaced_share == 0


@pytest.mark.parametrize(("text", "different"), [("", 0), ("\n \n\u3000", 0), ("<unk> </s>\n", 2), ("a b\n", 2)])
def test_no_dictionary_without_words(tmp_path: Path, text: str, different: int) -> None:
    path = str(write(tmp_path / "train.txt", text))
    job = BinarizeJob({"train": path}, tmp_path / "bin", path, DictionaryRules(threshold=2))
    with pytest.raises(DataError, match=rf"train\.txt: no word is left .*, of {different} different ones"):
        binarize(job)
    assert not job.destdir.exists()


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("given_dictionary", [True, False])
def test_a_byte_that_is_not_utf8_is_named_with_its_line_and_nothing_is_written(
    tmp_path: Path, given_dictionary: bool
) -> None:
    text = b"a b\n" * 700 + b"fine \xff\n" + b"a\n" * 10
    job = use(tmp_path, "a 1\n", train=text) if given_dictionary else build(tmp_path, train=text)
    with pytest.raises(DataError, match=r"train\.txt:701: not UTF-8 \(byte 0xff at byte 6 of the line\)"):
        binarize(job)
    assert not job.destdir.exists()


def test_a_lone_surrogate_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.txt:2: not UTF-8"):
        binarize(use(tmp_path, "a 1\n", test=b"a\n\xed\xa0\x80\n"))


def test_unknown_words_are_counted_apart_from_those_that_were_unk_in_the_text(tmp_path: Path) -> None:
    job = use(tmp_path, "a 1\n", test="a <unk> what </s> <pad>\n")
    counts = binarize(job).splits["test"]
    assert sentences(job.destdir / "test") == [[4, 3, 3, 2, 1, 2]]
    assert counts == SplitCounts(sentences=1, tokens=6, unk_tokens=2, replaced_tokens=1)
    assert counts.replaced_share == 1 / 6


def test_unk_with_an_index_of_its_own_is_a_word_like_any_other(tmp_path: Path) -> None:
    job = use(tmp_path, "a 1\n<unk> 1 #fairseq:overwrite\n", test="a <unk> what\n")
    counts = binarize(job).splits["test"]
    assert sentences(job.destdir / "test") == [[4, 5, 3, 2]]
    assert counts == SplitCounts(sentences=1, tokens=4, unk_tokens=1, replaced_tokens=1)
    assert (job.destdir / "dict.txt").read_text() == "a 1\n<unk> 1 #fairseq:overwrite\n"


def test_a_dictionary_of_65500_types_makes_wider_tokens(tmp_path: Path) -> None:
    rows = "".join(f"w{number} 1\n" for number in range(65_496))
    job = use(tmp_path, rows, test="w65495 w0 what\n")
    binarize(job)
    assert IndexedDataset(job.destdir / "test").dtype == "<u4"
    assert sentences(job.destdir / "test") == [[65_499, 4, 3, 2]]


def test_compressed_text_and_a_pipe_give_what_the_plain_text_gives(tmp_path: Path) -> None:
    plain = use(tmp_path, "a 1\n", test="a b\n" * 100)
    binarize(plain)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    packed = write(tmp_path / "test.txt.gz", gzip.compress(b"a b\n" * 100))
    feeder = threading.Thread(target=pipe.write_bytes, args=(b"a b\n" * 100,))
    feeder.start()
    job = BinarizeJob({"test": str(packed), "valid": str(pipe)}, tmp_path / "other", plain.dictionary_source, None)
    binarize(job)
    feeder.join()
    for suffix in (".bin", ".idx"):
        expected = (tmp_path / "bin" / f"test{suffix}").read_bytes()
        assert (tmp_path / "other" / f"test{suffix}").read_bytes() == expected
        assert (tmp_path / "other" / f"valid{suffix}").read_bytes() == expected
    manifest = read_manifest(tmp_path / "other" / "valid")
    assert manifest is not None
    assert [record.path for record in manifest.inputs] == ["given.txt"]
    assert find_unchanged(job) is None  # and the pipe, which nobody feeds any more, is not read


def test_splits_are_named_as_fairseq_names_them() -> None:
    assert name_splits("t", "v", "a,b,c") == {"train": "t", "valid": "v", "test": "a", "test1": "b", "test2": "c"}
    assert name_splits(None, None, "a") == {"test": "a"}


def test_a_text_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    job = build(tmp_path, train="a b\n")
    with pytest.raises(DataError, match=r"train\.txt: was changed while it was read"):
        binarize(job, progress=lambda _: Path(job.splits["train"]).write_text("a b\nc\n") and None)
    assert not job.destdir.exists()


def test_progress_counts_every_byte_that_is_read(tmp_path: Path) -> None:
    job = build(tmp_path, train="a b\n" * 10, test="a\n")
    read: list[int] = []
    binarize(job, progress=read.append)
    assert sum(read) == 2 * 40 + 2  # train is read twice


def test_the_process_that_hands_out_work_imports_neither_numpy_nor_torch() -> None:
    code = "import sys, lmtools.preprocess.binarize; print({'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# Manifests


def test_every_split_has_a_manifest_that_names_what_it_was_made_from(tmp_path: Path) -> None:
    job = build(tmp_path, train="a a b\n", test="a c\n")
    binarize(job)
    manifest = read_fresh_manifest(job.destdir / "test")
    assert manifest is not None
    assert manifest.tool == "lmtools binarize"
    assert manifest.options == {"dictionary": "built", "threshold": 0, "nwords": -1, "padding_factor": 8}
    assert [record.path for record in manifest.inputs] == ["test.txt", "train.txt"]
    assert [record.path for record in manifest.outputs] == ["test.bin", "test.idx", "dict.txt"]
    assert manifest.counts == {"sentences": 1, "tokens": 3, "unk_tokens": 1, "replaced_tokens": 1, "num_types": 8}
    assert manifest.original is None
    of_dictionary = read_fresh_manifest(job.destdir / "dict.txt")
    assert of_dictionary is not None
    assert of_dictionary.counts == {"num_types": 8}


@pytest.mark.parametrize("name", ["test.bin", "test.idx", "dict.txt"])
def test_a_manifest_is_not_believed_once_an_output_was_changed(tmp_path: Path, name: str) -> None:
    job = build(tmp_path, train="a\n", test="a\n")
    binarize(job)
    with open(job.destdir / name, "ab") as stream:
        stream.write(b"\0")
    assert read_fresh_manifest(job.destdir / "test") is None


def with_original(text: str) -> OriginalText:
    original = OriginalText("wiki.raw", lines=7, words=70, tokens=77, num_bytes=400)
    write_manifest(text, Manifest("lmtools bpe-encode", {}, [], [FileRecord.of(text)], {}, original))
    return original


def test_the_counts_of_the_original_text_travel_on(tmp_path: Path) -> None:
    job = use(tmp_path, "a 1\n", test="a\n", valid="a\n")
    original = with_original(job.splits["test"])
    binarize(job)
    of_test, of_valid = (read_manifest(job.destdir / name) for name in ("test", "valid"))
    assert of_test is not None
    assert of_test.original == original
    assert of_valid is not None
    assert of_valid.original is None


def test_counts_of_a_text_that_was_edited_since_do_not_travel_on(tmp_path: Path) -> None:
    job = use(tmp_path, "a 1\n", test="a\n")
    with_original(job.splits["test"])
    write(Path(job.splits["test"]), "a a\n")
    binarize(job)
    manifest = read_manifest(job.destdir / "test")
    assert manifest is not None
    assert manifest.original is None


def test_what_is_there_already_is_recognized(tmp_path: Path) -> None:
    job = build(tmp_path, train="a a b\n", test="a c\n")
    assert find_unchanged(job) is None
    result = binarize(job)
    assert find_unchanged(job) == result
    dictionary_only = BinarizeJob({}, job.destdir, job.dictionary_source, DictionaryRules())
    assert find_unchanged(dictionary_only) == Binarized(8, {})


@pytest.mark.parametrize("change", ["text", "dictionary text", "output", "options", "manifest"])
def test_any_change_is_noticed(tmp_path: Path, change: str) -> None:
    job = build(tmp_path, train="a a b\n", test="a c\n")
    binarize(job)
    match change:
        case "text":
            write(Path(job.splits["test"]), "a d\n")
        case "dictionary text":
            write(Path(job.splits["train"]), "a b b\n")
        case "output":
            (job.destdir / "test.bin").unlink()
        case "options":
            job = BinarizeJob(job.splits, job.destdir, job.dictionary_source, DictionaryRules(padding_factor=4))
        case "manifest":
            manifest_path(job.destdir / "train").unlink()
    assert find_unchanged(job) is None


# The folder


def test_a_folder_keeps_to_one_dictionary(tmp_path: Path) -> None:
    first = build(tmp_path, train="a\n", test="a\n")
    binarize(first)
    before = {path.name: path.read_bytes() for path in first.destdir.iterdir()}
    other = BinarizeJob({"valid": first.splits["test"]}, first.destdir, str(write(tmp_path / "d", "b 1\n")), None)
    with pytest.raises(ConfigError, match=r"dict\.txt: its splits \(test, train\) were made with another dictionary"):
        binarize(other)
    assert {path.name: path.read_bytes() for path in first.destdir.iterdir()} == before


def test_a_split_can_be_added_with_the_same_dictionary(tmp_path: Path) -> None:
    first = build(tmp_path, train="a\n", test="a\n")
    binarize(first)
    binarize(BinarizeJob({"valid": first.splits["test"]}, first.destdir, str(first.destdir / "dict.txt"), None))
    assert sentences(first.destdir / "valid") == sentences(first.destdir / "test") == [[4, 2]]


def test_all_splits_can_be_made_anew_with_another_dictionary(tmp_path: Path) -> None:
    first = build(tmp_path, train="a\n", test="a\n")
    binarize(first)
    binarize(use(tmp_path, "b 2\na 1\n", train="a\n", test="b\n"))
    assert sentences(first.destdir / "train") == [[5, 2]]
    assert sentences(first.destdir / "test") == [[4, 2]]


def test_a_missing_input_is_found_before_any_work(tmp_path: Path) -> None:
    job = build(tmp_path, train="a\n" * 1000, test="a\n")
    Path(job.splits["test"]).unlink()
    read: list[int] = []
    with pytest.raises(DataError, match=r"test\.txt: no such file"):
        binarize(job, progress=read.append)
    assert read == []
    assert not job.destdir.exists(), "it was made for this"
    job.destdir.mkdir()
    with pytest.raises(DataError, match=r"test\.txt: no such file"):
        binarize(job)
    assert list(job.destdir.iterdir()) == []


def test_a_destdir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "bin", "")
    with pytest.raises(ConfigError, match=r"bin: is a file, expected a folder"):
        binarize(use(tmp_path, "a 1\n", test="a\n"))


def test_a_text_keeps_its_own_manifest(tmp_path: Path) -> None:
    """A text named like its split, in the same folder, would share the manifest's name with it."""
    text = write(tmp_path / "test", "a\n")
    with pytest.raises(ConfigError, match=r"the manifest of the split test would take the place of this text's own"):
        binarize(BinarizeJob({"test": str(text)}, tmp_path, str(write(tmp_path / "d", "a 1\n")), None))


def test_a_run_waits_while_another_one_moves_its_files_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = use(tmp_path, "a 1\n", test="a\n")
    job.destdir.mkdir()
    folder = os.open(job.destdir, os.O_RDONLY)
    flock, asked = fcntl.flock, threading.Event()
    flock(folder, fcntl.LOCK_EX)

    def ask(descriptor: int, operation: int) -> None:
        asked.set()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", ask)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(binarize, job)
        assert asked.wait(60)
        with pytest.raises(FuturesTimeoutError):
            running.result(timeout=0.1)
        assert list(job.destdir.glob(".binarize.*/test.meta.json"))
        assert not list(job.destdir.glob("[!.]*"))
        os.close(folder)
        running.result(timeout=60)
    assert sentences(job.destdir / "test") == [[4, 2]]


def test_a_run_that_is_interrupted_while_files_are_moved_leaves_no_mixed_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the moment, a split that can be opened is wholly old or wholly new, and so is its dictionary."""
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    for moves in range(8):
        folder = tmp_path / str(moves)
        folder.mkdir()
        old = use(folder, "a 2\nb 1\n", train="a\n", test="a\n")
        binarize(old)
        new = use(folder, "b 2\na 1\n", train="b b\n", test="b b\n")
        calls = iter([replace] * moves)
        monkeypatch.setattr(os, "replace", lambda source, target, calls=calls: next(calls, fail)(source, target))
        with pytest.raises(KeyboardInterrupt):
            binarize(new)
        monkeypatch.setattr(os, "replace", replace)
        words = Dictionary.load(new.destdir / "dict.txt").symbols
        for name in ("train", "test"):
            if (new.destdir / f"{name}.idx").exists():
                [tokens] = sentences(new.destdir / name)
                assert [words[token] for token in tokens] in (["a", "</s>"], ["b", "b", "</s>"])
                assert words[4] == words[tokens[0]]
