"""Streams through genuine checkpoints: fairseq's scores by fairseq's rule; by our own, every token, on any mesh."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.checkpoints.transformer_xl import TransformerXLCheckpoint
from lmtools.data.dictionary import Dictionary
from lmtools.data.streams import cut_streams
from lmtools.errors import DataError
from lmtools.evaluate.run import scores_of_every_token
from lmtools.evaluate.scoring import Scores
from lmtools.evaluate.splits import open_split
from lmtools.evaluate.streams import score_streams, scored_part
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import make_mesh
from tests.support.arrays import read_npz
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
OWN = Path(__file__).parents[1] / "golden"


def score(
    path: Path,
    data: Path,
    options: dict[str, Any],
    *,
    chunk_len: int,
    batch_size: int = 1,
    fairseq_compat: bool = False,
    dp: int = 1,
    tp: int = 1,
    num_tokens: int | None = None,
) -> Scores:
    """float32, of every token of the split or of its beginning; NaN where not scored. Of rank 0."""
    mesh = make_mesh(CPU, dp=dp, tp=tp)
    opened = open_checkpoint(path)
    assert isinstance(opened, TransformerXLCheckpoint)
    opened = dataclasses.replace(opened, config=dataclasses.replace(opened.config, **options))
    model = load_model(opened, mesh, torch.float32)
    assert isinstance(model, TransformerXL)
    split = open_split(
        data,
        "test",
        Dictionary.load(data / "dict.txt"),
        tokens_per_sample=chunk_len,
        context_window=0,
        break_mode="none",
        skip_too_long=False,
    )
    if num_tokens is not None:
        windows = split.windows[: -(-num_tokens // chunk_len)].clip(max=num_tokens)
        split = dataclasses.replace(
            split, tokens=split.tokens[:num_tokens], tokens_in_split=num_tokens, windows=windows
        )
    streams = cut_streams(
        split.tokens_in_split, num_rows=batch_size * dp, chunk_len=chunk_len, fairseq_compat=fairseq_compat
    )
    counted: list[int] = []
    scored = score_streams(model, split, streams, mesh, progress=counted.append)
    assert sum(counted) == streams.num_targets
    if mesh.rank != 0:
        return scored.log_probs
    return scores_of_every_token(scored_part(split, streams), scored.log_probs)


# --- genuine fairseq's ---


def assert_equal_to_fairseq(scores: Scores, evaluation: Path) -> None:
    found = scores[~np.isnan(scores)]
    recorded = read_npz(evaluation.with_suffix(".npz"))
    if "bs" not in evaluation.name:  # with several rows fairseq writes them in another order
        np.testing.assert_allclose(found, recorded["scores"], rtol=0, atol=1e-4)
    published = json.loads(evaluation.with_suffix(".json").read_text())
    assert len(found) == published["count"]
    assert -found.mean(dtype=np.float64) / math.log(2) == pytest.approx(published["loss_base2"], rel=1e-5)


OWN_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "mem0_t16": (16, {"mem_len": 0}),
    "mem16_t16": (16, {"mem_len": 16}),
    "mem32_t8": (8, {"mem_len": 32}),
    "mem32_t8_clamp20_same": (8, {"mem_len": 32, "clamp_len": 20, "same_length": True}),
}
SHARED_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mem0_t32": (32, 1, {"mem_len": 0}),
    "mem32_t32": (32, 1, {"mem_len": 32}),
    "mem32_t32_bs4": (32, 4, {"mem_len": 32}),
    "mem64_t16_same": (16, 1, {"mem_len": 64, "same_length": True}),
    "mem64_t16_clamp10": (16, 1, {"mem_len": 64, "clamp_len": 10}),
    "mem64_t16_clamp40_same": (16, 1, {"mem_len": 64, "clamp_len": 40, "same_length": True}),
}


@pytest.mark.parametrize("case", OWN_CASES)
def test_fairseqs_rule_gives_fairseqs_scores(golden: Path, case):
    chunk_len, options = OWN_CASES[case]
    path = golden / "txl" / "checkpoint_last.pt"
    scores = score(path, golden / "bin", options, chunk_len=chunk_len, fairseq_compat=True)
    assert_equal_to_fairseq(scores, golden / "txl" / "eval" / case)


@pytest.mark.shared
@pytest.mark.parametrize("case", SHARED_CASES)
def test_fairseqs_rule_gives_fairseqs_scores_of_wikitext(shared_golden: Path, case):
    chunk_len, batch_size, options = SHARED_CASES[case]
    scores = score(
        shared_golden / "txl" / "div1" / "checkpoint_last.pt",
        shared_golden / "bin" / "built_1k",
        options,
        chunk_len=chunk_len,
        batch_size=batch_size,
        fairseq_compat=True,
    )
    assert_equal_to_fairseq(scores, shared_golden / "txl" / "div1" / "eval" / case)


# --- our own rule ---


def own(**flags: Any) -> Scores:
    options = {"mem_len": 24, "same_length": True} | flags.pop("options", {})
    flags = {"chunk_len": 8, "num_tokens": 403} | flags
    return score(OWN / "txl" / "checkpoint_last.pt", OWN / "bin", options, **flags)


def test_every_token_is_scored():
    assert not np.isnan(own()).any()


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("batch_size", [4, 10])
def test_scores_do_not_depend_on_the_batch_but_where_a_stream_begins(batch_size, same_length):
    """What the first tokens of a stream lack is memory, of up to layers * memory tokens."""
    alone = own(options={"same_length": same_length, "mem_len": 8})
    together = own(options={"same_length": same_length, "mem_len": 8}, batch_size=batch_size)
    starts = cut_streams(403, num_rows=batch_size, chunk_len=8).bounds[1:-1] * 8
    reach = 2 * (8 + (0 if same_length else 8))
    near = np.zeros(403, dtype=bool)
    for start in starts:
        near[start : start + reach] = True
    np.testing.assert_allclose(together[~near], alone[~near], rtol=0, atol=2e-5)
    assert np.abs(together - alone)[near].max() > 1e-3


@pytest.mark.parametrize(("chunk_len", "batch_size"), [(1, 1), (5, 1), (40, 1), (403, 1)])
def test_with_the_same_length_scores_do_not_depend_on_the_cuts(chunk_len, batch_size):
    np.testing.assert_allclose(own(chunk_len=chunk_len, batch_size=batch_size), own(), rtol=0, atol=2e-5)


def test_a_long_memory_is_one_long_pass():
    whole = {"mem_len": 500, "same_length": False}
    np.testing.assert_allclose(own(options=whole), own(options=whole, chunk_len=403), rtol=0, atol=2e-5)


@pytest.mark.parametrize("batch_size", [1, 10])
def test_an_extended_context_takes_no_part_of_what_is_seen(batch_size):
    """What is left out of a memory as long as the text is read again: each token sees all before it."""
    whole = {"mem_len": 500, "same_length": False}
    expected = own(options=whole, batch_size=batch_size)
    np.testing.assert_allclose(own(options=whole | {"ext_len": 5}, batch_size=batch_size), expected, rtol=0, atol=2e-5)


def test_an_extended_context_instead_of_memory():
    """A memory of 0 and all that was read before is one long pass too."""
    expected = own(options={"mem_len": 500, "same_length": False}, num_tokens=60)
    found = own(options={"mem_len": 0, "same_length": False, "ext_len": 60}, num_tokens=60)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_two_replicas_and_a_split_model_are_one_larger_batch():
    expected = own(batch_size=4)
    for dp, tp in ((2, 1), (2, 2)):
        found, *others = run_ranks(dp * tp, own, batch_size=2, dp=dp, tp=tp)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        assert [len(scores) for scores in others] == [0] * (dp * tp - 1)


def test_a_score_that_is_not_finite_ends_it(monkeypatch):
    def broken(model: TransformerXL, tokens: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.full(targets.shape, math.nan), []

    monkeypatch.setattr(TransformerXL, "forward", broken)
    with pytest.raises(DataError, match=r"test: the log-probability of token 0 \(type \d+\) is nan"):
        own()
