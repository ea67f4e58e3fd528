"""What differs between two files or two lists of scores, and which of it fairseq is known for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.crosscheck import compare
from lmtools.crosscheck.compare import ROUNDING_NATS, Difference, compare_scores, first_difference
from lmtools.crosscheck.evaluation import compare_evaluations
from lmtools.crosscheck.known_faults import faults_of_counts, faults_of_parts, faults_of_sum, faults_of_text


@pytest.fixture
def differ(tmp_path):
    def differ(ours, theirs):
        (tmp_path / "ours").write_bytes(ours)
        (tmp_path / "theirs").write_bytes(theirs)
        return first_difference(tmp_path / "ours", tmp_path / "theirs")

    return differ


def test_first_difference_is_shown_with_its_line(differ):
    assert differ(b"", b"") is None
    assert differ(b"same\n", b"same\n") is None
    assert differ(b"one\ntwo three\n", b"one\ntwo  three\n") == Difference(8, 2, b"two three", b"two  three")
    assert differ(b"one\n", b"one\ntwo\n") == Difference(4, 2, b"", b"two")
    assert differ(b"", b"x") == Difference(0, 1, b"", b"x")
    long = b"a" * 1000
    found = differ(long + b"b" + long, long + b"c" + long)
    assert (found.offset, found.ours) == (1000, b"a" * 30 + b"b" + b"a" * 29)


@given(one=st.binary(max_size=40), other=st.binary(max_size=40), chunk_bytes=st.integers(1, 9))
def test_first_difference_in_chunks_of_any_size(tmp_path_factory, one, other, chunk_bytes):
    folder = tmp_path_factory.mktemp("pair")
    (folder / "one").write_bytes(one)
    (folder / "other").write_bytes(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_CHUNK_BYTES", chunk_bytes)
        found = first_difference(folder / "one", folder / "other")
    if one == other:
        assert found is None
    else:
        assert one[: found.offset] == other[: found.offset]
        assert one[found.offset : found.offset + 1] != other[found.offset : found.offset + 1]
        assert found.line == one[: found.offset].count(b"\n") + 1


def test_scores_that_differ_by_rounding_and_by_more():
    ours = np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32)
    theirs = ours + np.array([0.0, 1e-6, -4e-6, 0.0], dtype=np.float32)
    found = compare_scores(ours, theirs)
    assert found.same
    assert found.largest_at == (2, 1)
    assert found.loss_base2_ours == pytest.approx(2.5 / np.log(2))
    assert compare_scores(ours, ours).largest_at == ()
    theirs[3] -= 2 * ROUNDING_NATS
    assert not compare_scores(ours, theirs).same


def write_npz(path, tokens, scores, loss):
    np.savez(path, tokens=np.array(tokens), scores=np.array(scores, dtype=np.float32), loss=loss)
    return path


def test_evaluations_are_compared_only_if_the_tokens_are_the_same(tmp_path):
    tokens, scores = np.array([4, 5, 2]), np.array([-1.0, -2.0, -3.0], dtype=np.float32)
    same = compare_evaluations(tokens, scores, write_npz(tmp_path / "a.npz", tokens, scores, 2 / np.log(2)))
    assert same.explained
    assert same.faults == ()
    fewer = compare_evaluations(tokens, scores, write_npz(tmp_path / "b.npz", tokens[:2], scores[:2], 2.0))
    assert (fewer.comparison, fewer.explained) == (None, True)
    assert fewer.faults[0].startswith("fairseq leaves out")
    other = compare_evaluations(tokens, scores, write_npz(tmp_path / "c.npz", [4, 6, 2], scores, 2.0))
    assert (other.comparison, other.explained, other.faults) == (None, False, ())


def test_faults_are_named_where_they_show(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"one\r\ntwo\n")
    assert faults_of_text(text, sacremoses="0.1.1") == []
    text.write_bytes("eins\nzwei \r drei\n\u4e00".encode())
    lines, edges = faults_of_text(text, sacremoses="0.1.1")
    assert "a bare carriage return" in lines
    assert lines.endswith("line 2")
    assert "sacremoses 0.1.1" in edges
    assert faults_of_text(text, sacremoses="0.2.0") == faults_of_text(text) == [lines]
    assert faults_of_parts(1) == []
    assert "8 parts" in faults_of_parts(8)[0]
    assert faults_of_counts(3, 3) == faults_of_counts(3, 4) == []
    scores = np.full(3, -1.0, dtype=np.float32)
    assert faults_of_sum(scores, 1 / np.log(2)) == []
    assert "it prints 1.4427000 bits, its own scores have 1.4426950 (+5.0e-06)" in faults_of_sum(scores, 1.4427)[0]
