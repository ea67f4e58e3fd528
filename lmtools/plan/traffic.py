"""Bytes that a training update sends between ranks.

Every collective that the run makes is counted, except those of a few numbers a token (the split cross-entropy) or an
update (losses, the norm). A collective of a message of M bytes over p ranks costs each rank, on a ring,

    all-reduce                      2 (p - 1) / p * M      sent, and as much received
    all-gather, reduce-scatter        (p - 1) / p * M      M is the whole message, put together
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmtools.models.architectures import ModelConfig, TransformerXLConfig
from lmtools.plan.memory import num_elements, tp_shapes
from lmtools.plan.transformer_xl import tp_all_reduces
from lmtools.train.config import TrainConfig
from lmtools.train.precision import parameter_dtype


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis of the mesh, in an update.

    Attributes:
        kind: which collective.
        axis: over the ranks of a tp group or of a dp group.
        count: how many; those of gradients are in fact cut into buckets.
        message_bytes: of all of them together.
        sent_bytes: what one rank sends for them.
    """

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    axis: Literal["tp", "dp"]
    count: int
    message_bytes: int
    sent_bytes: int


def training_traffic(config: TrainConfig, model: ModelConfig, *, batch_size: int) -> list[Traffic]:
    """What one update sends.

    Over tp, in each batch, messages of n E s (n tokens of a batch, width E, s bytes of an element), L blocks:

        all-reduce       embedding 1, blocks 2 L, and backward 2 L + 1; L more to compute activations again under
                         `--checkpoint-activations`
        with --sequence-parallel instead
        all-reduce       1
        all-gather       2 L + 1, and backward 2 L + 1; 2 L again under `--checkpoint-activations`
        reduce-scatter   2 L, and backward 2 L + 1; L again

    A Transformer-XL's messages differ in size: `lmtools.plan.transformer_xl.tp_all_reduces`.

    Over dp, of a tp rank's share of the parameters: with `--zero 0` one all-reduce of the gradients in an update; with
    2 one all-gather of the weights and one reduce-scatter of the gradients in each batch; with 3 two all-gathers.
    """
    itemsize = parameter_dtype(config).itemsize
    rows = []
    if config.mp > 1 and isinstance(model, TransformerXLConfig):
        messages = tp_all_reduces(
            model,
            batch_size=batch_size,
            length=config.tokens_per_sample,
            checkpoint_activations=config.checkpoint_activations,
        )
        num_bytes = round(sum(messages) * itemsize) * config.update_freq
        rows.append(_traffic("all-reduce", "tp", len(messages) * config.update_freq, num_bytes, config.mp))
    elif config.mp > 1:
        assert not isinstance(model, TransformerXLConfig)
        message = batch_size * config.tokens_per_sample * model.decoder_embed_dim * itemsize
        for kind, count in tp_collectives(
            model.decoder_layers,
            sequence_parallel=config.sequence_parallel,
            checkpoint_activations=config.checkpoint_activations,
        ).items():
            count *= config.update_freq
            rows.append(_traffic(kind, "tp", count, count * message, config.mp))
    if config.dp > 1:
        share = num_elements(tp_shapes(model, config.mp)) * itemsize
        if config.zero == 0:
            rows.append(_traffic("all-reduce", "dp", 1, share, config.dp))
        else:
            gathers = (2 if config.zero == 3 else 1) * config.update_freq
            rows.append(_traffic("all-gather", "dp", gathers, gathers * share, config.dp))
            rows.append(_traffic("reduce-scatter", "dp", config.update_freq, config.update_freq * share, config.dp))
    return rows


Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]


def tp_collectives(num_layers: int, *, sequence_parallel: bool, checkpoint_activations: bool) -> dict[Kind, int]:
    """How many collectives of whole activations one batch takes, forward and backward; see `training_traffic`."""
    again = num_layers if checkpoint_activations else 0
    if not sequence_parallel:
        return {"all-reduce": 2 * (2 * num_layers + 1) + again}
    return {
        "all-reduce": 1,
        "all-gather": 2 * (2 * num_layers + 1) + 2 * again,
        "reduce-scatter": 2 * (2 * num_layers) + 1 + again,
    }


def _traffic(kind: Kind, axis: Literal["tp", "dp"], count: int, num_bytes: int, ranks: int) -> Traffic:
    passes = 2 if kind == "all-reduce" else 1
    return Traffic(kind, axis, count, num_bytes, passes * (ranks - 1) * num_bytes // ranks)
