"""What is taken for a result, and what is refused with a line that says why."""

from __future__ import annotations

import json

import pytest

from lmtools.errors import DataError
from lmtools.report.result_file import read_results
from tests.support.results import write_data, write_result


@pytest.fixture
def record(tmp_path):
    return write_result(tmp_path / "result.json", write_data(tmp_path), tmp_path / "scores.npy")


def test_one_result_or_several(tmp_path, record):
    [result] = read_results(tmp_path / "result.json")
    assert (result.subset, result.perplexity) == ("test", record["perplexity"])
    hashes = record["data_sha256"] | {"valid.bin": "1", "valid.idx": "2"}
    results = [record, record | {"subset": "valid", "data_sha256": hashes}]
    (tmp_path / "two.json").write_text(json.dumps({"results": results}))
    assert [result.subset for result in read_results(tmp_path / "two.json")] == ["test", "valid"]


def test_a_result_of_before_scores_were_recorded(tmp_path, record):
    del record["scores"], record["tokens_resumed"], record["tokens_unk"]
    (tmp_path / "old.json").write_text(json.dumps(record))
    [result] = read_results(tmp_path / "old.json")
    assert result.scores is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "expected a result of `lmtools eval --output`"),
        ('{"results": []}', "expected a result of `lmtools eval --output`"),
        ('{"results": [7]}', "the document: Input should be a valid dictionary"),
        ('{"format": "lmtools-eval", "format_version": 1}', "subset: Field required"),
        ('{"format": "lmtools-manifest"}', "format: Input should be 'lmtools-eval', found 'lmtools-manifest'"),
    ],
)
def test_what_is_no_result(tmp_path, content, said):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(DataError) as caught:
        read_results(tmp_path / "result.json")
    assert str(caught.value).startswith(f"{tmp_path / 'result.json'}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 2),
        ("perplexity", float("nan")),
        ("perplexity", "8.46"),
        ("tokens_scored", 0),
        ("tokens_scored", 2.5),
        ("original", []),
        ("data_sha256", {"test.bin": None}),
        ("scores", {"path": "scores.npy"}),
    ],
)
def test_a_field_of_another_kind(tmp_path, record, field, value):
    (tmp_path / "result.json").write_text(json.dumps(record | {field: value}))
    with pytest.raises(DataError, match=rf"not a result of `lmtools eval`: {field}"):
        read_results(tmp_path / "result.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"original": None}, "word_perplexity without original.tokens"),
        ({"perplexity": 5.0}, r"perplexity is 5, but its total_nats and counts make 17\.2339154"),
        ({"loss_base2": 4.1}, r"loss_base2 is 4\.1, but its total_nats and counts make 4\.10717861"),
        ({"total_nats": 1200.0}, r"loss_base2 is 4\.10717861, but"),
        ({"tokens_scored": 399}, r"loss_base2 is 4\.10717861, but"),
        ({"word_perplexity": 25.0}, "word_perplexity is 25, but"),
        ({"bits_per_byte": 0.8}, r"bits_per_byte is 0\.8, but"),
        ({"word_perplexity": None, "original": {"tokens": 350}}, "bits_per_byte without original.num_bytes"),
        ({"data_sha256": {}}, "data_sha256 without dict.txt"),
        ({"subset": "valid"}, "data_sha256 without valid.bin"),
    ],
)
def test_what_belongs_together_is_there_together(tmp_path, record, changes, said):
    (tmp_path / "result.json").write_text(json.dumps(record | changes))
    with pytest.raises(DataError, match=said):
        read_results(tmp_path / "result.json")
