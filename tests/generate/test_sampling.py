"""The next token: what is cut, what is drawn how often, and what a draw depends on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmtools.generate.sampling import Sampling, choose, cut_tail, draw, uniform

LOG_PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64).log()[None]


def kept(top_k: int = 0, top_p: float = 1.0, log_probs: torch.Tensor = LOG_PROBS) -> list[int]:
    return cut_tail(log_probs, top_k, top_p)[0].isfinite().nonzero().flatten().tolist()


def test_greedy_takes_the_most_probable_and_the_first_of_equals():
    assert choose(LOG_PROBS, Sampling(), [(0, 0)]).tolist() == [1]
    assert choose(torch.zeros(1, 3), Sampling(), [(0, 0)]).tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-310, 1e-5, 1e300])
def test_any_temperature_draws_a_token(temperature):
    drawn = choose(LOG_PROBS, Sampling(temperature), [(0, 0)]).tolist()
    assert drawn == [1] if temperature < 1 else drawn[0] in range(5)


def test_what_is_no_number_is_a_token_too():
    """So that it can be looked up, and refused with its place."""
    nothing = torch.full((1, 5), torch.nan)
    assert choose(nothing, Sampling(1.0, top_p=0.9), [(0, 0)]).item() in range(5)


def test_top_k():
    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [1, 3, 4]
    assert kept(top_k=9) == kept(top_k=0) == [0, 1, 2, 3, 4]
    assert kept(top_k=2, log_probs=torch.zeros(1, 4)) == [0, 1]


def test_top_p_keeps_the_fewest_that_have_it():
    assert kept(top_p=0.01) == [1]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=0.84) == [1, 3, 4]
    assert kept(top_p=0.86) == [0, 1, 3, 4]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4]


def test_top_p_is_of_what_top_k_leaves():
    """Of [0.4, 0.25, 0.2] / 0.85 the first two have 0.76."""
    assert kept(top_k=3, top_p=0.75) == [1, 3]
    assert kept(top_k=3, top_p=0.77) == [1, 3, 4]


WEIGHTS = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=9).filter(any)


@pytest.mark.parametrize("weights", [[5e-324], [0.0, 5e-324, 0.0], [5e-324, 5e-324]])
def test_a_draw_is_a_token_however_small_the_weights(weights):
    [index] = draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([0.75], dtype=torch.float64)).tolist()
    assert weights[index] > 0


@given(WEIGHTS, st.floats(0, 1, exclude_max=True, allow_subnormal=False))
def test_a_draw_is_where_the_sum_passes_the_share(weights, number):
    [index] = draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([number], dtype=torch.float64)).tolist()
    assert weights[index] > 0
    total = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    assert total[index] > number * total[-1]
    assert index == 0 or total[index - 1] <= number * total[-1]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_come_as_often_as_their_probability(temperature):
    num_draws = 4000
    places = [(prompt, 7) for prompt in range(num_draws)]
    chosen = choose(LOG_PROBS.expand(num_draws, -1), Sampling(temperature, seed=5), places)
    expected = (LOG_PROBS[0] / temperature).softmax(0)
    found = chosen.bincount(minlength=5) / num_draws
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / num_draws).sqrt()).all()


def test_a_draw_depends_on_seed_prompt_and_position_alone():
    numbers = {uniform(seed, prompt, position) for seed in range(5) for prompt in range(5) for position in range(5)}
    assert len(numbers) == 125
    assert all(0 <= number < 1 for number in numbers)
    rows = LOG_PROBS.expand(8, -1)
    places = [(prompt, 3) for prompt in range(8)]
    together = choose(rows, Sampling(1.0), places).tolist()
    one_by_one = [choose(LOG_PROBS, Sampling(1.0), [place]).tolist()[0] for place in places]
    assert together == one_by_one
    assert len(set(together)) > 1


def test_what_is_forbidden_is_never_drawn():
    banned = LOG_PROBS.clone()
    banned[0, [1, 3]] = -torch.inf
    places = [(prompt, 0) for prompt in range(200)]
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=4), Sampling(3.0, top_p=0.99)):
        assert set(choose(banned.expand(200, -1), sampling, places).tolist()) <= {0, 2, 4}
