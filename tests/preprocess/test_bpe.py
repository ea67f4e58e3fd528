"""bpe_encode and bpe_decode on files: fairseq's bytes, whatever the workers, the compression and the line ends."""

from __future__ import annotations

import gzip
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtools.artifacts import FileRecord, Manifest, OriginalText, read_manifest, write_manifest
from lmtools.errors import ConfigError, DataError, LmtoolsError
from lmtools.preprocess import bpe, transform
from lmtools.preprocess.binarize import BinarizeJob, DictionaryRules, binarize, find_unchanged
from lmtools.preprocess.bpe import BpeCounts, bpe_decode, bpe_encode, find_decoded, find_encoded
from lmtools.preprocess.detok import detok
from lmtools.preprocess.gpt2_vocabulary import VocabularyFiles, find_vocabulary
from tests.support.tiny_bpe import write_vocabulary


@pytest.fixture(scope="module")
def gpt2() -> VocabularyFiles:
    return find_vocabulary(None, None)


def encode(text: bytes, folder: Path, gpt2: VocabularyFiles, *, keep_empty: bool = False) -> bytes:
    (folder / "text").write_bytes(text)
    bpe_encode([str(folder / "text")], [str(folder / "ids")], vocabulary=gpt2, keep_empty=keep_empty)
    return (folder / "ids").read_bytes()


# --- fairseq's bytes -------------------------------------------------------------------------------------------------


def test_own_text_is_encoded_as_by_fairseq(golden: Path, tmp_path: Path, gpt2: VocabularyFiles) -> None:
    [counts] = bpe_encode([str(golden / "train.txt")], [str(tmp_path / "ids")], vocabulary=gpt2)
    expected = (golden / "train.bpe").read_bytes()
    assert (tmp_path / "ids").read_bytes() == expected
    assert (counts.lines, counts.tokens) == (expected.count(b"\n"), len(expected.split()))


@pytest.mark.shared
def test_wikitext_is_encoded_as_by_fairseq(shared_golden: Path, tmp_path: Path, gpt2: VocabularyFiles) -> None:
    text = str(shared_golden / "detok" / "wiki.test.detok")
    ids = str(tmp_path / "ids")

    assert bpe_encode([text], [ids], vocabulary=gpt2, workers=2) == [BpeCounts(2_891, 267_956, 1_467)]
    assert Path(ids).read_bytes() == (shared_golden / "bpe" / "wiki.test.bpe").read_bytes()

    bpe_encode([text], [ids], vocabulary=gpt2, keep_empty=True)
    assert Path(ids).read_bytes() == gzip.decompress(
        (shared_golden / "bpe" / "wiki.test.bpe.keep_empty.gz").read_bytes()
    )


@pytest.mark.shared
@pytest.mark.parametrize(("keep_empty", "name"), [(False, "hard.bpe"), (True, "hard.keep.bpe")])
def test_awkward_text_is_encoded_as_by_fairseq(
    shared_golden: Path, tmp_path: Path, gpt2: VocabularyFiles, keep_empty: bool, name: str
) -> None:
    text = (shared_golden / "hard" / "hard.txt").read_bytes()
    assert encode(text, tmp_path, gpt2, keep_empty=keep_empty) == (shared_golden / "hard" / name).read_bytes()


# --- lines -----------------------------------------------------------------------------------------------------------


def test_lines_are_stripped_of_all_white_space_and_empty_ones_dropped(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    text = " Hello \t\n\n \u3000\u2028\x1c \nHello\r\n\xa0Hello".encode()
    assert encode(text, tmp_path, gpt2) == b"15496\n15496\n15496\n"
    assert encode(text, tmp_path, gpt2, keep_empty=True) == b"15496\n\n\n15496\n15496\n"


@pytest.mark.parametrize("separator", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_nothing_but_a_line_feed_ends_a_line(tmp_path: Path, gpt2: VocabularyFiles, separator: str) -> None:
    # fairseq reads with universal newlines, so there a bare \r would be the end of a line.
    ids = encode(f"Hello{separator}world\n".encode(), tmp_path, gpt2)
    assert ids.count(b"\n") == 1
    assert ids.startswith(b"15496 ")
    assert ids.endswith(b" 6894\n")


def test_an_empty_file_gives_an_empty_file(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    assert encode(b"", tmp_path, gpt2) == b""
    assert encode(b"\n \n", tmp_path, gpt2) == b""


def test_several_inputs_lose_the_same_lines(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "a").write_text("Hello\n\nworld\nHello\n")
    (tmp_path / "b").write_text("one\ntwo\n \nfour")
    sources, targets = [str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path / "a.bpe"), str(tmp_path / "b.bpe")]

    assert bpe_encode(sources, targets, vocabulary=gpt2) == [BpeCounts(2, 2, 2, 1), BpeCounts(2, 2, 2, 1)]
    assert (tmp_path / "a.bpe").read_bytes() == b"15496\n15496\n"
    assert (tmp_path / "b.bpe").read_bytes() == b"505\n14337\n"

    assert bpe_encode(sources, targets, vocabulary=gpt2, keep_empty=True) == [BpeCounts(4, 3), BpeCounts(4, 3)]


def test_ids_without_some_lines_of_text_are_not_those_of_the_original_text(
    tmp_path: Path, gpt2: VocabularyFiles
) -> None:
    """Or a perplexity per original token would divide the loss of a part by the tokens of the whole."""
    (tmp_path / "a.raw").write_text("Hello\n\nworld\n")
    (tmp_path / "b.raw").write_text("one\ntwo\nthree\n")
    texts, ids = [[str(tmp_path / f"{name}{suffix}") for name in "ab"] for suffix in (".detok", ".bpe")]
    for name, text in zip("ab", texts, strict=True):
        detok(str(tmp_path / f"{name}.raw"), text)

    def original_tokens() -> list[int | None]:
        originals = [manifest.original for path in ids if (manifest := read_manifest(path)) is not None]
        return [original.tokens if original is not None else None for original in originals]

    assert [counts.lost_lines for counts in bpe_encode(texts, ids, vocabulary=gpt2)] == [0, 1]
    assert original_tokens() == [5, None]
    bpe_encode(texts, ids, vocabulary=gpt2, keep_empty=True)
    assert original_tokens() == [5, 6]


def test_counts_that_are_known_of_the_text_since_are_not_left_out_as_unchanged(
    tmp_path: Path, gpt2: VocabularyFiles
) -> None:
    raw, text, ids, destdir = (tmp_path / name for name in ("a.raw", "a.detok", "a.bpe", "bin"))
    raw.write_text("Hello , world\n")
    text.write_text("Hello, world\n")
    job = BinarizeJob({"train": str(ids)}, destdir, str(ids), DictionaryRules())
    bpe_encode([str(text)], [str(ids)], vocabulary=gpt2)
    binarize(job)
    assert find_encoded([str(text)], [str(ids)], vocabulary=gpt2) is not None
    assert find_unchanged(job) is not None

    detok(str(raw), str(text))  # the same bytes, and a manifest
    assert find_encoded([str(text)], [str(ids)], vocabulary=gpt2) is None
    bpe_encode([str(text)], [str(ids)], vocabulary=gpt2)
    assert find_encoded([str(text)], [str(ids)], vocabulary=gpt2) is not None
    assert find_unchanged(job) is None
    binarize(job)
    assert find_unchanged(job) is not None


def test_several_inputs_are_cut_at_the_same_lines(
    golden: Path, tmp_path: Path, gpt2: VocabularyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transform, "_LINES_PER_PIECE", 7)
    text = (golden / "train.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "a").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    (tmp_path / "b").write_text("".join(f"{line} {line}\n" for line in text), encoding="utf-8")
    for name in "ab":
        bpe_encode([str(tmp_path / name)], [str(tmp_path / f"{name}.alone")], vocabulary=gpt2)

    bpe_encode(
        [str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path / "a.ids"), str(tmp_path / "b.ids")], vocabulary=gpt2
    )
    for name in "ab":
        assert (tmp_path / f"{name}.ids").read_bytes() == (tmp_path / f"{name}.alone").read_bytes()


def test_inputs_of_different_length_are_refused(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    # fairseq encodes as many lines as the shortest has, and says nothing.
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("one\n")
    with pytest.raises(DataError, match=r"differ in their number of lines \(.*a has 2, .*b has 1\)"):
        bpe_encode(
            [str(tmp_path / "a"), str(tmp_path / "b")],
            [str(tmp_path / "c"), str(tmp_path / "d")],
            vocabulary=gpt2,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


# --- any number of workers, any executor -----------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "_PIECE_BYTES", 500)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_output_does_not_depend_on_the_workers(
    golden: Path, tmp_path: Path, gpt2: VocabularyFiles, workers: int
) -> None:
    done = []
    text = golden / "train.txt"
    bpe_encode([str(text)], [str(tmp_path / "ids")], vocabulary=gpt2, workers=workers, progress=done.append)
    assert (tmp_path / "ids").read_bytes() == (golden / "train.bpe").read_bytes()
    assert sum(done) == text.stat().st_size
    assert len(done) > 4


@pytest.mark.usefixtures("small_pieces")
def test_any_executor_does_the_work(golden: Path, tmp_path: Path, gpt2: VocabularyFiles) -> None:
    with ThreadPoolExecutor(3) as executor:
        bpe_encode([str(golden / "train.txt")], [str(tmp_path / "ids")], vocabulary=gpt2, workers=3, executor=executor)
    assert (tmp_path / "ids").read_bytes() == (golden / "train.bpe").read_bytes()


# --- decoding --------------------------------------------------------------------------------------------------------


def test_own_text_is_decoded_again(golden: Path, tmp_path: Path, gpt2: VocabularyFiles) -> None:
    counts = bpe_decode(str(golden / "train.bpe"), str(tmp_path / "text"), vocabulary=gpt2)
    lines = (golden / "train.txt").read_text(encoding="utf-8").split("\n")
    assert (tmp_path / "text").read_text(encoding="utf-8").split("\n")[:-1] == [
        line.strip() for line in lines if line.strip()
    ]
    assert counts.tokens == len((golden / "train.bpe").read_bytes().split())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"))))
def test_decoding_is_the_inverse_of_encoding(tmp_path: Path, gpt2: VocabularyFiles, lines: list[str]) -> None:
    encode("".join(f"{line}\n" for line in lines).encode(), tmp_path, gpt2, keep_empty=True)
    bpe_decode(str(tmp_path / "ids"), str(tmp_path / "back"), vocabulary=gpt2)
    assert (tmp_path / "back").read_bytes() == "".join(f"{line.strip()}\n" for line in lines).encode()


def decode(ids: bytes, folder: Path, vocabulary: VocabularyFiles) -> bytes:
    (folder / "ids").write_bytes(ids)
    bpe_decode(str(folder / "ids"), str(folder / "text"), vocabulary=vocabulary)
    return (folder / "text").read_bytes()


def test_fairseqs_words_for_what_is_no_token_stand_for_themselves(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    assert decode(b"15496 <unk> 995 <mask>\n50256\n\n", tmp_path, gpt2) == b"Hello<unk> world<mask>\n<|endoftext|>\n\n"


def test_a_character_without_all_its_tokens_is_replaced(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    assert decode(b"10545 245 15496\n", tmp_path, gpt2) == " \ufffdHello\n".encode()


@pytest.mark.parametrize("word", [b"50257", b"-1", b"madeupword0000", b"1.5", b"\xff"])
def test_what_is_no_id_is_named_by_line(tmp_path: Path, gpt2: VocabularyFiles, word: bytes) -> None:
    with pytest.raises(DataError, match=r"ids:3: found .*, expected ids of encoder\.json"):
        decode(b"15496\n15496\n15496 " + word + b"\n", tmp_path, gpt2)
    assert not (tmp_path / "text").exists()


# --- own vocabularies ------------------------------------------------------------------------------------------------


def test_own_vocabulary(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path, merges=[(b"a", b"b"), (b" ", b"ab")], first_id=1000)
    assert encode(b"ab ab\n", tmp_path, vocabulary) == b"1001 1000\n"
    assert decode(b"1001 1000\n", tmp_path, vocabulary) == b"ab ab\n"


def test_a_vocabulary_that_training_cannot_give_is_refused(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path, merges=[(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")])
    with pytest.raises(DataError, match=r"vocab\.bpe:4: makes the token b'abc'"):
        encode(b"abc\n", tmp_path, vocabulary)


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_not_utf8_is_named_and_leaves_nothing(tmp_path: Path, gpt2: VocabularyFiles, workers: int) -> None:
    (tmp_path / "text").write_bytes(b"Hello world\n" * 300 + b"lone \xed\xa0\x80 surrogate\n" + b"Hello\n" * 300)
    with pytest.raises(DataError, match=r"text:301: not UTF-8 \(byte 0xed at byte 6 of the line\)"):
        bpe_encode([str(tmp_path / "text")], [str(tmp_path / "ids")], vocabulary=gpt2, workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_an_old_output_survives_an_error(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "ids").write_bytes(b"old\n")
    with pytest.raises(DataError):
        encode(b"\xff\n", tmp_path, gpt2)
    assert (tmp_path / "ids").read_bytes() == b"old\n"


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["a", "b"], ["c"], r"found 2 input\(s\) \(a, b\) and 1 output\(s\) \(c\)"),
        (["a", "b"], ["c", "x/../c"], "c: named as the output of more than one input"),
        (["-", "-"], ["c", "d"], r"standard input \(-\) can be read as one input only"),
    ],
)
def test_names_that_do_not_go_together(
    gpt2: VocabularyFiles, inputs: list[str], outputs: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bpe_encode(inputs, outputs, vocabulary=gpt2)


def test_an_output_that_is_a_folder_is_refused(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "ids").mkdir()
    with pytest.raises(LmtoolsError, match="ids: is a folder, expected a file name"):
        encode(b"Hello\n", tmp_path, gpt2)


def test_an_input_may_be_its_own_output(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"Hello\n")
    before = FileRecord.of(path)
    bpe_encode([str(path)], [str(path)], vocabulary=gpt2)
    manifest = read_manifest(path)
    assert path.read_bytes() == b"15496\n"
    assert manifest is not None
    assert list(manifest.inputs) == [before]


# --- manifests -------------------------------------------------------------------------------------------------------

ORIGINAL = OriginalText("wiki.raw", 4_358, 241_211, 245_569, 1_290_590)


def with_manifest(text: Path) -> None:
    write_manifest(text, Manifest("lmtools detok", {}, [], [FileRecord.of(text)], {}, ORIGINAL))


def test_the_manifest_says_what_made_the_output(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    encode(b"Hello world\n\n", tmp_path, gpt2)
    manifest = read_manifest(tmp_path / "ids")
    assert manifest is not None
    assert manifest.tool == "lmtools bpe-encode"
    assert list(manifest.inputs) == [FileRecord.of(tmp_path / "text")]
    assert list(manifest.outputs) == [FileRecord.of(tmp_path / "ids")]
    assert manifest.counts == {"lines": 1, "tokens": 2, "dropped_lines": 1, "lost_lines": 0}
    assert manifest.options["keep_empty"] is False
    assert manifest.options["vocab_bpe"] == gpt2.vocab_bpe_sha256
    assert manifest.original is None


def test_the_counts_of_the_original_text_are_carried_on(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "text").write_bytes(b"Hello\n")
    with_manifest(tmp_path / "text")
    encode(b"Hello\n", tmp_path, gpt2)
    bpe_decode(str(tmp_path / "ids"), str(tmp_path / "back"), vocabulary=gpt2)
    for name in ("ids", "back"):
        manifest = read_manifest(tmp_path / name)
        assert manifest is not None
        assert manifest.original == ORIGINAL


def test_counts_of_another_text_are_not_carried_on(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "text").write_bytes(b"Hello\n")
    with_manifest(tmp_path / "text")
    encode(b"Hello, edited\n", tmp_path, gpt2)
    manifest = read_manifest(tmp_path / "ids")
    assert manifest is not None
    assert manifest.original is None


def test_each_of_several_outputs_has_its_own_counts_and_original(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "a").write_bytes(b"Hello world\n")
    (tmp_path / "b").write_bytes(b"Hello\n")
    with_manifest(tmp_path / "b")
    sources = [str(tmp_path / "a"), str(tmp_path / "b")]
    bpe_encode(sources, [str(tmp_path / "a.ids"), str(tmp_path / "b.ids")], vocabulary=gpt2)
    for name, tokens, original in (("a", 2, None), ("b", 1, ORIGINAL)):
        manifest = read_manifest(tmp_path / f"{name}.ids")
        assert manifest is not None
        assert [record.path for record in manifest.inputs] == ["a", "b"]
        assert [record.path for record in manifest.outputs] == [f"{name}.ids"]
        assert manifest.counts["tokens"] == tokens
        assert manifest.original == original


def test_a_broken_manifest_of_the_input_is_named_before_the_work(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    (tmp_path / "text.meta.json").write_text("{")
    with pytest.raises(DataError, match=r"text\.meta\.json: not a readable manifest"):
        encode(b"\xff", tmp_path, gpt2)


def test_what_is_unchanged_is_found(tmp_path: Path, gpt2: VocabularyFiles) -> None:
    encode(b"Hello world\n\n", tmp_path, gpt2)
    inputs, outputs = [str(tmp_path / "text")], [str(tmp_path / "ids")]
    assert find_encoded(inputs, outputs, vocabulary=gpt2) == [BpeCounts(1, 2, 1)]
    assert find_encoded(inputs, outputs, vocabulary=gpt2, keep_empty=True) is None
    assert find_encoded(inputs, outputs, vocabulary=write_vocabulary(tmp_path, merges=[])) is None

    bpe_decode(outputs[0], str(tmp_path / "back"), vocabulary=gpt2)
    assert find_decoded(outputs[0], str(tmp_path / "back"), vocabulary=gpt2) == BpeCounts(1, 2)

    (tmp_path / "text").write_bytes(b"Hello\n")
    assert find_encoded(inputs, outputs, vocabulary=gpt2) is None
    (tmp_path / "ids").write_bytes(b"15496\n")
    assert find_decoded(outputs[0], str(tmp_path / "back"), vocabulary=gpt2) is None
