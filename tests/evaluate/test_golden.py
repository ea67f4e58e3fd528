"""Genuine fairseq's evaluations, token by token, at every tensor-parallel size that the heads allow.

Loss within 1e-5 relative, each token's log-probability within 1e-4 (measured: 1e-6 and 4e-6).

What costs here is not arithmetic but processes and, in each, torch's first plan for every kind of operation on split
tensors. So one set of ranks scores all cases of its size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.data.blocks import BreakMode
from lmtools.data.dictionary import Dictionary
from lmtools.evaluate.batches import cut_batches
from lmtools.evaluate.run import score_split
from lmtools.evaluate.scoring import Scores
from lmtools.evaluate.splits import open_split
from lmtools.parallel.mesh import make_mesh
from tests.support.arrays import read_npz
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    """One evaluation that fairseq made.

    Attributes:
        checkpoint: path of the checkpoint.
        evaluation: path of what fairseq recorded, without suffix.
        tp_sizes: every number of ranks that the heads split over.
    """

    checkpoint: str
    evaluation: str
    tp_sizes: tuple[int, ...]
    context_window: int = 0
    break_mode: BreakMode = "none"
    add_bos_token: bool = False


def score(
    case: Case,
    folder: Path,
    data: Path,
    *,
    dp: int = 1,
    tp: int = 1,
    tokens_per_sample: int,
    batch_size: int | None = 8,
    max_tokens: int | None = None,
) -> Scores:
    """The evaluation as `lmtools eval` does it, on one rank of the mesh."""
    mesh = make_mesh(torch.device("cpu"), dp=dp, tp=tp)
    dictionary = Dictionary.load(data / "dict.txt")
    split = open_split(
        data,
        "test",
        dictionary,
        tokens_per_sample=tokens_per_sample,
        context_window=case.context_window,
        break_mode=case.break_mode,
        skip_too_long=True,
    )
    return score_split(
        load_model(open_checkpoint(folder / case.checkpoint), mesh, torch.float32),
        split,
        dictionary,
        mesh,
        bounds=cut_batches(split.windows, batch_size=batch_size, max_tokens=max_tokens),
        add_bos_token=case.add_bos_token,
        journal_path=None,
        identity={},
        resume=False,
        say=pytest.fail,
        progress=lambda num_tokens: None,
    ).log_probs


def score_all(
    cases: Mapping[str, Case], folder: Path, data: Path, *, dp: int = 1, tp: int = 1, tokens_per_sample: int
) -> dict[str, Scores]:
    """Every case on the same ranks, in large batches."""
    return {
        name: score(case, folder, data, dp=dp, tp=tp, tokens_per_sample=tokens_per_sample, batch_size=100)
        for name, case in cases.items()
    }


def fairseqs_scores(evaluation: Path, *, add_bos_token: bool) -> npt.NDArray[np.float32]:
    """fairseq's log-probabilities in stream order; it scores blocks in another one."""
    recorded = read_npz(evaluation.with_suffix(".npz"))
    ends = np.cumsum(recorded["len"])
    # With --add-bos-token fairseq also scores the <s> itself, then leaves it out of the loss.
    starts = ends - recorded["len"] + int(add_bos_token)
    blocks = [recorded["scores"][start:end] for start, end in zip(starts, ends, strict=True)]
    return np.concatenate([blocks[index] for index in np.argsort(recorded["id"], kind="stable")])


def assert_equal_to_fairseq(scores: Scores, case: Case, folder: Path) -> None:
    evaluation = folder / case.evaluation
    expected = fairseqs_scores(evaluation, add_bos_token=case.add_bos_token)
    assert len(scores) == len(expected), case
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4, err_msg=str(case))
    published = json.loads(evaluation.with_suffix(".json").read_text())["loss_base2"]
    loss_base2 = -scores.sum(dtype=np.float64) / len(scores) / np.log(2)
    assert loss_base2 == pytest.approx(published, rel=1e-5), case


OWN = {
    "mp4 noctx": Case("mp4", "mp4/eval/noctx", (1, 2, 4)),
    "mp4 ctx24": Case("mp4", "mp4/eval/ctx24", (1, 2, 4), context_window=24),
    "mp2_2020 ctx24": Case("mp2_2020", "mp2_2020/eval/ctx24", (1, 2, 4), context_window=24),
    "plain noctx": Case("plain/model.pt", "plain/eval/noctx", (1, 2, 4)),
    "plain ctx24": Case("plain/model.pt", "plain/eval/ctx24", (1, 2, 4), context_window=24),
}


@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        (1, 1),
        (1, 2),
        pytest.param(1, 4, marks=pytest.mark.slow),
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_own_models_on_any_mesh(golden: Path, dp, tp):
    """More and fewer ranks than parts, and replicas that do not divide the number of windows."""
    ranks = run_ranks(dp * tp, score_all, OWN, golden, golden / "bin", dp=dp, tp=tp, tokens_per_sample=32)
    for name, scores in ranks[0].items():
        assert_equal_to_fairseq(scores, OWN[name], golden)
    assert all(len(scores) == 0 for rank in ranks[1:] for scores in rank.values()), "rank 0 alone speaks"


@pytest.mark.parametrize("batches", [{"batch_size": 1}, {"batch_size": 3}, {"batch_size": None, "max_tokens": 1000}])
def test_no_score_depends_on_the_batches(golden: Path, batches):
    case = OWN["mp4 ctx24"]
    [scores] = run_ranks(1, score, case, golden, golden / "bin", tokens_per_sample=32, **batches)
    assert_equal_to_fairseq(scores, case, golden)


SHARED = {
    "mp8 noctx": Case("mp8", "mp8/eval/noctx_bs8", (1, 2, 4, 8)),
    "mp8 ctx48": Case("mp8", "mp8/eval/ctx48_bs8", (1, 2, 4, 8), context_window=48),
    "mp8 float16 legacy": Case("mp8/legacy_fp16", "mp8/legacy_fp16/eval/noctx_bs8", (1, 2, 4, 8)),
    "mp2_2020 noctx": Case("mp2_2020", "mp2_2020/eval/code2020_noctx_bs8", (1, 2, 4, 8)),
    "mp2_2020 ctx48": Case("mp2_2020", "mp2_2020/eval/code2020_readme_ctx48_bs8", (1, 2, 4, 8), context_window=48),
    "plain noctx": Case("plain/model.pt", "plain/eval/noctx_bs8", (1, 2, 4)),
    "plain ctx48": Case("plain/model.pt", "plain/eval/ctx48_bs8", (1, 2, 4), context_window=48),
    "plain ctx60": Case("plain/model.pt", "plain/eval/ctx60_bs8", (1,), context_window=60),
    "plain bos": Case("plain/model.pt", "plain/eval/addbos_bs8", (1, 4), add_bos_token=True),
    "plain eos": Case("plain/model.pt", "plain/eval/eos_bs8", (1, 4), break_mode="eos"),
    "plain complete": Case("plain/model.pt", "plain/eval/complete_bs8", (1, 4), break_mode="complete"),
}


@pytest.mark.shared
@pytest.mark.parametrize("tp", [1, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (2, 4, 8))])
def test_wikitext_models(shared_golden: Path, tp):
    cases = {name: case for name, case in SHARED.items() if tp in case.tp_sizes}
    data = shared_golden / "bin" / "built_1k"
    ranks = run_ranks(tp, score_all, cases, shared_golden, data, tp=tp, tokens_per_sample=64, timeout_seconds=200)
    for name, scores in ranks[0].items():
        assert_equal_to_fairseq(scores, SHARED[name], shared_golden)
