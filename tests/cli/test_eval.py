"""`lmtools eval` as a user types it: the numbers that it prints and writes, and all that it refuses before it starts.

The models and their losses are genuine fairseq's.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtools.artifacts import FileRecord, Manifest, OriginalText, write_manifest
from lmtools.cli.eval import evaluate
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.data.indexed_writer import write_dataset
from tests.support.arrays import read_npz

EOS, UNK, PAD = Dictionary.eos_index, Dictionary.unk_index, Dictionary.pad_index
ORIGINAL = OriginalText(path="test.raw", lines=400, words=4000, tokens=4400, num_bytes=20000)


@pytest.fixture
def mp4(golden: Path) -> list[object]:
    """Fairseq's evaluation `mp4/eval/ctx24`, as arguments."""
    return ["eval", golden / "bin", "--path", golden / "mp4", "--context-window", 24, "--batch-size", 100]


@pytest.fixture
def published(golden: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((golden / "mp4" / "eval" / "ctx24.json").read_text())
    return record


@pytest.fixture
def data(tmp_path: Path, golden: Path) -> Path:
    """The golden folder of data, to be changed."""
    shutil.copytree(golden / "bin", tmp_path / "bin")
    return tmp_path / "bin"


def write_split(data: Path, name: str, sentences: Sequence[Sequence[int]]) -> None:
    write_dataset(data / name, sentences, vocab_size=144)


# --- what it says ---


def test_a_summary_for_a_person(lmtools, mp4, published):
    ran = lmtools(*mp4)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        f"test: loss {published['loss_base2']:.4f} bits, perplexity {published['perplexity']:.2f} over 5,184 tokens "
        "(window 32, context 24, float32)\n"
    )


def test_json_has_the_loss_in_every_unit_and_all_that_went_into_it(lmtools, mp4, published, golden, tmp_path):
    ran = lmtools(*mp4, "--json", "--output", tmp_path / "result.json")
    assert (ran.code, ran.err) == (0, "")
    result = json.loads(ran.out)
    assert result == json.loads((tmp_path / "result.json").read_text())

    assert result["loss_base2"] == pytest.approx(published["loss_base2"], rel=1e-5)
    assert result["total_nats"] == pytest.approx(-published["score_sum_f64"], rel=1e-5)
    assert result["loss_nats"] == result["total_nats"] / 5184
    assert result["loss_base2"] == pytest.approx(result["loss_nats"] / math.log(2), rel=1e-15)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss_nats"]), rel=1e-12)
    assert (result["tokens_scored"], result["tokens_in_split"], result["tokens_skipped"]) == (5184, 5184, 0)
    assert (result["num_sentences"], result["num_windows"]) == (400, 648)
    assert result["tokens_unk"] == int((IndexedDataset(golden / "bin" / "test").tokens == UNK).sum())
    assert (result["original"], result["word_perplexity"], result["bits_per_byte"]) == (None, None, None)
    assert result["scores"] is None, "not asked for"

    window = {key: result[key] for key in ("tokens_per_sample", "context_window", "sample_break_mode", "add_bos_token")}
    assert window == {
        "tokens_per_sample": 32,
        "context_window": 24,
        "sample_break_mode": "none",
        "add_bos_token": False,
    }
    assert (result["dtype"], result["mp"], result["dp"], result["device"]) == ("float32", 1, 1, "cpu")
    assert (result["num_parts"], result["model"]["vocab_size"], result["model"]["decoder_layers"]) == (4, 160, 2)
    files = [*(golden / "mp4").glob("*.pt"), *(golden / "bin" / name for name in ("test.bin", "test.idx", "dict.txt"))]
    hashes = result["checkpoint_sha256"] | result["data_sha256"]
    assert hashes == {path.name: FileRecord.of(path).sha256 for path in files}
    assert result["versions"].keys() == {"lmtools", "torch", "numpy", "python"}
    assert (result["tokens_resumed"], result["seconds"] > 0, result["tokens_per_second"] > 0) == (0, True, True)


def test_its_result_is_renorm_ppls_input(lmtools, mp4, tmp_path):
    lmtools(*mp4, "--output", tmp_path / "result.json", "--orig-tokens", 4400)
    result = json.loads((tmp_path / "result.json").read_text())
    ran = lmtools("renorm-ppl", "--result", tmp_path / "result.json", "--json")
    assert json.loads(ran.out)["renormalized_perplexity"] == pytest.approx(result["word_perplexity"], rel=1e-12)


def test_a_pipe_gets_the_result_and_no_file_lies_beside_it(lmtools, mp4, published):
    reader, writer = os.pipe()
    ran = lmtools(*mp4, "--output", f"/dev/fd/{writer}")
    os.close(writer)
    with open(reader, encoding="utf-8") as stream:
        result = json.load(stream)
    assert (ran.code, ran.err) == (0, "")
    assert result["loss_base2"] == pytest.approx(published["loss_base2"], rel=1e-5)


def test_scores_are_the_log_probability_of_each_token_in_order(lmtools, mp4, golden, tmp_path):
    ran = lmtools(*mp4, "--scores", tmp_path / "scores.npy", "--json")
    scores = np.load(tmp_path / "scores.npy")
    assert (scores.dtype, scores.shape) == (np.float32, (5184,))
    recorded = read_npz(golden / "mp4" / "eval" / "ctx24.npz")  # with a context window fairseq keeps the order
    np.testing.assert_allclose(scores, recorded["scores"], rtol=0, atol=1e-4)
    result = json.loads(ran.out)
    assert result["total_nats"] == -float(scores.sum(dtype=np.float64))
    assert result["scores"] == {
        "path": str(tmp_path / "scores.npy"),
        "sha256": FileRecord.of(tmp_path / "scores.npy").sha256,
    }


def test_what_does_not_fit_is_refused_or_left_out_and_said(lmtools, golden, tmp_path):
    """The split has sentences of up to 20 tokens."""
    sizes = IndexedDataset(golden / "bin" / "test").sizes
    skipped = int(sizes[sizes > 14].sum())
    assert 0 < skipped < 5184
    arguments = ["eval", golden / "bin", "--path", golden / "mp4", "--sample-break-mode", "eos"]
    arguments += ["--tokens-per-sample", 14, "--orig-tokens", 4400, "--orig-bytes", 20000]

    ran = lmtools(*arguments)
    assert ran.code == 2
    assert f"{(sizes > 14).sum()} sentences are longer than the 14 tokens of a block" in ran.err

    output = tmp_path / "result.json"
    options = ["--skip-invalid-size-inputs-valid-test", "--scores", tmp_path / "scores.npy", "--output", output]
    ran = lmtools(*arguments, *options)
    assert ran.code == 0
    assert f"\n  NOT scored: {skipped:,} of 5,184 tokens, in sentences that do not fit a window\n" in ran.out
    scores = np.load(tmp_path / "scores.npy")
    assert np.array_equal(np.isnan(scores), np.repeat(sizes > 14, sizes)), "NaN stands for what was not scored, alone"
    result = json.loads(output.read_text())
    assert (result["tokens_scored"], result["tokens_skipped"]) == (5184 - skipped, skipped)
    assert result["word_perplexity"] is None, "of a part of the text"
    assert result["bits_per_byte"] is None


def test_several_subsets(lmtools, mp4, tmp_path):
    ran = lmtools(*mp4, "--gen-subset", "valid,test", "--output", tmp_path / "result.json", "--json")
    document = json.loads(ran.out)
    assert document == json.loads((tmp_path / "result.json").read_text())
    assert [result["subset"] for result in document["results"]] == ["valid", "test"]
    alone = json.loads(lmtools(*mp4, "--gen-subset", "valid", "--json").out)
    assert document["results"][0]["total_nats"] == alone["total_nats"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"], "no journal is left"


def test_unknown_words_are_counted(lmtools, golden, data):
    write_split(data, "some", [[5, UNK, 6, UNK, EOS], [UNK, 7, EOS], [EOS]])
    ran = lmtools("eval", data, "--path", golden / "mp4", "--gen-subset", "some")
    assert "\n  <unk>: 3 of the tokens (33.33 %)\n" in ran.out


# --- the original text's counts ---


def manifest_for(data: Path) -> None:
    outputs = [FileRecord.of(data / f"test.{suffix}") for suffix in ("bin", "idx")]
    manifest = Manifest(tool="t", options={}, inputs=[], outputs=outputs, counts={}, original=ORIGINAL)
    write_manifest(data / "test", manifest)


def test_counts_of_the_original_come_from_the_manifest_or_by_hand(lmtools, golden, data):
    arguments = ["eval", data, "--path", golden / "mp4", "--context-window", 24, "--batch-size", 100]
    by_hand = json.loads(lmtools(*arguments, "--orig-tokens", 4400, "--orig-bytes", 20000, "--json").out)
    manifest_for(data)
    by_manifest = json.loads(lmtools(*arguments, "--json").out)
    assert (by_hand["original_from"], by_manifest["original_from"]) == ("given", "manifest")
    assert (by_hand["original"]["path"], by_manifest["original"]["path"]) == (None, "test.raw")
    for result in (by_hand, by_manifest):
        assert result["word_perplexity"] == pytest.approx(math.exp(result["total_nats"] / 4400), rel=1e-12)
        assert result["bits_per_byte"] == pytest.approx(result["total_nats"] / math.log(2) / 20000, rel=1e-12)

    both = json.loads(lmtools(*arguments, "--orig-tokens", 4000, "--json").out)
    assert (both["original_from"], both["original"]["tokens"]) == ("given", 4000), "who says it by hand means it"
    assert both["bits_per_byte"] is None


def test_the_summary_says_which_counts_were_used(lmtools, golden, data):
    arguments = ["eval", data, "--path", golden / "mp4", "--context-window", 24, "--batch-size", 100]
    by_hand = lmtools(*arguments, "--orig-tokens", 4400).out.splitlines()
    assert by_hand[1:] == ["  per original token: perplexity 4.06 over 4,400 (given by hand)"]
    manifest_for(data)
    assert lmtools(*arguments).out.splitlines()[1:] == [
        "  per original token: perplexity 4.06 over 4,400 (words and line ends of test.raw)",
        "  per original byte: 0.4446 bits over 20,000",
    ]


def test_a_manifest_of_other_data_is_not_used(lmtools, golden, data):
    manifest_for(data)
    shutil.copy(golden / "bin" / "train.bin", data / "test.bin")
    shutil.copy(golden / "bin" / "train.idx", data / "test.idx")
    assert "original" not in lmtools("eval", data, "--path", golden / "mp4").out


# --- what changes a number, and what does not ---


@pytest.mark.parametrize(
    "batches",
    [["--batch-size", 1], ["--max-sentences", 648], ["--max-tokens", 100], ["--max-tokens", 65, "--batch-size", 3]],
)
def test_no_number_depends_on_the_batches(lmtools, mp4, published, batches):
    result = json.loads(lmtools(*mp4, *batches, "--json").out)
    assert result["loss_base2"] == pytest.approx(published["loss_base2"], rel=1e-5)


def test_context_lowers_the_loss_and_the_window_is_as_given(lmtools, golden):
    losses = {}
    for window, context in ((8, 4), (2, 1), (1, 0)):
        arguments = ["--tokens-per-sample", window, "--context-window", context, "--batch-size", 200, "--json"]
        result = json.loads(lmtools("eval", golden / "bin", "--path", golden / "mp4", *arguments).out)
        assert result["num_windows"] == -(-5184 // (window - context))
        losses[window, context] = result["loss_base2"]
    assert losses[8, 4] < losses[2, 1] < losses[1, 0]


def test_half_precision_is_near_and_slow_where_it_is_slow(lmtools, mp4, published):
    for dtype in ("bfloat16", "float16"):
        ran = lmtools(*mp4, "--dtype", dtype, "--json")
        result = json.loads(ran.out)
        assert result["dtype"] == dtype
        assert result["loss_base2"] == pytest.approx(published["loss_base2"], rel=3e-3)
        assert result["loss_base2"] != pytest.approx(published["loss_base2"], rel=1e-7)
        assert ran.err.count("\n") == ("hundreds of times slower" in ran.err) == (dtype == "float16")


# --- what is refused, in one line, before anything is computed ---


def assert_refused(ran: Any, code: int, message: str) -> None:
    assert ran.out == ""
    assert ran.err.startswith("lmtools: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err
    assert ran.code == code


OPTIONS = {
    "longer than the model": (["--tokens-per-sample", 33], "--tokens-per-sample 33: makes windows of 33 tokens"),
    "all context": (["--context-window", 32], "--context-window 32: expected 0 to 31, less than the 32 tokens"),
    "all context of a short window": (
        ["--tokens-per-sample", 8, "--context-window", 8],
        "--context-window 8: expected 0 to 7",
    ),
    "heads": (["--mp", 3], "--mp 3: does not divide the model's 4 attention heads and 64 feed-forward"),
    "<s> in a context": (["--add-bos-token", "--context-window", 8], "--add-bos-token with --context-window"),
    "few tokens": (["--max-tokens", 31], "--max-tokens 31: the longest window alone has 32 tokens"),
    "few tokens for <s>": (
        ["--max-tokens", 32, "--add-bos-token"],
        "--max-tokens 32: the longest window alone has 33 tokens",
    ),
    "nothing to resume": (["--resume"], "--resume: needs the --output or --scores of the run that was cut off"),
    "a split twice": (["--gen-subset", "test,test"], "--gen-subset test,test: expected names of splits, each once"),
    "no split": (["--gen-subset", ""], "--gen-subset : expected names of splits"),
    "a split elsewhere": (["--gen-subset", "../bin/test"], "--gen-subset ../bin/test: expected names of splits in the"),
    "scores of two": (["--gen-subset", "test,valid", "--scores", "s.npy"], "--scores: holds one split"),
    "one count for two": (["--gen-subset", "test,valid", "--orig-tokens", 5], "are of one text"),
    "one file for two": (["--scores", "r.json", "--output", "r.json"], "is --output too; give two names"),
    "a pipe that workers do not have": (
        ["--output", "/dev/fd/250"],
        "--output /dev/fd/250: is not open in this process",
    ),
    "nothing to resume beside": (["--output", os.devnull, "--resume"], "--resume: needs the --output or --scores"),
    "no folder": (["--output", "absent/r.json"], "--output absent/r.json: expected a file's name in a folder that exi"),
    "a folder": (["--scores", "."], "--scores .: expected a file's name in a folder that exists"),
    "standard output": (["--output", "-"], "--output -: expected a file's name; --json prints the result"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_work(lmtools, golden, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    options, message = OPTIONS[case]
    assert_refused(lmtools("eval", golden / "bin", "--path", golden / "mp4", *options), 2, message)
    assert list(tmp_path.iterdir()) == []


def test_one_file_under_two_names(lmtools, mp4, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "result.json")
    ran = lmtools(*mp4, "--scores", tmp_path / "link", "--output", tmp_path / "result.json")
    assert_refused(ran, 2, "is --output too; give two names")


@pytest.mark.parametrize("name", ["data/test.bin", "data/dict.txt", "mp4/model-model_part-2.pt", "txl.pt"])
@pytest.mark.parametrize("option", ["--output", "--scores"])
def test_what_is_read_is_not_written_over(lmtools, golden, tmp_path, name, option):
    shutil.copytree(golden / "bin", tmp_path / "data")
    shutil.copytree(golden / "mp4", tmp_path / "mp4")
    shutil.copy(golden / "txl" / "checkpoint_last.pt", tmp_path / "txl.pt")
    (tmp_path / "link").symlink_to(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    streams = ["--path", tmp_path / "txl.pt", "--task", "truncated_bptt_lm"]
    model = streams if name == "txl.pt" else ["--path", tmp_path / "mp4"]
    ran = lmtools("eval", tmp_path / "data", *model, option, tmp_path / "link")
    assert_refused(ran, 2, f"{option} {tmp_path / 'link'}: is read by this evaluation; give another name")
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(
    "options", [["--mp", 0], ["--dtype", "int8"], ["--device", "tpu"], ["--batch-size", 0], ["--context-window", -1]]
)
def test_options_that_mean_nothing(lmtools, golden, options):
    ran = lmtools("eval", golden / "bin", "--path", golden / "mp4", *options)
    assert (ran.code, ran.out) == (2, "")
    assert options[0] in ran.err


def test_learned_positions_have_no_room_for_one_more(lmtools, golden, tmp_path):
    from tests.checkpoints.test_fairseq_write import VARIANTS, write

    write(tmp_path / "model", VARIANTS["untied, learned positions"], 1)
    arguments = ["eval", golden / "bin", "--path", tmp_path / "model", "--add-bos-token"]
    assert_refused(
        lmtools(*arguments), 2, "--tokens-per-sample 32: makes windows of 33 tokens, the checkpoint was made"
    )
    assert lmtools(*arguments, "--tokens-per-sample", 31).code == 0


DATA = {
    "no split": (lambda data: (data / "test.bin").unlink(), "test.bin: no such file"),
    "no index": (lambda data: (data / "test.idx").unlink(), "test.idx: no such file"),
    "no dictionary": (lambda data: (data / "dict.txt").unlink(), "dict.txt: no such file"),
    "an empty split": (lambda data: write_split(data, "test", []), "test: the split holds no tokens"),
    "half an index": (
        lambda data: (data / "test.idx").write_bytes((data / "test.idx").read_bytes()[:1000]),
        "test.idx: has 1,000 bytes, expected 4,826",
    ),
    "padding": (
        lambda data: write_split(data, "test", [[5, EOS], [6, PAD, EOS]]),
        "test.bin: token 3 is <pad>, which a model neither reads nor predicts",
    ),
    "unknown types": (
        lambda data: write_split(data, "test", [[5, EOS], [6, 144, EOS]]),
        "test.bin: token 3 is type 144, but the dictionary has 144 types",
    ),
    "no ends": (
        lambda data: write_split(data, "test", [[5, EOS], [6, 7]]),
        "test: sentence 2 does not end in </s>",
    ),
    "another dictionary": (
        lambda data: (data / "dict.txt").write_text("".join(f"word{n} 1\n" for n in range(100))),
        "dict.txt: has 104 types, the embedding of model-model_part-0.pt has 160 rows",
    ),
    "a broken manifest": (
        lambda data: (data / "test.meta.json").write_text("{"),
        "test.meta.json: not a readable mani",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_scored(lmtools, golden, data, tmp_path, case):
    damage, message = DATA[case]
    damage(data)
    arguments = ["eval", data, "--path", golden / "mp4", "--output", tmp_path / "result.json"]
    assert_refused(lmtools(*arguments), 1, message)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", "absent: no such checkpoint"),
        ("plain", "plain: holds 2 checkpoints; name one of checkpoint_init.pt, model.pt"),
        ("train.txt", "not a file of torch.save"),
    ],
)
def test_checkpoints_that_are_none(lmtools, golden, path, message):
    assert_refused(lmtools("eval", golden / "bin", "--path", golden / path), 1, message)


def test_no_gpu_is_said_before_weights_are_read(lmtools, mp4, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert_refused(lmtools(*mp4, "--device", "cuda"), 2, "has no GPU, 0 found; start no more processes than there")


# --- what only the computation shows ---


def poisoned(golden: Path, target: Path, value: float) -> Path:
    """A checkpoint of which one type's embedding is no number."""
    shutil.copytree(golden / "mp4", target)
    path = target / "model-model_part-0.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.embed_tokens.weight"][7] = value
    torch.save(content, path)
    return target


@pytest.mark.parametrize(("value", "found"), [(math.nan, "nan"), (math.inf, "(nan|-inf)")])
def test_a_score_that_is_no_number_names_block_and_token(lmtools, golden, data, tmp_path, value, found):
    import re

    checkpoint = poisoned(golden, tmp_path / "mp4", value)
    # Its softmax has the poisoned type among its choices: the very first token is bad.
    ran = lmtools("eval", data, "--path", checkpoint, "--tokens-per-sample", 4, "--output", tmp_path / "result.json")
    first = int(IndexedDataset(data / "test").tokens[0])
    assert ran.code == 1
    assert re.match(
        rf"lmtools: block 0 \(tokens 0 to 3\): the log-probability of token 0 \(type {first}\) is {found}, expected a "
        r"finite number; \d+ of 32 in this round are not finite. Try --dtype float32, and check the checkpoint\n$",
        ran.err,
    )
    assert not (tmp_path / "result.json").exists()


def test_help_has_every_option(lmtools):
    ran = lmtools("eval", "--help")
    assert ran.code == 0
    for name in evaluate.__annotations__:
        if name not in ("data", "return", "as_json", "skip_invalid_size_inputs"):
            assert f"--{name.replace('_', '-')}" in ran.out
