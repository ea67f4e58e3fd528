"""Beam search against a search that is written to be read: no cache, one hypothesis read at a time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from lmtools.errors import ConfigError
from lmtools.generate.beam import beam_search, value
from lmtools.generate.decode import Continuation, Limits, continue_prompts
from lmtools.generate.reading import CacheReader
from lmtools.generate.sampling import Sampling
from lmtools.parallel.mesh import make_mesh
from tests.generate.models import ALONE, CPU, EOS, golden_model, limits, slow_log_probs, some_prompts
from tests.support.ranks import run_ranks


def slow_beam_search(model, prompt, bounds: Limits, beam: int, lenpen: float) -> tuple[list[int], float]:
    """Tokens and value of the best hypothesis."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    assert bounds.max_positions is not None
    longest = min(bounds.max_new_tokens, bounds.max_positions - len(prompt) + 1)
    for _ in range(longest):
        extensions = []
        for tokens, total in live:
            log_probs = slow_log_probs(model, [*prompt, *tokens]).tolist()
            extensions += [([*tokens, token], total + log_probs[token]) for token in bounds.allowed]
        extensions.sort(key=lambda extension: -extension[1])
        end = None if bounds.ignore_eos else bounds.eos_index
        ended += [extension for extension in extensions[:beam] if extension[0][-1] == end]
        live = [extension for extension in extensions if extension[0][-1] != end][:beam]
        if len(ended) >= beam:
            live = []
            break
    best = max([*ended, *live], key=lambda one: one[1] / len(one[0]) ** lenpen)
    return best[0], best[1] / len(best[0]) ** lenpen


@pytest.mark.parametrize("name", ["mp4", "txl"])
def test_past_the_end_of_a_sentence(name):
    """No hypothesis ends before the others: an end of sentence is a token like any."""
    model, bounds = golden_model(name), dataclasses.replace(limits(max_new_tokens=7), ignore_eos=True)
    found = beam_search(model, some_prompts(4), ALONE, bounds, beam=2)
    slow = [slow_beam_search(model, prompt, bounds, 2, 1.0) for prompt in some_prompts(4)]
    assert [one.tokens for one in found] == [tokens for tokens, _ in slow]
    assert any(EOS in one.tokens[:-1] for one in found)
    assert {one.stopped_by for one in found} == {"max new tokens"}


@pytest.mark.parametrize("lenpen", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("beam", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mp4", "plain", "txl"])
def test_it_finds_what_the_slow_search_finds(name, beam, lenpen):
    model, bounds = golden_model(name), limits(max_new_tokens=7)
    prompts = some_prompts(4)
    together = beam_search(model, prompts, ALONE, bounds, beam=beam, lenpen=lenpen)
    for prompt, found in zip(prompts, together, strict=True):
        tokens, expected = slow_beam_search(model, prompt, bounds, beam, lenpen)
        assert found.tokens == tokens
        assert value(found, lenpen) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["mp4", "txl, short"])
def test_a_beam_of_all_beginnings_finds_the_best_of_all(name):
    model, prompt = golden_model(name), some_prompts(1)[0]
    bounds = Limits([4, 9, EOS], EOS, 3, 32)
    texts = [(*start, EOS) for length in range(3) for start in itertools.product([4, 9], repeat=length)]
    texts += list(itertools.product([4, 9], repeat=3))
    sums = {}
    for text in texts:
        log_probs = [float(slow_log_probs(model, [*prompt, *text[:n]])[token]) for n, token in enumerate(text)]
        sums[text] = sum(log_probs)
    [found] = beam_search(model, [prompt], ALONE, bounds, beam=27, lenpen=0.0)
    assert tuple(found.tokens) == max(sums, key=sums.__getitem__)


def test_a_beam_of_one_is_greedy():
    model = golden_model("mp4")
    greedy = continue_prompts(model, some_prompts(4), ALONE, limits(), Sampling())
    found = beam_search(model, some_prompts(4), ALONE, limits(), beam=1)
    assert [(one.tokens, one.stopped_by) for one in found] == [(one.tokens, one.stopped_by) for one in greedy]


@pytest.mark.parametrize("name", ["mp4", "plain", "txl"])
def test_what_is_found_does_not_depend_on_the_other_prompts(name):
    """Prompts of any lengths, some of whose searches end long before the others."""
    model, prompts, bounds = golden_model(name), some_prompts(9, longest=24), limits(10)
    alone = [beam_search(model, [prompt], ALONE, bounds, beam=3)[0] for prompt in prompts]
    together = beam_search(model, prompts, ALONE, bounds, beam=3)
    assert len({len(found.tokens) for found in alone}) > 1
    for found, expected in zip(together, alone, strict=True):
        assert (found.tokens, found.stopped_by) == (expected.tokens, expected.stopped_by)
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-12)


def test_a_round_reads_all_hypotheses_of_all_prompts_together(monkeypatch):
    """So that a model that stays in its files is read once for each new token."""
    widths: list[int] = []
    read = CacheReader.read

    def counted(reader, tokens):
        widths.append(len(tokens))
        return read(reader, tokens)

    monkeypatch.setattr(CacheReader, "read", counted)
    bounds = dataclasses.replace(limits(4), ignore_eos=True)
    beam_search(golden_model("mp4"), some_prompts(5), ALONE, bounds, beam=3)
    assert widths == [5, 15, 15, 15]


def test_no_prompt_has_no_continuation():
    assert beam_search(golden_model("mp4"), [], ALONE, limits(), beam=3) == []


def test_a_longer_text_is_favoured_by_a_larger_penalty():
    model = golden_model("plain")
    lengths = [
        sum(
            len(found.tokens) for found in beam_search(model, some_prompts(5), ALONE, limits(10), beam=4, lenpen=lenpen)
        )
        for lenpen in (-2.0, 0.0, 3.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_it_ends_at_the_models_maximum():
    [found] = beam_search(golden_model("mp4"), [[EOS, 5]], ALONE, limits(9, max_positions=3), beam=3, lenpen=5.0)
    assert (len(found.tokens), found.stopped_by) in [(2, "model maximum"), (2, "end of sentence")]


def test_a_prompt_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match=r"^prompt 1: has 33 tokens"):
        beam_search(golden_model("mp4"), [[EOS] * 33], ALONE, limits(), beam=3)


def on_a_mesh(tp: int, name: str) -> list[Continuation]:
    mesh = make_mesh(CPU, dp=1, tp=tp)
    model = golden_model(name, mesh, torch.float32)
    return beam_search(model, some_prompts(3), mesh, limits(10), beam=4)


@pytest.mark.parametrize("name", ["mp4", "txl"])
def test_any_mesh_finds_what_one_device_finds(name):
    expected = on_a_mesh(1, name)
    for of_rank in run_ranks(2, on_a_mesh, 2, name):
        assert [found.tokens for found in of_rank] == [found.tokens for found in expected]
