"""What a fairseq checkpoint holds beside the weights: Adam's moments, and how far the run was.

fairseq numbers the optimizer's state by the order of the model's parameters, which is the order of `model` without the
entries that are no parameters. A moment is split over the parts as its parameter is, so it reads like one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmtools.checkpoints.fairseq import FairseqCheckpoint
from lmtools.checkpoints.unpickle import LazyTensor, plain, read_torch_file
from lmtools.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class FairseqTraining:
    """A run's progress, as fairseq saved it.

    Attributes:
        num_updates: steps that the optimizer has made.
        epoch: the epoch that was under way, from 1.
        num_batches: batches of it that were done, over all data-parallel ranks.
        moments: for each of MOMENTS, a checkpoint that reads the moments by parameter name; empty if none were saved.
        adam_step: number of the moments' last update.
    """

    num_updates: int
    epoch: int
    num_batches: int
    moments: Mapping[str, FairseqCheckpoint]
    adam_step: int

    def verify_part(self, part: int) -> None:
        """Compare the moments of one part with the checksums that its file has of them.

        Raises:
            CheckpointError: one is damaged.
        """
        for moments in self.moments.values():
            for tensor in moments.parts[part].values():
                tensor.storage.verify()


def read_fairseq_training(checkpoint: FairseqCheckpoint, *, with_moments: bool = True) -> FairseqTraining:
    """Read a run's progress and find its moments, without reading their values.

    Args:
        checkpoint: from `open_fairseq`.
        with_moments: False passes the optimizer's state over, whatever it is.

    Raises:
        CheckpointError: the optimizer's state is not Adam's, or is not laid out by parameter (as with fairseq's
            --fp16, which keeps one flat copy of all weights).
    """
    contents = [read_torch_file(path).content for path in checkpoint.paths]
    first = contents[0]
    history = first.get("optimizer_history") or [{}]
    iterator = plain(first.get("extra_state", {}).get("train_iterator") or {})
    config = plain({key: first.get(key) for key in ("args", "cfg")})
    parts = [
        _moments_of_part(content if with_moments else {}, part, str(path))
        for content, part, path in zip(contents, checkpoint.parts, checkpoint.paths, strict=True)
    ]
    steps = {step for _, step in parts if step is not None}
    if len(steps) > 1:
        raise CheckpointError(f"{checkpoint.paths[0].parent}: the parts' optimizers are at steps {sorted(steps)}")
    moments = {key: replace(checkpoint, parts=tuple(tensors[key] for tensors, _ in parts)) for key in MOMENTS if steps}
    return FairseqTraining(
        num_updates=int(plain(history[-1]).get("num_updates", 0)),
        epoch=int(iterator.get("epoch", 1)),
        num_batches=int(iterator.get("iterations_in_epoch", 0)) * _num_replicas(config),
        moments=moments,
        adam_step=steps.pop() if steps else 0,
    )


def _moments_of_part(
    content: Mapping[str, Any], part: Mapping[str, LazyTensor], where: str
) -> tuple[dict[str, dict[str, LazyTensor]], int | None]:
    state = (content.get("last_optimizer_state") or {}).get("state") or {}
    if not state:
        return {key: {} for key in MOMENTS}, None
    # Tied weights come twice in `model` and once among the parameters.
    names = list(part)
    tied = [name for name in names if name == "output_projection.weight" and len(state) == len(names) - 1]
    names = [name for name in names if name not in tied]
    moments: dict[str, dict[str, LazyTensor]] = {key: {} for key in MOMENTS}
    for index, name in enumerate(names):
        entry = state.get(index)
        for key in MOMENTS:
            tensor = entry.get(key) if isinstance(entry, Mapping) else None
            if not isinstance(tensor, LazyTensor) or tensor.shape != part[name].shape:
                raise CheckpointError(
                    f"{where}: the optimizer's state is not Adam's by parameter (looked for {key} of {name}); "
                    "start from the weights alone with --reset-optimizer"
                )
            moments[key][name] = tensor
    return moments, int(state[0]["step"])


def _num_replicas(config: Mapping[str, Any]) -> int:
    cfg = config.get("cfg")
    if isinstance(cfg, Mapping):
        world_size = cfg.get("distributed_training", {}).get("distributed_world_size", 1)
        tp_size = cfg.get("common", {}).get("model_parallel_size", 1)
    else:
        args = config.get("args") or {}
        world_size, tp_size = args.get("distributed_world_size", 1), args.get("model_parallel_size", 1)
    return max(1, int(world_size) // max(1, int(tp_size)))
