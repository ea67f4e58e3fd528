"""How each parameter of each model is split over the tensor-parallel ranks: one table per model.

This is the only place that knows. Applying parallelism, loading checkpoints, writing fairseq parts and resharding
all read these tables; a test checks that each table matches every parameter exactly once and has no dead row.

Two rules are the field's classic silent bugs, and the tables avoid both: q, k and v are separate (a fused one cut
contiguously mixes heads), and the bias of a row-split layer is whole on every rank and added once, after the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase


class Split(Enum):
    """How a parameter is laid over the tp ranks, as contiguous pieces in rank order."""

    COLUMN = "column"
    """Output features are split: a weight `(out/tp, in)` or its bias `(out/tp,)`."""
    ROW = "row"
    """Input features are split, outputs summed over the ranks: a weight `(out, in/tp)`."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding or output projection are split: `(V/tp, E)`."""
    REPLICATED = "replicated"
    """Whole on every rank."""

    @property
    def dim(self) -> int | None:
        """The dimension that is cut, or None."""
        return {Split.COLUMN: 0, Split.ROW: 1, Split.VOCABULARY: 0, Split.REPLICATED: None}[self]


Plan = Mapping[str, Split]
"""Parameter-name pattern (as in fnmatch, case-sensitive) to split."""

ModulePatterns = Sequence[str]
"""Module-name patterns, as in fnmatch."""


TRANSFORMER_LM: Plan = {
    "embed_tokens.weight": Split.VOCABULARY,
    "embed_positions.weight": Split.REPLICATED,
    "layernorm_embedding.*": Split.REPLICATED,
    "layers.*.self_attn.[qkv]_proj.*": Split.COLUMN,
    "layers.*.self_attn.out_proj.weight": Split.ROW,
    "layers.*.self_attn.out_proj.bias": Split.REPLICATED,
    "layers.*.self_attn_layer_norm.*": Split.REPLICATED,
    "layers.*.fc1.*": Split.COLUMN,
    "layers.*.fc2.weight": Split.ROW,
    "layers.*.fc2.bias": Split.REPLICATED,
    "layers.*.final_layer_norm.*": Split.REPLICATED,
    "layer_norm.*": Split.REPLICATED,
    "output_projection.weight": Split.VOCABULARY,
}
"""`lmtools.models.transformer_lm.TransformerLM`."""

TRANSFORMER_LM_SHARED_INPUT: ModulePatterns = ("layers.*.self_attn",)
"""Modules all of whose column-split layers read what the module is given: its gradient, of which each layer on each
rank has an addend, is summed over the ranks once, where the module begins, and not once for each layer."""

TRANSFORMER_LM_SPLIT_DROPOUT: ModulePatterns = ("layers.*.self_attn", "layers.*.activation_dropout")
"""Modules that drop elements of activations of which each tp rank holds its own part."""


TRANSFORMER_XL: Plan = {
    "embed_tokens.clusters.*.weight": Split.VOCABULARY,
    "embed_tokens.projections.*": Split.REPLICATED,
    "layers.*.self_attn.[qkvr]_proj.weight": Split.COLUMN,
    "layers.*.self_attn.r_[wr]_bias.bias": Split.COLUMN,
    "layers.*.self_attn.out_proj.weight": Split.ROW,
    "layers.*.self_attn_layer_norm.*": Split.REPLICATED,
    "layers.*.fc1.*": Split.COLUMN,
    "layers.*.fc2.weight": Split.ROW,
    "layers.*.fc2.bias": Split.REPLICATED,
    "layers.*.final_layer_norm.*": Split.REPLICATED,
    "adaptive_softmax.clusters.*.*": Split.VOCABULARY,
    "adaptive_softmax.tails.*": Split.REPLICATED,
    "adaptive_softmax.projections.*": Split.REPLICATED,
}
"""`lmtools.models.transformer_xl.TransformerXL`."""

TRANSFORMER_XL_SHARED_INPUT: ModulePatterns = ("layers.*.self_attn",)
"""As `TRANSFORMER_LM_SHARED_INPUT`."""

TRANSFORMER_XL_SPLIT_DROPOUT: ModulePatterns = ("layers.*.self_attn", "layers.*.activation_dropout")
"""As `TRANSFORMER_LM_SPLIT_DROPOUT`."""


@dataclass(frozen=True)
class SequencePlan:
    """Where, under sequence parallelism, each tp rank holds its own part of the sequence.

    Modules of a shared input need the whole sequence; it is gathered once, for all layers in them.

    Attributes:
        enter: the module whose input is cut along the sequence; all that follows is cut.
        norms: norms within the cut part.
        dropout: modules that drop elements within the cut part.
    """

    enter: str
    norms: ModulePatterns
    dropout: ModulePatterns


TRANSFORMER_LM_SEQUENCE = SequencePlan(
    enter="layers.0",
    norms=("layers.*.self_attn_layer_norm", "layers.*.final_layer_norm", "layer_norm"),
    dropout=("layers.*.dropout",),
)


def split_of(name: str, plan: Plan) -> Split:
    """The one row of the plan that a parameter matches.

    Raises:
        KeyError: no row, or more than one row, matches: the plan is not one of this model.
    """
    matches = [split for pattern, split in plan.items() if fnmatchcase(name, pattern)]
    if len(matches) != 1:
        raise KeyError(f"{name} matches {len(matches)} rows of the plan, expected 1")
    return matches[0]


def matches_any(name: str, patterns: ModulePatterns) -> bool:
    """Whether a module's name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unused_patterns(names: Iterable[str], plan: Plan) -> list[str]:
    """Rows that match no parameter; a model without an optional part leaves that part's rows unused."""
    names = list(names)
    return [pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in names)]


def shard_bounds(length: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Start and end of one shard of a dimension, cut as `torch.chunk` and DTensor cut it.

    All shards have ceil(length / num_shards) rows, but the last ones, which have fewer or none.
    """
    size = -(-length // num_shards)
    return min(shard * size, length), min((shard + 1) * size, length)
