"""Continuations are those of reading everything again for every token, one prompt at a time, on one device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lmtools.errors import ConfigError, DataError
from lmtools.generate.decode import Continuation, Limits, continue_prompts
from lmtools.generate.sampling import Sampling, choose
from lmtools.parallel.mesh import make_mesh
from tests.generate.models import ALLOWED, ALONE, CPU, EOS, MEMORIES, golden_model, limits, slow_log_probs, some_prompts
from tests.support.ranks import run_ranks

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(1.5, seed=3),
    "top-k": Sampling(1.0, top_k=5, seed=4),
    "top-p": Sampling(1.0, top_p=0.8, seed=5),
}


def slowly(model, prompt, bounds: Limits, sampling: Sampling, number: int) -> Continuation:
    found = Continuation()
    while found.stopped_by is None:
        tokens = [*prompt, *found.tokens]
        log_probs = slow_log_probs(model, tokens)
        only_allowed = torch.full_like(log_probs, -torch.inf)
        only_allowed[list(bounds.allowed)] = log_probs[list(bounds.allowed)]
        [token] = choose(only_allowed[None], sampling, [(number, len(tokens))]).tolist()
        found.tokens.append(token)
        found.log_probs.append(float(log_probs[token]))
        if token == bounds.eos_index and not bounds.ignore_eos:
            found.stopped_by = "end of sentence"
        elif len(found.tokens) == bounds.max_new_tokens:
            found.stopped_by = "max new tokens"
        elif len(tokens) == bounds.max_positions:
            found.stopped_by = "model maximum"
    return found


def assert_same(found: list[Continuation], expected: list[Continuation], tolerance: float = 1e-10) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.stopped_by for one in found] == [one.stopped_by for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=tolerance)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["mp4", pytest.param("txl", marks=pytest.mark.slow)])
def test_past_the_end_of_a_sentence(name, sampling):
    """Which the models come to: as far as there is room, on the tokens that go before."""
    model, prompts, bounds = golden_model(name), some_prompts(5), limits(max_new_tokens=12)
    bounds = dataclasses.replace(bounds, ignore_eos=True)
    expected = [slowly(model, prompt, bounds, SAMPLINGS[sampling], number) for number, prompt in enumerate(prompts)]
    assert any(EOS in continuation.tokens[:-1] for continuation in expected)
    assert {continuation.stopped_by for continuation in expected} == {"max new tokens"}
    assert_same(continue_prompts(model, prompts, ALONE, bounds, SAMPLINGS[sampling]), expected)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["mp4", "plain", "mp2_2020", "txl"])
def test_with_a_cache_and_in_a_batch_as_without_and_one_by_one(name, sampling):
    """Prompts of 1 to 12 tokens, which end at different times."""
    model, prompts, bounds = golden_model(name), some_prompts(9), limits(max_new_tokens=12)
    expected = [slowly(model, prompt, bounds, SAMPLINGS[sampling], number) for number, prompt in enumerate(prompts)]
    assert len({len(continuation.tokens) for continuation in expected}) > 1
    assert_same(continue_prompts(model, prompts, ALONE, bounds, SAMPLINGS[sampling]), expected)
    for number, prompt in enumerate(prompts):
        alone = continue_prompts(model, [prompt], ALONE, bounds, SAMPLINGS[sampling], first_number=number)
        assert_same(alone, [expected[number]])


@pytest.mark.parametrize("name", [name for name in MEMORIES if name != "txl"])
def test_more_or_less_memory(name):
    model, prompts, bounds = golden_model(name), some_prompts(6), limits(max_new_tokens=8)
    expected = [slowly(model, prompt, bounds, Sampling(1.2), number) for number, prompt in enumerate(prompts)]
    assert_same(continue_prompts(model, prompts, ALONE, bounds, Sampling(1.2)), expected)


def test_a_memory_has_no_maximum():
    model, prompt = golden_model("txl"), [EOS, *range(4, 50)]
    [found] = continue_prompts(model, [prompt], ALONE, Limits([4, 9], EOS, 20, None), Sampling())
    assert_same([found], [slowly(model, prompt, Limits([4, 9], EOS, 20, None), Sampling(), 0)])
    assert (len(found.tokens), found.stopped_by) == (20, "max new tokens")


def on_a_mesh(tp: int, name: str) -> list[list[Continuation]]:
    mesh = make_mesh(CPU, dp=1, tp=tp)
    model = golden_model(name, mesh, torch.float32)
    return [continue_prompts(model, some_prompts(6), mesh, limits(12), sampling) for sampling in SAMPLINGS.values()]


@pytest.mark.parametrize(
    ("name", "tp"),
    [pytest.param("mp4", 2, marks=pytest.mark.slow), pytest.param("mp4", 4, marks=pytest.mark.slow), ("txl", 2)],
)
def test_any_mesh_continues_as_one_device_does(name, tp):
    """Heads and vocabulary are split; every rank has the same text."""
    expected = on_a_mesh(1, name)
    for of_rank in run_ranks(tp, on_a_mesh, tp, name):
        for found, alone in zip(of_rank, expected, strict=True):
            assert_same(found, alone, tolerance=1e-4)


def test_a_seed_gives_other_text_and_the_same_again():
    model, prompts = golden_model("mp4"), some_prompts(4)
    texts = [
        [found.tokens for found in continue_prompts(model, prompts, ALONE, limits(), Sampling(1.0, seed=seed))]
        for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_why_a_continuation_ends():
    model, prompt = golden_model("mp4"), [EOS, 17, 18]
    [found] = continue_prompts(model, [prompt], ALONE, limits(max_new_tokens=3), Sampling())
    assert (len(found.tokens), found.stopped_by) == (3, "max new tokens")
    second = found.tokens[1]
    [ended] = continue_prompts(model, [prompt], ALONE, limits(max_new_tokens=3, eos_index=second), Sampling())
    assert (ended.tokens, ended.stopped_by) == (found.tokens[:2], "end of sentence")
    [full] = continue_prompts(model, [prompt], ALONE, limits(max_new_tokens=9, max_positions=4), Sampling())
    assert (full.tokens, full.stopped_by) == (found.tokens[:2], "model maximum"), "the last one is not read"


def test_only_allowed_tokens_come():
    model, prompts = golden_model("mp4"), some_prompts(5)
    bounds = Limits([20, 30, 40], EOS, 6, 32)
    for sampling in SAMPLINGS.values():
        for found in continue_prompts(model, prompts, ALONE, bounds, sampling):
            assert set(found.tokens) <= {20, 30, 40}
            assert found.stopped_by == "max new tokens"


def test_tokens_are_told_as_they_come():
    model, prompts = golden_model("mp4"), some_prompts(4)
    told: list[tuple[int, int]] = []
    found = continue_prompts(
        model, prompts, ALONE, limits(), Sampling(), first_number=3, on_token=lambda *new: told.append(new)
    )
    for number, continuation in enumerate(found, start=3):
        assert [token for of, token in told if of == number] == continuation.tokens


def test_no_prompt_no_continuation():
    assert continue_prompts(golden_model("mp4"), [], ALONE, limits(), Sampling()) == []


@pytest.mark.parametrize(("prompt", "length"), [([], 0), ([EOS] * 33, 33)])
def test_a_prompt_that_cannot_be_read_is_refused(prompt, length):
    with pytest.raises(ConfigError, match=rf"^prompt 2: has {length} tokens, expected 1 to 32"):
        continue_prompts(golden_model("mp4"), [[EOS], prompt], ALONE, limits(), Sampling())


def test_a_prompt_as_long_as_the_model_has_one_continuation_left():
    [found] = continue_prompts(golden_model("mp4"), [[EOS, *ALLOWED[2:33]]], ALONE, limits(), Sampling())
    assert len(found.tokens) == 1


def test_a_probability_that_is_no_number_is_named():
    model = golden_model("mp4")
    model.embed_tokens.weight[9] = torch.nan
    with pytest.raises(DataError, match=r"^prompt 1: the log-probability of new token 1 is nan"):
        continue_prompts(model, [[EOS, 9]], ALONE, limits(), Sampling())
