"""What a run shows and records: one line on the terminal, metrics.jsonl always, TensorBoard on request."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmtools.errors import LmtoolsError
from lmtools.evaluate.perplexity import nats_to_bits
from lmtools.files import disk_errors
from lmtools.models.flops import training_flops_per_token
from lmtools.parallel.mesh import Mesh
from lmtools.train.config import Run
from lmtools.train.metrics import open_metrics
from lmtools.train.utilisation import PeakFlops
from lmtools.train.validation import Validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from lmtools.train.loop import UpdateResult
    from lmtools.train.state import Progress, TrainState


class Reporter:
    """Shows and records a run; on ranks other than 0 every call does nothing."""

    def __init__(self, run: Run, mesh: Mesh, vocab_size: int) -> None:
        """Take possession of the run's folder.

        Raises:
            LmtoolsError: the folder may not be written, or another run is writing to it.
        """
        self._config = run.train
        self._speaks = mesh.rank == 0
        self._logs = self._speaks and (run.train.log_format != "none" or run.train.tensorboard_logdir is not None)
        self._device = mesh.device
        self._flops_per_token = training_flops_per_token(
            vocab_size=vocab_size, tokens_per_sample=run.train.tokens_per_sample, fields=run.model
        )
        self._world_size = mesh.world_size
        self._metrics = open_metrics(Path(run.train.save_dir)) if self._speaks else None
        self._tensorboard: SummaryWriter | None = None
        self._line: Any = None
        self._since = time.monotonic()
        self._interval = _Interval()
        self._is_warned = False

    def begin(
        self, progress: Progress, origin: str, num_parameters: int, dtype: torch.dtype, *, is_continued: bool = True
    ) -> None:
        """Say where the run starts from, and cut off what an earlier one has recorded from there on.

        Args:
            progress: how far the run is.
            origin: where it starts from, in words.
            num_parameters: of the model.
            dtype: of its parameters.
            is_continued: what the folder has of earlier updates is this run's; otherwise all of it is cut off.
        """
        if self._metrics is None:
            return
        config = self._config
        made, skipped = (progress.num_updates, progress.num_skipped) if is_continued else (0, 0)
        self._metrics.cut(made, skipped, owes_validation=progress.owes_validation)
        if self._logs:
            self._peak = PeakFlops(self._device, dtype, self._world_size)
        if config.tensorboard_logdir is not None:
            self._tensorboard = _open_tensorboard(config.tensorboard_logdir, progress.num_updates)
        num_updates = progress.num_updates
        self._say(
            {"kind": "start", "origin": origin, "num_parameters": num_parameters, "num_updates": num_updates},
            f"train: {origin}; {num_parameters:,} parameters, update {num_updates:,}",
        )
        if config.log_format == "rich":
            self._line = _open_line(config.max_update, num_updates)
        self._since = time.monotonic()

    def update(self, result: UpdateResult, state: TrainState, epoch: int) -> None:
        """An update was made or skipped."""
        if not self._speaks:
            return
        now = time.monotonic()
        update_seconds, self._since = now - self._since, now
        num_updates = state.progress.num_updates
        self._write(
            {
                "kind": "update",
                "num_updates": num_updates,
                "num_skipped": state.progress.num_skipped,
                "epoch": epoch,
                "loss_base2": _finite(nats_to_bits(result.loss_sum / result.num_tokens)),
                "loss_sum": _finite(result.loss_sum),
                "num_tokens": result.num_tokens,
                "gradient_norm": _finite(result.gradient_norm),
                "lr": result.learning_rate,
                "loss_scale": state.scaler.scale,
                "skipped": result.skipped,
                "seconds": state.progress.seconds,
                "update_seconds": update_seconds,
            }
        )
        self._interval.add(result, seconds=update_seconds)
        if self._line is not None:
            self._line.update(num_updates)
        if self._logs and (num_updates % self._config.log_interval == 0 or num_updates == 1):
            self._log(result, state, epoch)

    def _log(self, result: UpdateResult, state: TrainState, epoch: int) -> None:
        interval, self._interval = self._interval, _Interval()
        elapsed = max(interval.seconds, 1e-9)
        tokens_per_second = interval.num_tokens / elapsed
        loss = nats_to_bits(interval.loss_sum / interval.num_tokens) if interval.num_tokens else math.nan
        values: dict[str, Any] = {
            "epoch": epoch,
            "num_updates": state.progress.num_updates,
            "loss_base2": _finite(loss),
            "perplexity": _finite(2**loss if loss < 1024 else math.inf),
            "tokens_per_second": tokens_per_second,
            "updates_per_second": interval.num_updates / elapsed,
            "lr": result.learning_rate,
            "gradient_norm": _finite(result.gradient_norm),
            "loss_scale": state.scaler.scale,
            "memory_gib": peak_memory_bytes(self._device) / 2**30,
            "flop_utilisation": self._peak.share(tokens_per_second * self._flops_per_token),
        }
        text = " | ".join(
            [
                f"epoch {epoch}",
                f"update {state.progress.num_updates:,}",
                f"loss {loss:.3f}",
                f"ppl {values['perplexity'] or math.inf:.2f}",
                f"{tokens_per_second:,.0f} tok/s",
                f"{values['updates_per_second']:.2f} up/s",
                f"lr {result.learning_rate:.3g}",
                f"gnorm {result.gradient_norm:.3g}",
                f"scale {state.scaler.scale:g}",
                f"{values['memory_gib']:.2f} GiB",
            ]
        )
        if values["flop_utilisation"] is not None:
            text += f" | {values['flop_utilisation']:.0%} of peak"
        if self._line is not None:
            self._line.describe(text)
        else:
            self._say({"kind": "log", **values}, text)
        self._plot("train", values, state.progress.num_updates)

    def validation(self, losses: Sequence[Validation], progress: Progress) -> None:
        """The validation splits were scored."""
        if not self._speaks:
            return
        for valid in losses:
            values = {
                "subset": valid.subset,
                "num_updates": progress.num_updates,
                "num_skipped": progress.num_skipped,
                "loss_base2": _finite(valid.loss_base2),
                "perplexity": _finite(valid.perplexity),
                "num_tokens": valid.num_tokens,
                "word_perplexity": _finite(valid.word_perplexity),
                "best_loss_base2": progress.best_loss,
                "seconds": progress.seconds,
            }
            self._write({"kind": "valid", **values})
            words = f", {valid.word_perplexity:.2f} per original token" if valid.word_perplexity is not None else ""
            best = f"best {progress.best_loss:.3f}" if progress.best_loss is not None else "none was finite"
            self._say(
                {"kind": "valid", **values},
                f"{valid.subset} | update {progress.num_updates:,} | loss {valid.loss_base2:.3f} | "
                f"ppl {valid.perplexity:.2f}{words} | {valid.num_tokens:,} tokens | {best}",
            )
            self._plot(valid.subset, values, progress.num_updates)

    def next_update(self) -> None:
        """The next one begins: what came since the last, validation and the start of a checkpoint, is no training."""
        self._since = time.monotonic()

    def saved(self, path: Path) -> None:
        """A checkpoint is complete."""
        self._say({"kind": "saved", "path": str(path)}, f"saved {path}")

    def warning(self, message: str) -> None:
        """Something went wrong that does not end the run."""
        self._say({"kind": "warning", "message": message}, f"warning: {message}")

    def close(self) -> None:
        """Close the outputs."""
        for output in (self._metrics, self._tensorboard, self._line):
            if output is not None:
                output.close()
        self._metrics = self._tensorboard = self._line = None

    def _write(self, values: dict[str, Any]) -> None:
        assert self._metrics is not None
        try:
            self._metrics.write(values)
        except LmtoolsError as error:
            if not self._is_warned:
                self.warning(f"{error}; training goes on without its lines")
            self._is_warned = True
        else:
            self._is_warned = False

    def _say(self, values: dict[str, Any], text: str) -> None:
        if not self._speaks or self._config.log_format == "none":
            return
        line = json.dumps(values, allow_nan=False) if self._config.log_format == "json" else text
        if self._line is not None:
            self._line.say(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _plot(self, name: str, values: dict[str, Any], num_updates: int) -> None:
        if self._tensorboard is None:
            return
        for key, value in values.items():
            if isinstance(value, float):
                self._tensorboard.add_scalar(f"{name}/{key}", value, num_updates)


class _Interval:
    """Sums since the last log line, and how long its updates took."""

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.num_tokens = 0
        self.num_updates = 0
        self.seconds = 0.0

    def add(self, result: UpdateResult, *, seconds: float) -> None:
        if result.skipped is None:
            self.loss_sum += result.loss_sum
            self.num_tokens += result.num_tokens
        self.num_updates += 1
        self.seconds += seconds


class _Line:
    """What is live on a terminal: the last log text, on as many lines as it takes, over a bar with the time left."""

    def __init__(self, total: int | None, done: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._text = ""
        # No text in the bar's own line: where both do not fit, rich leaves out the bar.
        columns = BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, speed_estimate_period=120)
        self._task = self._progress.add_task("", total=total, completed=done)
        self._live = Live(console=Console(stderr=True), get_renderable=self._render)
        self._live.start()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*([Text(self._text)] if self._text else []), self._progress)

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def describe(self, text: str) -> None:
        self._text = text

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def _open_line(total: int | None, done: int) -> _Line | None:
    return _Line(total, done) if sys.stderr.isatty() else None


def _open_tensorboard(folder: str, num_updates: int) -> SummaryWriter:
    """A writer of events; those of later updates that a run before it wrote there are void."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LmtoolsError("--tensorboard-logdir: TensorBoard is not installed; pip install 'lmtools[plot]'") from error
    with disk_errors(folder):
        return SummaryWriter(folder, purge_step=num_updates + 1)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on the GPU, or resident where it computes on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    scale = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
