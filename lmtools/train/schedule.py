"""The learning rate of an update: pure functions of its number, so that nothing has to be saved or replayed.

Updates count from 1, and `learning_rate(k)` is the rate that update k is made with. The four schedules are fairseq's
(optim/lr_scheduler/*.py). fairseq sets the rate of update k from its formula at n = k - 1, and so does lmtools once the
warm-up is over. The warm-up alone is a step ahead: it is at `update / warmup_updates` of its way, where fairseq makes
the first update at the start of the way, which is a rate of 0 by default and learns nothing.

    update        1     2    ...    W     W + 1   W + 2  ...
    fairseq       0    1/W   ...  W-1/W     1     decay(W + 1)
    lmtools      1/W   2/W   ...    1       1     decay(W + 1)
"""

from __future__ import annotations

import math

from lmtools.errors import ConfigError
from lmtools.train.config import TrainConfig


def learning_rate(update: int, config: TrainConfig, *, epoch: int = 1) -> float:
    """The rate of an update, never negative and defined for every update from 1 on.

    Args:
        update: number of the update, from 1; it may lie past the end of the run.
        config: `lr_scheduler`, `lr`, `warmup_updates` and the schedule's own fields.
        epoch: the update's epoch, from 1; only `fixed` with `force_anneal` looks at it.

    Raises:
        ConfigError: the fields make no schedule. Any update shows all of these: ask for the first one's rate before a
            worker starts.
    """
    if update < 1:
        raise ValueError(f"update {update}: updates count from 1")
    _require_schedule(config)
    lr, warmup_updates = config.lr, config.warmup_updates
    min_lr = min(config.min_lr, lr)
    if config.lr_scheduler == "fixed":
        lr = fixed(epoch, lr, config.force_anneal, config.lr_shrink)
    if update <= warmup_updates:
        start = config.warmup_init_lr
        if start < 0:
            start = min_lr if config.lr_scheduler == "cosine" else 0.0
        return start + (lr - start) * update / warmup_updates

    n = update - 1
    match config.lr_scheduler:
        case "inverse_sqrt":
            return inverse_sqrt(n, lr, warmup_updates)
        case "cosine" if config.lr_period_updates > 0:
            period, t_mult, lr_shrink = config.lr_period_updates, config.t_mult, config.lr_shrink
            return cosine(n - warmup_updates, lr, min_lr, period=period, t_mult=t_mult, lr_shrink=lr_shrink)
        case "cosine":
            # One period that ends with the run: what comes later stays low, where fairseq would start a new period.
            n, period = n - warmup_updates, float((config.max_update or 0) - warmup_updates)
            return cosine(n, lr, min_lr, period=period) if n < period else min_lr
        case "polynomial_decay":
            total, end_lr = _total_num_update(config) or 0, config.end_learning_rate
            return polynomial_decay(n, lr, end_lr, power=config.power, warmup_updates=warmup_updates, total=total)
        case "fixed":
            return lr


def inverse_sqrt(n: int, lr: float, warmup_updates: int) -> float:
    """`lr` at the end of the warm-up, then falling with the root of the updates made: `lr * sqrt(warmup_updates / n)`.

    Without a warm-up it falls from the first update on, where fairseq divides by zero.

    Args:
        n: updates made before this one.
        lr: the peak.
        warmup_updates: updates in the warm-up.
    """
    return lr * math.sqrt(max(warmup_updates, 1) / max(n, warmup_updates, 1))


def cosine(n: int, lr: float, min_lr: float, *, period: float, t_mult: float = 1.0, lr_shrink: float = 1.0) -> float:
    """From `lr` to `min_lr` along half a cosine, period after period (SGDR, arXiv:1608.03983, equation 5).

    Args:
        n: updates made since the warm-up ended.
        lr: rate at the start of the first period.
        min_lr: rate that the first period nears.
        period: updates in the first period.
        t_mult: each period is this many times as long as the one before, at least 1.
        lr_shrink: both rates are multiplied by this from period to period.
    """
    index = _period_index(n, period, t_mult)
    length = period * t_mult**index
    position = (n - _period_start(index, period, t_mult)) / length
    return math.pow(lr_shrink, index) * (min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * position)))


def _period_start(index: int, period: float, t_mult: float) -> float:
    return period * index if t_mult == 1 else period * (t_mult**index - 1) / (t_mult - 1)


def _period_index(n: int, period: float, t_mult: float) -> int:
    if t_mult == 1:
        return math.floor(n / period)
    # The logarithm can land on the wrong side of a whole number, and a period would start an update late.
    index = max(math.floor(math.log(1 + n / period * (t_mult - 1), t_mult)), 0)
    if _period_start(index, period, t_mult) > n:
        return index - 1
    return index + 1 if _period_start(index + 1, period, t_mult) <= n else index


def polynomial_decay(
    n: int, lr: float, end_learning_rate: float, *, power: float, warmup_updates: int, total: int
) -> float:
    """From `lr` to `end_learning_rate` as a power of the updates left, and constant from there on.

    Args:
        n: updates made before this one.
        lr: the peak.
        end_learning_rate: rate after `total` updates and from there on.
        power: 1 is a straight line.
        warmup_updates: updates in the warm-up.
        total: updates, the warm-up's included, after which the rate has come down.
    """
    if n >= total:
        return end_learning_rate
    left = (total - max(n, warmup_updates)) / (total - warmup_updates)
    return end_learning_rate + (lr - end_learning_rate) * math.pow(left, power)


def fixed(epoch: int, lr: float, force_anneal: int | None, lr_shrink: float) -> float:
    """`lr`, multiplied by `lr_shrink` once for every epoch from `force_anneal` on."""
    if force_anneal is None or epoch < force_anneal:
        return lr
    return lr * math.pow(lr_shrink, epoch + 1 - force_anneal)


def _total_num_update(config: TrainConfig) -> int | None:
    return config.total_num_update if config.total_num_update is not None else config.max_update


def _require_schedule(config: TrainConfig) -> None:
    for name in ("lr", "min_lr", "warmup_updates", "end_learning_rate", "power"):
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected 0 or more")
    if not 0 <= config.lr_shrink <= 1:
        raise ConfigError(f"--lr-shrink {config.lr_shrink}: expected 0 to 1")
    if not 1 <= config.t_mult < math.inf:
        raise ConfigError(f"--t-mult {config.t_mult}: expected 1 or more, periods do not get shorter")
    if config.force_anneal is not None and config.lr_scheduler != "fixed":
        raise ConfigError(f"--force-anneal: is for --lr-scheduler fixed, found {config.lr_scheduler}")
    if config.lr_scheduler == "cosine" and config.lr_period_updates <= 0 and not config.max_update:
        raise ConfigError("--lr-scheduler cosine: give --lr-period-updates or --max-update")
    if config.lr_scheduler == "polynomial_decay" and not _total_num_update(config):
        raise ConfigError("--lr-scheduler polynomial_decay: give --total-num-update or --max-update")
