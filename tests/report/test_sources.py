"""Data and scores are found where the result says, or beside it, or where one says; what does not belong is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from lmtools.errors import DataError
from lmtools.files import sha256_file
from lmtools.report.sources import read_evaluations
from tests.support.results import write_data, write_result


@pytest.fixture
def folder(tmp_path):
    """`result.json` and `scores.npy` beside `bin`."""
    write_result(tmp_path / "result.json", write_data(tmp_path), tmp_path / "scores.npy")
    return tmp_path


def read(folder, **options):
    [evaluation] = read_evaluations([folder / "result.json"], **options)
    return evaluation


def rewrite(folder, **changes):
    record = json.loads((folder / "result.json").read_text()) | changes
    (folder / "result.json").write_text(json.dumps(record))


def test_all_is_where_the_result_says(folder):
    evaluation = read(folder)
    assert evaluation.name == "result"
    assert evaluation.data.folder == folder / "bin"
    assert len(evaluation.log_probs) == len(evaluation.data.split.tokens) == 400
    assert evaluation.data.split.windows[-1].tolist() == [392, 396, 400]
    assert evaluation.missing == []


def test_what_was_named_from_another_folder_is_found_beside_the_result(folder, monkeypatch):
    rewrite(
        folder,
        data="bin",
        scores={**json.loads((folder / "result.json").read_text())["scores"], "path": "x/scores.npy"},
    )
    monkeypatch.chdir("/")
    evaluation = read(folder)
    assert evaluation.data is not None
    assert evaluation.log_probs is not None


def test_what_is_missing_is_said_with_the_way_to_get_it(folder):
    shutil.rmtree(folder / "bin")
    (folder / "scores.npy").unlink()
    evaluation = read(folder)
    assert (evaluation.data, evaluation.log_probs) == (None, None)
    data, scores = evaluation.missing
    assert "give the folder with --data" in data
    assert "give the file with --scores" in scores


def test_a_result_without_scores_says_how_they_are_kept(folder):
    rewrite(folder, scores=None)
    evaluation = read(folder)
    assert evaluation.log_probs is None
    assert "run lmtools eval again with --scores" in evaluation.missing[0]


def test_where_they_are_can_be_said(folder):
    (folder / "bin").rename(folder / "elsewhere")
    (folder / "scores.npy").rename(folder / "other.npy")
    evaluation = read(folder, data=[folder / "elsewhere"], scores=[folder / "other.npy"])
    assert evaluation.data.folder == folder / "elsewhere"
    assert evaluation.log_probs is not None


def test_each_of_several_results_takes_its_own(folder):
    (folder / "second").mkdir()
    data = write_data(folder / "second", sentences=[[5, 4, 8, 2]] * 100)
    write_result(folder / "second" / "result.json", data, folder / "second" / "scores.npy")
    (folder / "scores.npy").rename(folder / "mine.npy")
    first, second = read_evaluations(
        [folder / "result.json", folder / "second" / "result.json"], scores=[folder / "mine.npy"]
    )
    assert first.name != second.name
    assert first.log_probs is not None
    assert second.log_probs is not None
    assert second.data.folder == data


def test_data_that_was_made_again_is_refused(folder):
    shutil.rmtree(folder / "bin")
    write_data(folder / "new", sentences=[[5, 4, 8, 2]] * 100)
    (folder / "new" / "bin").rename(folder / "bin")
    with pytest.raises(DataError, match=r"bin: test.bin has sha256 \w{12}\.\.\., but .*result.json was made with"):
        read(folder)


def test_scores_that_were_written_over_are_refused(folder):
    np.save(folder / "scores.npy", np.zeros(400, dtype=np.float32))
    with pytest.raises(DataError, match=r"scores.npy: has sha256 .* was made with"):
        read(folder)
    with pytest.raises(DataError, match=r"scores.npy: has sha256"):
        read(folder, scores=[folder / "scores.npy"])


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (np.zeros(399, dtype=np.float32), "has 399 scores of 399 tokens, but"),
        (np.full(400, np.nan, dtype=np.float32), "has 0 scores of 400 tokens, but"),
        (np.full(400, -1, dtype=np.float32), "sums to 400.000000 nats, but"),
        (np.zeros(400, dtype=np.int64), "expected a row of floating-point numbers"),
        (np.zeros((20, 20), dtype=np.float32), "expected a row of floating-point numbers"),
        (np.array([{}]), "not a readable .npy file"),
    ],
)
def test_scores_that_no_hash_is_known_of_are_known_by_count_and_sum(folder, scores, said):
    rewrite(folder, scores=None)
    assert read(folder, scores=[folder / "scores.npy"]).log_probs is not None
    np.save(folder / "other.npy", scores, allow_pickle=True)
    with pytest.raises(DataError) as caught:
        read(folder, scores=[folder / "other.npy"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_named_must_be_there(folder):
    with pytest.raises(DataError, match="no such file"):
        read(folder, scores=[folder / "nowhere.npy"])
    with pytest.raises(DataError, match=r"--data .*nowhere: has no test.bin"):
        read(folder, data=[folder / "nowhere"])
    (folder / "cut.npy").write_bytes((folder / "scores.npy").read_bytes()[:200])
    rewrite(folder, scores=None)
    with pytest.raises(DataError, match=r"cut.npy: not a readable .npy file"):
        read(folder, scores=[folder / "cut.npy"])


def test_tokens_that_were_not_scored_are_as_the_result_says(folder):
    rewrite(folder, sample_break_mode="eos", tokens_per_sample=4, context_window=0)
    assert len(read(folder).data.split.windows) == 100
    rewrite(folder, sample_break_mode=None, tokens_per_sample=None)
    assert not read(folder).result.has_windows
    rewrite(folder, tokens_per_sample=8, mem_len=0, context_window=None)
    evaluation = read(folder)
    assert evaluation.result.has_windows
    assert evaluation.data.split.windows[1].tolist() == [8, 8, 16], "chunks"


def test_a_result_that_was_edited_does_not_mix_scores_and_data(folder):
    np.save(folder / "scores.npy", np.zeros(7, dtype=np.float32))
    rewrite(folder, scores={"path": str(folder / "scores.npy"), "sha256": sha256_file(folder / "scores.npy")})
    with pytest.raises(DataError, match=r"has 7 scores, but .*test has 400 tokens"):
        read(folder)


def test_results_of_one_file_are_named_by_their_splits(folder):
    record = json.loads((folder / "result.json").read_text())
    hashes = record["data_sha256"] | {"valid.bin": "1", "valid.idx": "2"}
    other = record | {"subset": "valid", "data_sha256": hashes, "data": "moved", "scores": None}
    (folder / "both.json").write_text(json.dumps({"results": [record, other]}))
    test, valid = read_evaluations([folder / "both.json"])
    assert (test.name, valid.name) == ("both test", "both valid")
    assert test.log_probs is not None
    assert valid.data is None
