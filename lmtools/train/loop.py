"""The training loop, top to bottom.

Every rank runs it. The ranks agree on what decides how it goes on (a stop signal, the time spent, a loss that is not
finite, an overflow) by one sum over all of them in each update; everything else follows from configuration and
position.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lmtools.data.batches import BlockIds, Position, Update
from lmtools.errors import DataError, LmtoolsError
from lmtools.evaluate.perplexity import nats_to_bits
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.random import seed_batch
from lmtools.train.batch import Batch, make_batch, make_stream_batch, prefetched
from lmtools.train.checkpoints import Keeper
from lmtools.train.config import Run, TrainConfig
from lmtools.train.data import RunData
from lmtools.train.memory import first_memories
from lmtools.train.report import Reporter
from lmtools.train.schedule import learning_rate
from lmtools.train.signals import StopSignal
from lmtools.train.state import Progress, TrainState
from lmtools.train.step import forward_backward, gradient_norm, sum_gradients_over_dp, sum_over_ranks
from lmtools.train.validation import validate


@dataclass(frozen=True)
class UpdateResult:
    """What an update did, the same on every rank.

    Attributes:
        loss_sum: nats over all targets of the update.
        num_tokens: targets of the update.
        gradient_norm: of the mean gradient, before clipping.
        learning_rate: that it was made with.
        skipped: why no step was made (`overflow`, `nan`), or None.
        stop_signal: number of a signal that asks to save and end, 0 if no rank has received one.
        num_written: how many ranks have written their share of a pending checkpoint.
        seconds: the run's age by rank 0's clock.
    """

    loss_sum: float
    num_tokens: int
    gradient_norm: float
    learning_rate: float
    skipped: str | None
    stop_signal: int
    num_written: int
    seconds: float


def train(run: Run, data: RunData, state: TrainState, mesh: Mesh, report: Reporter, stop: StopSignal) -> int:
    """Train until the configuration says that it is enough. Every rank must call it.

    Args:
        run: the resolved configuration.
        data: opened splits.
        state: model, optimizer and progress, new or restored.
        mesh: where we are.
        report: what is shown and logged; only rank 0's does anything.
        stop: tells of a signal that asks to save and end.

    Returns:
        The number of the signal that ended the run, or 0 when it came to its end.

    Raises:
        DataError: a loss was not finite; the state before that update is saved.
        LmtoolsError: the loss scale came to its floor; the state is saved.
        CheckpointError: the last checkpoint could not be written.
    """
    config = run.train
    keeper = Keeper(run, data, state, mesh, report)
    progress = state.progress
    started = time.monotonic() - progress.seconds

    def validate_splits() -> bool:
        """Whether no signal came before the end."""
        losses = []
        for split in data.valid:
            loss = validate(state.model, split, config, mesh, stop, eos_index=data.dictionary.eos_index)
            if loss is None:
                return False
            losses.append(loss)
        keeper.note_validation(losses)
        report.validation(losses, progress)
        return True

    if progress.owes_validation and data.valid:
        if not validate_splits():
            return stop.received or signal.SIGTERM
        keeper.amend_last()
    for update, batches in updates(data, run, progress.position, mesh):
        if finished(config, progress):
            break
        seconds = time.monotonic() - started
        result = make_update(update, batches, config, state, mesh, stop, written=keeper.written(), seconds=seconds)
        keeper.poll(result.num_written)
        progress.seconds = result.seconds
        if result.skipped == "nan" and config.nan == "stop":
            keeper.save_and_wait()
            raise DataError(not_finite(result, update, progress, is_saved=not config.no_save))
        try:
            state.scaler.update(overflow=result.skipped is not None)
        except LmtoolsError:
            keeper.save_and_wait()
            raise
        made, end_of_epoch = result.skipped is None, update.after.num_batches == 0
        progress.position = update.after
        progress.num_updates += made
        progress.num_skipped += not made
        report.update(result, state, epoch=update.epoch)

        stop_signal = result.stop_signal
        if keeper.validation_is_due(
            update.epoch, made=made, end_of_epoch=end_of_epoch, finished=finished(config, progress)
        ):
            # Whoever asks to save and end may not wait for it.
            progress.owes_validation = bool(stop_signal) or not validate_splits()
            if progress.owes_validation:
                stop_signal = stop_signal or stop.received or signal.SIGTERM
        stopping = bool(stop_signal) or finished(config, progress)
        keeper.save_if_due(update.epoch, made=made, end_of_epoch=end_of_epoch, stopping=stopping)
        report.next_update()
        if stop_signal:
            keeper.wait()
            return stop_signal
    keeper.wait()
    return 0


def updates(data: RunData, run: Run, start: Position, mesh: Mesh) -> Iterator[tuple[Update, list[Batch]]]:
    """The run's updates with this rank's batches, made ahead in the background."""
    config = run.train
    multiple = config.mp if config.sequence_parallel else 1
    eos_index = data.dictionary.eos_index

    def batch_of(epoch: int, ids: BlockIds) -> Batch:
        blocks = data.train(epoch)
        if data.streams is not None:
            ext_len = run.model["ext_len"]
            return make_stream_batch(blocks.tokens, data.streams(epoch), ids, eos_index=eos_index, ext_len=ext_len)
        return make_batch(blocks.tokens, blocks.spans, ids, eos_index=eos_index, multiple=multiple)

    def make() -> Iterator[tuple[Update, list[Batch]]]:
        for update in data.updates(start, config):
            yield update, [batch_of(update.epoch, step[mesh.dp_rank]) for step in update.micro_steps]

    return prefetched(make(), depth=2 if config.num_workers else 0)


def make_update(
    update: Update,
    batches: list[Batch],
    config: TrainConfig,
    state: TrainState,
    mesh: Mesh,
    stop: StopSignal,
    *,
    written: bool = False,
    seconds: float = 0.0,
) -> UpdateResult:
    """Gradients of all micro-steps, their norm, and a step of the optimizer unless something is not finite.

    Args:
        update: which blocks on which rank; the same on every rank.
        batches: this rank's.
        config: the run.
        state: model, optimizer and progress.
        mesh: where we are.
        stop: tells of a signal.
        written: this rank has written its share of a pending checkpoint; counted over the ranks.
        seconds: the run's age by this rank's clock; rank 0's is taken.
    """
    number = state.progress.num_updates + 1
    lr = learning_rate(number + state.progress.schedule_offset, config, epoch=update.epoch)
    state.optimizer.zero_grad(set_to_none=True)
    if state.progress.position.num_batches == 0:  # of an epoch nothing is remembered in the next one
        state.memories = first_memories(state.model, config, len(batches[0].tokens), mesh.device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for index, batch in enumerate(batches):
        # The place in the data, not the update's number: a skipped update must not repeat its dropout.
        place = f"{update.after.epoch}.{update.after.num_batches}"
        seed_batch(mesh.device, seed=config.seed, place=place, batch=index, dp_rank=mesh.dp_rank)
        loss, state.memories = forward_backward(
            state.model, batch, mesh.device, loss_scale=state.scaler.scale, memories=state.memories
        )
        loss_sum += loss

    # The ranks of a tp group have the same loss: a share of each makes the sum over all ranks right.
    num_tokens = sum(batch.num_tokens for batch in batches)
    share = 1 / mesh.tp_size
    own_seconds = seconds if mesh.rank == 0 else 0.0
    total_loss, total_tokens, num_stopped, num_written, age = sum_over_ranks(
        [float(loss_sum) * share, num_tokens * share, bool(stop.received), written, own_seconds], mesh
    )
    num_tokens = round(total_tokens)
    if not math.isfinite(total_loss):
        state.memories = None  # it would hand on what is not finite
    stop_signal = (stop.received or signal.SIGTERM) if num_stopped else 0

    parameters = list(state.parameters.values())
    if not config.zero:
        sum_gradients_over_dp(parameters, mesh)
    # Gradients are sums over tokens, times the loss scale; fully_shard has also divided them by dp.
    grad_scale = state.scaler.scale * num_tokens / (mesh.dp_size if config.zero else 1)
    norm = gradient_norm(parameters, mesh) / grad_scale
    finite = math.isfinite(norm) and math.isfinite(total_loss)
    skipped = None
    if finite:
        if config.clip_norm and norm > config.clip_norm:
            grad_scale *= norm / config.clip_norm
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step(grad_scale=grad_scale)
    else:
        skipped = "overflow" if state.scaler.dynamic else "nan"
    return UpdateResult(total_loss, num_tokens, norm, lr, skipped, stop_signal, round(num_written), age)


def finished(config: TrainConfig, progress: Progress) -> bool:
    """Whether one of the limits is reached; the same on every rank."""
    return (
        (config.max_update is not None and progress.num_updates >= config.max_update)
        or (config.max_epoch is not None and progress.position.epoch > config.max_epoch)
        or (config.stop_time_hours is not None and progress.seconds >= config.stop_time_hours * 3600)
        or (config.patience is not None and progress.validations_since_best >= config.patience)
    )


def not_finite(result: UpdateResult, update: Update, progress: Progress, *, is_saved: bool) -> str:
    """The message for a loss or gradient that is not a number."""
    ids = [int(block) for step in update.micro_steps for rank in step for block in rank]
    shown = ", ".join(map(str, ids[:32])) + (f" and {len(ids) - 32} more" if len(ids) > 32 else "")
    loss = nats_to_bits(result.loss_sum / max(result.num_tokens, 1))
    saved = "the state before it is saved; " if is_saved else ""
    return (
        f"update {progress.num_updates + 1} of epoch {update.epoch}: loss {loss} bits, gradient norm "
        f"{result.gradient_norm}, expected finite numbers; blocks {shown}; {saved}"
        "lower --lr, clip with --clip-norm, or go on without such updates with --nan skip"
    )
