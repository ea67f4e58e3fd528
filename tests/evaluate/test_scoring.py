"""Every token's log-probability is what the plain model gives for its window alone.

The oracle scores one window at a time on one device and looks the target up in a whole softmax: no batch, no padding,
no split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtools.data.blocks import Offsets, eval_windows, window_input
from lmtools.errors import DataError
from lmtools.evaluate import scoring
from lmtools.evaluate.batches import cut_batches
from lmtools.evaluate.scoring import Scores, make_batch, score_windows
from lmtools.models.architectures import TransformerLMConfig, transformer_lm
from lmtools.models.transformer_lm import TransformerLM, initialize_parameter
from lmtools.parallel.mesh import Mesh, make_mesh
from lmtools.parallel.parallelize import materialize, parallelize, seeded_values, without_memory
from lmtools.parallel.plans import TRANSFORMER_LM
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=CPU, device_mesh=None)
EOS, BOS = 2, 0


def config(vocab_size: int = 37, **options: Any) -> TransformerLMConfig:
    shape = {
        "decoder_layers": 2,
        "decoder_embed_dim": 12,
        "decoder_ffn_embed_dim": 24,
        "decoder_attention_heads": 6,
        "max_target_positions": 16,
        "activation_fn": "gelu",
        "decoder_normalize_before": True,
    }
    return transformer_lm(vocab_size, **(shape | options))


def build(shape: TransformerLMConfig, mesh: Mesh = ALONE, dtype: torch.dtype = torch.float32) -> TransformerLM:
    """A model with values far from 0, so that its scores differ."""

    def large(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        initialize_parameter(name, tensor, generator)
        tensor.add_(torch.empty_like(tensor).normal_(0, 0.3, generator=generator))

    with without_memory():
        model = TransformerLM(shape)
    if mesh.tp_mesh is not None:
        parallelize(model, TRANSFORMER_LM, mesh.tp_mesh)
    materialize(model, seeded_values(model, large, seed=1), device=CPU, dtype=dtype)
    return model.requires_grad_(False).eval()


def stream_of(num_tokens: int, vocab_size: int = 37) -> npt.NDArray[np.uint16]:
    return np.random.default_rng(1).integers(4, vocab_size, num_tokens, dtype=np.uint16)


def one_by_one(model: TransformerLM, stream: npt.NDArray[np.uint16], windows: Offsets, bos: bool = False) -> Scores:
    scores = []
    for context_start, start, end in windows.tolist():
        read = window_input(stream, context_start, end, eos_index=EOS)
        tokens = torch.from_numpy(np.concatenate([[BOS], read]) if bos else read)
        log_probs = model(tokens[None])[0].float().log_softmax(dim=-1)[-(end - start) :]
        scores.append(log_probs[torch.arange(end - start), torch.from_numpy(stream[start:end].astype(np.int64))])
    return torch.cat(scores).numpy()


def score(
    model: TransformerLM,
    stream: npt.NDArray[np.uint16],
    windows: Offsets,
    mesh: Mesh = ALONE,
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    bos: bool = False,
    first_round: int = 0,
) -> Scores:
    pieces: list[Scores] = []
    score_windows(
        model,
        stream,
        windows,
        mesh,
        bounds=cut_batches(windows, batch_size=batch_size, max_tokens=max_tokens),
        eos_index=EOS,
        bos_index=BOS if bos else None,
        first_round=first_round,
        on_round=pieces.append,
    )
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float32)


def assert_same(found: Scores, expected: Scores) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


MODELS = {
    "pre-norm": config(),
    "post-norm, tied": config(decoder_normalize_before=False, share_decoder_input_output_embed=True),
    "learned positions": config(decoder_learned_pos=True, max_target_positions=17),
}


@settings(max_examples=30)
@given(
    shape=st.sampled_from(sorted(MODELS)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    tokens_per_sample=st.integers(1, 16),
    break_mode=st.sampled_from(["none", "complete", "eos"]),
    bos=st.booleans(),
    data=st.data(),
)
def test_windows_of_any_lengths_in_any_batches(shape, sizes, tokens_per_sample, break_mode, bos, data):
    """Contexts of different lengths, short last blocks, single sentences: the padding of one changes no other."""
    model = build(MODELS[shape])
    stream = stream_of(sum(sizes))
    context_window = data.draw(st.integers(0, tokens_per_sample - 1))
    windows = eval_windows(
        np.array(sizes), tokens_per_sample=tokens_per_sample, context_window=context_window, break_mode=break_mode
    )
    windows = windows[windows[:, 2] - windows[:, 0] <= 16]
    batches = data.draw(
        st.fixed_dictionaries({"batch_size": st.none() | st.integers(1, 20), "max_tokens": st.none() | st.just(40)})
    )
    expected = one_by_one(model, stream, windows, bos) if len(windows) else np.empty(0)
    assert_same(score(model, stream, windows, bos=bos, **batches), expected)


def test_a_batch_computes_no_more_than_it_must() -> None:
    windows = np.array([[4, 8, 10], [6, 10, 12]])
    batch = make_batch(stream_of(12), windows, eos_index=EOS)
    assert (batch.tokens.shape, batch.score_from) == ((2, 6), 4)
    assert len(batch.scored) == 4, "all of what is left is scored, and need not be picked"


@pytest.mark.parametrize("limit", ["LOGITS_BYTES", "CPU_ACTIVATION_BYTES"])
@pytest.mark.parametrize("num_bytes", [1, 4 * 37 * 3, 24 * 4 * 16 * 2])
def test_no_score_depends_on_how_little_memory_it_takes(monkeypatch, limit, num_bytes):
    model, stream = build(MODELS["pre-norm"]), stream_of(50)
    windows = eval_windows(np.array([50]), tokens_per_sample=16, context_window=5, break_mode="none")
    expected = score(model, stream, windows)
    monkeypatch.setattr(scoring, limit, num_bytes)
    assert_same(score(model, stream, windows), expected)


def test_a_run_that_goes_on_makes_the_batches_that_it_would_have_made() -> None:
    """Bit for bit."""
    model, stream = build(MODELS["pre-norm"]), stream_of(100)
    windows = eval_windows(np.array([100]), tokens_per_sample=16, context_window=9, break_mode="none")
    whole = score(model, stream, windows, batch_size=4)
    assert score(model, stream, windows, batch_size=4, first_round=2).tolist() == whole[2 * 4 * 7 :].tolist()
    assert len(score(model, stream, windows, batch_size=4, first_round=4)) == 0


def test_half_precision_scores_are_of_a_softmax_in_float32() -> None:
    model, stream = build(MODELS["pre-norm"], dtype=torch.bfloat16), stream_of(40)
    windows = eval_windows(np.array([40]), tokens_per_sample=16, context_window=0, break_mode="none")
    scores = score(model, stream, windows, batch_size=1)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, one_by_one(model, stream, windows), rtol=0, atol=0.05)
    assert len(set(scores.tolist())) > 35, "not rounded to bfloat16"


def on_a_mesh(dp: int, tp: int, vocab_size: int, dtype: torch.dtype, num_tokens: int, batch_size: int) -> Scores:
    mesh = make_mesh(CPU, dp=dp, tp=tp)
    model, stream = build(config(vocab_size), mesh, dtype), stream_of(num_tokens, vocab_size)
    windows = eval_windows(np.array([num_tokens]), tokens_per_sample=16, context_window=5, break_mode="none")
    return score(model, stream, windows, mesh, batch_size=batch_size)


def on_meshes(dp: int, tp: int, cases: list[tuple[int, torch.dtype, int, int]]) -> list[Scores]:
    return [on_a_mesh(dp, tp, *case) for case in cases]


@pytest.mark.parametrize(
    ("dp", "tp"), [pytest.param(1, 3, marks=pytest.mark.slow), (4, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_any_mesh_gives_the_scores_of_one_device(dp, tp):
    """Vocabularies that the ranks do not divide; fewer windows than replicas; a last round that is not full."""
    exact, half = torch.float32, torch.bfloat16
    cases = [(37, exact, 50, 1), (37, exact, 50, 3), (10, exact, 20, 1), (64, exact, 9, 8), (37, half, 50, 2)]
    ranks = run_ranks(dp * tp, on_meshes, dp, tp, cases)
    for case, scores in zip(cases, ranks[0], strict=True):
        alone = on_a_mesh(1, 1, *case)
        np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=0.08 if case[1] is half else 2e-6, err_msg=str(case))
    assert all(len(scores) == 0 for rank in ranks[1:] for scores in rank)


# --- a score that is no number ---


def poisoned(dp: int, tp: int) -> str:
    """A model whose every score after the one type is nan."""
    mesh = make_mesh(CPU, dp=dp, tp=tp) if dp * tp > 1 else ALONE
    model, stream = build(config(64), mesh), stream_of(60, 64)
    stream[stream == 9] = 8
    stream[45] = 9
    windows = eval_windows(np.array([60]), tokens_per_sample=8, context_window=4, break_mode="none")
    weight = model.embed_tokens.weight
    weight = weight.to_local() if tp > 1 else weight
    if mesh.tp_rank == 0:
        weight[9] = torch.nan
    with pytest.raises(DataError) as caught:
        score(model, stream, windows, mesh, batch_size=2)
    return str(caught.value)


def test_it_is_named_by_block_and_token() -> None:
    """Token 45 is read in the window of tokens 44 to 47, all of which it spoils: attention adds 0 times nan."""
    message = poisoned(1, 1)
    assert message == (
        f"block 11 (tokens 44 to 47): the log-probability of token 44 (type {stream_of(60, 64)[44]}) is nan, expected "
        "a finite number; 4 of 8 in this round are not finite. Try --dtype float32, and check the checkpoint"
    )


def test_every_rank_names_the_same_token() -> None:
    messages = run_ranks(4, poisoned, 2, 2)
    assert len(set(messages)) == 1
    assert messages[0].startswith("block 11 (tokens 44 to 47): the log-probability of token 44 ")
