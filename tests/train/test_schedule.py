"""The four schedules are fairseq's, but for the warm-up's first step, and defined for every update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import ConfigError
from lmtools.train.config import TrainConfig
from lmtools.train.schedule import cosine, learning_rate

SCHEDULES = ["inverse_sqrt", "cosine", "polynomial_decay", "fixed"]

# What fairseq 0.12's schedulers return from `step_update(n)` after `step_begin_epoch(1)`.
FAIRSEQ: list[tuple[dict[str, Any], dict[int, float]]] = [
    (
        {"lr_scheduler": "inverse_sqrt", "lr": 0.002, "warmup_updates": 4},
        {1: 0.0005, 3: 0.0015, 4: 0.002, 5: 0.0017888543819998318, 10: 0.0012649110640673518, 100: 0.0004},
    ),
    (
        {"lr_scheduler": "inverse_sqrt", "lr": 0.002, "warmup_updates": 4, "warmup_init_lr": 0.001},
        {1: 0.00125, 3: 0.00175, 4: 0.002, 5: 0.0017888543819998318, 121: 0.00036363636363636367},
    ),
    (
        {"lr_scheduler": "cosine", "lr": 0.01, "min_lr": 0.001, "warmup_updates": 10, "max_update": 100},
        {1: 0.0019000000000000002, 9: 0.0091, 10: 0.01, 20: 0.00972861679353659, 40: 0.00775, 99: 0.001002741278414069},
    ),
    (
        {"lr_scheduler": "cosine", "lr": 0.01, "min_lr": 0.001, "lr_period_updates": 10, "lr_shrink": 0.5},
        {1: 0.009779754323328192, 9: 0.001220245676671809, 10: 0.005, 29: 0.00030506141916795227, 50: 0.0003125},
    ),
    (
        {
            "lr_scheduler": "cosine",
            "lr": 0.01,
            "min_lr": 0.001,
            "lr_period_updates": 10,
            "lr_shrink": 0.5,
            "t_mult": 3.0,
        },
        {9: 0.001220245676671809, 10: 0.005, 39: 0.0005123257354213848, 40: 0.0025, 121: 0.00030506141916795227},
    ),
    (
        {
            "lr_scheduler": "polynomial_decay",
            "lr": 0.01,
            "warmup_updates": 10,
            "end_learning_rate": 0.0005,
            "power": 2.0,
            "total_num_update": 100,
        },
        {1: 0.001, 9: 0.009, 10: 0.01, 20: 0.008006172839506172, 50: 0.003432098765432099, 99: 0.0005011728395061728}
        | {100: 0.0005, 121: 0.0005},
    ),
]


@pytest.mark.parametrize(("options", "rates"), FAIRSEQ)
def test_after_the_warm_up_update_k_has_fairseqs_rate_at_k_minus_1(options, rates):
    config = TrainConfig(**options)
    for n, rate in rates.items():
        if n >= config.warmup_updates:
            assert learning_rate(n + 1, config) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("options", "rates"), FAIRSEQ)
def test_in_the_warm_up_update_k_has_fairseqs_rate_at_k(options, rates):
    config = TrainConfig(**options)
    for n, rate in rates.items():
        if 1 <= n <= config.warmup_updates:
            assert learning_rate(n, config) == pytest.approx(rate, rel=1e-12)


def test_the_fixed_rate_is_fairseqs_from_the_first_update():
    config = TrainConfig(lr_scheduler="fixed", lr=0.01, warmup_updates=10, force_anneal=3)
    fairseq = {0: 0.001, 1: 0.002, 3: 0.004, 9: 0.01, 10: 0.01, 121: 0.01}
    assert {n: learning_rate(n + 1, config) for n in fairseq} == pytest.approx(fairseq, rel=1e-12)
    fairseq_at_40 = {1: 0.01, 2: 0.01, 3: 0.001, 5: 1e-05}
    assert {epoch: learning_rate(41, config, epoch=epoch) for epoch in fairseq_at_40} == pytest.approx(fairseq_at_40)


RECORDED: dict[str, dict[str, Any]] = {
    "plain": {"lr_scheduler": "inverse_sqrt", "lr": 0.005, "warmup_updates": 20},
    "mp4": {"lr_scheduler": "inverse_sqrt", "lr": 0.005, "warmup_updates": 20},
    "txl": {"lr_scheduler": "cosine", "lr": 0.01, "max_update": 900},
}


@pytest.mark.parametrize("run", RECORDED)
def test_recorded_runs_of_fairseq_had_these_rates(golden: Path, run):
    rows = [json.loads(line) for line in (golden / run / "updates.rank0.jsonl").read_text().splitlines()]
    config = TrainConfig(**RECORDED[run])
    first = config.warmup_updates + 1
    ours = [learning_rate(update, config) for update in range(first, len(rows) + 1)]
    assert ours == pytest.approx([row["lr_used"] for row in rows[first - 1 :]], rel=1e-9)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 10**7),
    st.integers(0, 200),
    st.integers(1, 200),
    st.floats(1e-6, 10),
    st.floats(0, 12),
    st.sampled_from([-1.0, 0.0, 1e-7]),
    st.sampled_from([-1.0, 1.0, 7.5, 100.0]),
    st.sampled_from([1.0, 1.0000001, 1.5, 3.0]),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_every_update_has_a_rate(
    schedule, update, warmup_updates, end, lr, low, warmup_init_lr, period, t_mult, lr_shrink, power
):
    """Also with no warm-up, one as long as the run or longer, and past the end of the run."""
    config = TrainConfig(
        lr_scheduler=schedule,
        lr=lr,
        warmup_updates=warmup_updates,
        warmup_init_lr=warmup_init_lr,
        max_update=end,
        min_lr=low,
        end_learning_rate=low,
        lr_period_updates=period,
        t_mult=t_mult,
        lr_shrink=lr_shrink,
        power=power,
    )
    rate = learning_rate(update, config)
    assert 0 <= rate <= max(lr, low, warmup_init_lr) * (1 + 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_updates", [0, 1, 5, 20, 30])
def test_no_update_of_a_run_is_made_with_rate_0(schedule, warmup_updates):
    config = TrainConfig(lr_scheduler=schedule, lr=0.1, warmup_updates=warmup_updates, max_update=20)
    rates = [learning_rate(update, config) for update in range(1, 21)]
    assert min(rates) > 0
    if warmup_updates <= 20:
        assert max(rates) == pytest.approx(0.1)


def test_without_a_warm_up_inverse_sqrt_falls_from_the_first_update():
    config = TrainConfig(lr_scheduler="inverse_sqrt", lr=1.0, warmup_updates=0)
    assert [learning_rate(update, config) for update in (1, 2, 5, 101)] == pytest.approx([1, 1, 1 / 2, 1 / 10])


def test_past_the_end_of_the_run_the_cosine_stays_low_and_an_explicit_period_starts_again():
    run = TrainConfig(lr_scheduler="cosine", lr=1.0, min_lr=0.1, max_update=100, warmup_updates=10)
    assert [learning_rate(update, run) for update in (101, 1000)] == [0.1, 0.1]
    periods = TrainConfig(lr_scheduler="cosine", lr=1.0, min_lr=0.1, lr_period_updates=90, warmup_updates=10)
    assert learning_rate(101, periods) == pytest.approx(0.1), "the peak of the second period: lr * lr_shrink"


def test_a_warm_up_as_long_as_the_run_reaches_the_peak_and_then_the_end():
    for schedule in ("cosine", "polynomial_decay"):
        config = TrainConfig(lr_scheduler=schedule, lr=1.0, max_update=10, warmup_updates=10)
        assert [learning_rate(update, config) for update in (5, 10, 11)] == [0.5, 1.0, 0.0]


@given(st.integers(0, 9), st.sampled_from([2.0, 3.0, 5.0, 7.0]), st.integers(1, 10))
def test_a_period_starts_when_the_last_one_is_over(index, t_mult, period):
    """fairseq takes the floor of a logarithm, which is a little too low for 3, 5 or 7: it starts one update late."""
    start = round(period * (t_mult**index - 1) / (t_mult - 1))
    assert cosine(start, 1.0, 0.0, period=period, t_mult=t_mult, lr_shrink=0.5) == pytest.approx(0.5**index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "--lr -1.0"),
        ({"lr": math.nan}, "--lr nan"),
        ({"warmup_updates": -1}, "--warmup-updates -1"),
        ({"t_mult": 0.5}, "--t-mult 0.5"),
        ({"lr_shrink": 2.0}, "--lr-shrink 2.0"),
        ({"lr_scheduler": "cosine"}, "--lr-period-updates or --max-update"),
        ({"lr_scheduler": "polynomial_decay"}, "--total-num-update or --max-update"),
        ({"lr_scheduler": "polynomial_decay", "max_update": 10, "force_anneal": 3}, "--force-anneal"),
    ],
)
def test_fields_that_make_no_schedule_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        learning_rate(1, TrainConfig(**options))
