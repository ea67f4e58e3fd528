"""Embedding and softmax for large vocabularies: clusters of types, the rarer the cheaper.

Types are sorted by frequency and cut into clusters. The embedding of cluster i is `div_val ** i` times narrower than
the first one's, and is projected up to the model's width. The softmax first chooses among the types of the first
cluster, the shortlist, and one entry for each of the other clusters, the tails; then within the tail it chose.
(Grave et al. 2017, "Efficient softmax approximation for GPUs", section 4; Baevski and Auli 2019 for the embedding. The
arithmetic is that of kimiyoung/transformer-xl, pytorch/utils/proj_adaptive_softmax.py.)

Each cluster has a matrix of its own even where all are equally wide: no gradient then touches the rows of another
cluster, and each cluster can be split over its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtools.models.architectures import TransformerXLConfig


class AdaptiveEmbedding(nn.Module):
    """Tokens to vectors of the model's width, times sqrt(d_model).

    `projections[i]` is cluster i's `(d_model, d_i)`. With `div_val` 1 all clusters share one, or need none.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        dims = config.embedding_dims
        self.bounds = config.cluster_bounds
        self.scale = math.sqrt(config.d_model)
        self.clusters = nn.ModuleList(
            nn.Embedding(end - start, dim) for (start, end), dim in zip(self.bounds, dims, strict=True)
        )
        if config.div_val == 1:
            dims = dims[:1] if dims[0] != config.d_model else []
        self.projections = nn.ParameterList(torch.empty(config.d_model, dim) for dim in dims)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed.

        Every cluster embeds every token and each token keeps the vector of its own: that is little work beside the
        layers', and no shape depends on the data.

        Args:
            tokens: int64, any shape.

        Returns:
            `(*tokens.shape, d_model)`.

        Raises:
            IndexError: a token is not in the vocabulary (on the CPU).
        """
        embedded = self._embed(0, tokens)
        for index, (start, _) in enumerate(self.bounds[1:], start=1):
            embedded = torch.where((tokens >= start)[..., None], self._embed(index, tokens), embedded)
        return embedded * self.scale

    def _embed(self, index: int, tokens: Tensor) -> Tensor:
        start, end = self.bounds[index]
        rows = tokens - start
        # Only towards other clusters: what is in none must not be mapped into one.
        if index > 0:
            rows = rows.clamp(min=0)
        if index < len(self.bounds) - 1:
            rows = rows.clamp(max=end - start - 1)
        vectors: Tensor = self.clusters[index](rows)
        if len(self.projections) > 0:
            vectors = F.linear(vectors, self.projections[min(index, len(self.projections) - 1)])
        return vectors


def _log_normalizer(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, dim=-1)


def _nll(logits: Tensor, beside: Tensor | None, labels: Tensor) -> Tensor:
    # The fused kernel: a logsumexp and a pick each go over all logits several times, and again in the backward pass.
    whole = logits if beside is None else torch.cat([logits, beside], dim=-1)
    return F.cross_entropy(whole, labels, reduction="none")


def _whole(logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True)
class LogitOps:
    """All that the softmax does with the logits of one cluster, `(..., V)`, for who splits clusters over their rows.

    Attributes:
        nll: negative log-likelihood of each label, `(N)`, among logits `(N, V)` and others beside them, `(N, W)`, if
            any: labels from V on are theirs.
        log_normalizer: log of the sum of exponentials, `(...)`.
        whole: the logits as an ordinary tensor.
    """

    nll: Callable[[Tensor, Tensor | None, Tensor], Tensor] = _nll
    log_normalizer: Callable[[Tensor], Tensor] = _log_normalizer
    whole: Callable[[Tensor], Tensor] = _whole


class AdaptiveSoftmax(nn.Module):
    """Negative log-likelihood of the next token; `clusters[0]` is the shortlist.

    `projections[i]` is cluster i's `(d_model, d_i)`, as in the embedding, which may own it; none with `div_val` 1
    where the embedding is as wide as the model.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        dims = config.embedding_dims
        self.bounds = config.cluster_bounds
        self.clusters = nn.ModuleList(
            nn.Linear(dim, end - start) for (start, end), dim in zip(self.bounds, dims, strict=True)
        )
        num_tails = len(self.bounds) - 1
        self.tails = nn.Linear(dims[0], num_tails) if num_tails > 0 else None
        if config.div_val == 1 and dims[0] == config.d_model:
            dims = []
        self.projections = nn.ParameterList(torch.empty(config.d_model, dim) for dim in dims)
        self.ops = LogitOps()

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Score the targets. Each tail's types are computed only for the targets in that tail.

        A tail without targets computes on no rows, so that its parameters get a gradient of zeros: with data
        parallelism the replicas must all have the same gradients to add.

        Args:
            hidden: `(..., d_model)`.
            targets: int64 `(...)`; negative ones are not scored.

        Returns:
            `(...)` negative log-likelihood in nats, 0 where not scored; float32 or wider.

        Raises:
            IndexError: a target is not in the vocabulary (on the CPU).
        """
        flat, labels = hidden.flatten(0, -2), targets.flatten()
        shortlist, tails = self._first_choice(flat)
        scored = labels.clamp(min=0)
        if tails is None:
            nll = self.ops.nll(shortlist, None, scored)
        else:
            starts = torch.tensor([start for start, _ in self.bounds[1:]], device=labels.device)
            tail = torch.bucketize(labels, starts, right=True) - 1  # -1: in the shortlist
            nll = self.ops.nll(shortlist, tails, torch.where(tail < 0, scored, self.bounds[0][1] + tail))
            for index, (start, _) in enumerate(self.bounds[1:], start=1):
                rows = (tail == index - 1).nonzero().squeeze(-1)
                logits = self._logits(index, flat[rows])
                nll = nll.index_add(0, rows, self.ops.nll(logits, None, labels[rows] - start))
        return nll.view(targets.shape).masked_fill(targets < 0, 0.0)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all types, for generation.

        Args:
            hidden: `(..., d_model)`.

        Returns:
            `(..., V)` in nats; float32 or wider.
        """
        shortlist, tails = self._first_choice(hidden)
        normalizer = self._first_normalizer(shortlist, tails)[..., None]
        pieces = [self.ops.whole(shortlist) - normalizer]
        if tails is not None:
            for index in range(1, len(self.bounds)):
                chosen = tails[..., index - 1, None] - normalizer
                within = self.ops.whole(self._logits(index, hidden)).log_softmax(dim=-1)
                pieces.append(chosen + within)
        return torch.cat(pieces, dim=-1)

    def _first_choice(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the shortlist's types and of the tails, which share one normalizer."""
        projected = self._project(0, hidden)
        shortlist = _widen(self.clusters[0](projected))
        return shortlist, None if self.tails is None else _widen(self.tails(projected))

    def _first_normalizer(self, shortlist: Tensor, tails: Tensor | None) -> Tensor:
        normalizer = self.ops.log_normalizer(shortlist)
        return normalizer if tails is None else torch.logaddexp(normalizer, _log_normalizer(tails))

    def _logits(self, index: int, hidden: Tensor) -> Tensor:
        return _widen(self.clusters[index](self._project(index, hidden)))

    def _project(self, index: int, hidden: Tensor) -> Tensor:
        return hidden @ self.projections[index] if len(self.projections) > 0 else hidden


def _widen(logits: Tensor) -> Tensor:
    """At least float32: sums over a vocabulary are not for half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
