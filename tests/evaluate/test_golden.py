"""Genuine fairseq's evaluations, token by token, at every tensor-parallel size that the heads allow.

Loss within 1e-5 relative, each token's log-probability within 1e-4 (measured: 1e-6 and 4e-6).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.run import score_split
from lmtools.evaluate.scoring import Scores
from lmtools.evaluate.splits import open_split
from lmtools.parallel.mesh import make_mesh
from tests.support.ranks import run_ranks


def score(
    checkpoint: Path,
    data: Path,
    *,
    dp: int = 1,
    tp: int = 1,
    tokens_per_sample: int,
    context_window: int = 0,
    break_mode: Any = "none",
    add_bos_token: bool = False,
    batch_size: int = 8,
) -> Scores:
    """The evaluation as `lmtools eval` does it, on one rank of the mesh."""
    mesh = make_mesh(torch.device("cpu"), dp=dp, tp=tp)
    dictionary = Dictionary.load(data / "dict.txt")
    split = open_split(
        data,
        "test",
        dictionary,
        tokens_per_sample=tokens_per_sample,
        context_window=context_window,
        break_mode=break_mode,
        skip_too_long=True,
    )
    return score_split(
        load_model(open_checkpoint(checkpoint), mesh, torch.float32),
        split,
        dictionary,
        mesh,
        batch_size=batch_size,
        add_bos_token=add_bos_token,
        journal_path=None,
        identity={},
        resume=False,
        progress=lambda num_tokens: None,
    )


def fairseqs_scores(evaluation: Path, *, add_bos_token: bool = False) -> npt.NDArray[np.float32]:
    """fairseq's log-probabilities in stream order; it scores blocks in another one."""
    recorded = np.load(evaluation.with_suffix(".npz"))
    ends = np.cumsum(recorded["len"])
    # With --add-bos-token fairseq also scores the <s> itself, then leaves it out of the loss.
    starts = ends - recorded["len"] + int(add_bos_token)
    blocks = [recorded["scores"][start:end] for start, end in zip(starts, ends, strict=True)]
    return np.concatenate([blocks[index] for index in np.argsort(recorded["id"], kind="stable")])


def assert_equal_to_fairseq(scores: Scores, evaluation: Path, *, add_bos_token: bool = False) -> None:
    expected = fairseqs_scores(evaluation, add_bos_token=add_bos_token)
    assert len(scores) == len(expected)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)
    published = json.loads(evaluation.with_suffix(".json").read_text())["loss_base2"]
    loss_base2 = -scores.sum(dtype=np.float64) / len(scores) / np.log(2)
    assert loss_base2 == pytest.approx(published, rel=1e-5)


OWN = {
    "mp4 noctx": ("mp4", "mp4/eval/noctx", 0),
    "mp4 ctx24": ("mp4", "mp4/eval/ctx24", 24),
    "mp2_2020 ctx24": ("mp2_2020", "mp2_2020/eval/ctx24", 24),
    "plain noctx": ("plain/model.pt", "plain/eval/noctx", 0),
    "plain ctx24": ("plain/model.pt", "plain/eval/ctx24", 24),
}


@pytest.mark.parametrize("case", OWN)
def test_own_models_on_one_rank(golden: Path, case):
    checkpoint, evaluation, context_window = OWN[case]
    scores = score(golden / checkpoint, golden / "bin", tokens_per_sample=32, context_window=context_window)
    assert_equal_to_fairseq(scores, golden / evaluation)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 4), (2, 1), (3, 1), (2, 2)])
def test_own_models_on_any_mesh(golden: Path, dp, tp):
    """More and fewer ranks than parts, and replicas that do not divide the number of windows."""
    for case in ("mp4 ctx24", "mp2_2020 ctx24"):
        checkpoint, evaluation, context_window = OWN[case]
        ranks = run_ranks(
            dp * tp,
            score,
            golden / checkpoint,
            golden / "bin",
            dp=dp,
            tp=tp,
            tokens_per_sample=32,
            context_window=context_window,
            batch_size=100,
        )
        assert_equal_to_fairseq(ranks[0], golden / evaluation)
        assert all(len(scores) == 0 for scores in ranks[1:]), "rank 0 alone speaks"


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_no_score_depends_on_the_batch_size(golden: Path, batch_size):
    scores = score(golden / "mp4", golden / "bin", tokens_per_sample=32, context_window=24, batch_size=batch_size)
    assert_equal_to_fairseq(scores, golden / "mp4" / "eval" / "ctx24")


SHARED: dict[str, tuple[str, str, list[int], dict[str, Any]]] = {
    # checkpoint, evaluation, every number of ranks that its heads split over, options
    "mp8 noctx": ("mp8", "mp8/eval/noctx_bs8", [1, 2, 4, 8], {}),
    "mp8 ctx48": ("mp8", "mp8/eval/ctx48_bs8", [1, 2, 4, 8], {"context_window": 48}),
    "mp8 float16 legacy": ("mp8/legacy_fp16", "mp8/legacy_fp16/eval/noctx_bs8", [1, 2, 4, 8], {}),
    "mp2_2020 noctx": ("mp2_2020", "mp2_2020/eval/code2020_noctx_bs8", [1, 2, 4, 8], {}),
    "mp2_2020 ctx48": (
        "mp2_2020",
        "mp2_2020/eval/code2020_readme_ctx48_bs8",
        [1, 2, 4, 8],
        {"context_window": 48},
    ),
    "plain noctx": ("plain/model.pt", "plain/eval/noctx_bs8", [1, 2, 4], {}),
    "plain ctx48": ("plain/model.pt", "plain/eval/ctx48_bs8", [1, 2, 4], {"context_window": 48}),
    "plain ctx60": ("plain/model.pt", "plain/eval/ctx60_bs8", [1], {"context_window": 60}),
    "plain bos": ("plain/model.pt", "plain/eval/addbos_bs8", [1, 4], {"add_bos_token": True}),
    "plain eos": ("plain/model.pt", "plain/eval/eos_bs8", [1, 4], {"break_mode": "eos"}),
    "plain complete": ("plain/model.pt", "plain/eval/complete_bs8", [1, 4], {"break_mode": "complete"}),
}


@pytest.mark.shared
@pytest.mark.parametrize(("case", "tp"), [(case, tp) for case in SHARED for tp in SHARED[case][2]])
def test_wikitext_models(shared_golden: Path, case, tp):
    checkpoint, evaluation, _, options = SHARED[case]
    arguments = (shared_golden / checkpoint, shared_golden / "bin" / "built_1k")
    # Large batches keep this short: what costs here is the number of collectives, not the arithmetic.
    ranks = run_ranks(tp, score, *arguments, tp=tp, tokens_per_sample=64, batch_size=128, **options)
    assert_equal_to_fairseq(ranks[0], shared_golden / evaluation, add_bos_token=bool(options.get("add_bos_token")))
