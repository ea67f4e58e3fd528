"""The models that a checkpoint may hold: built from a configuration, and split over a mesh.

Models know no parallelism and plans know no model; here is the one place that knows which belongs to which.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from lmtools.models import transformer_lm, transformer_xl
from lmtools.models.adaptive_softmax import LogitOps
from lmtools.models.architectures import ModelConfig, TransformerLMConfig, TransformerXLConfig
from lmtools.models.transformer_lm import TransformerLM
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel import logits
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.parallelize import InitializeParameter, parallelize
from lmtools.parallel.plans import (
    TRANSFORMER_LM,
    TRANSFORMER_LM_SEQUENCE,
    TRANSFORMER_LM_SHARED_INPUT,
    TRANSFORMER_LM_SPLIT_DROPOUT,
    TRANSFORMER_XL,
    TRANSFORMER_XL_SHARED_INPUT,
    TRANSFORMER_XL_SPLIT_DROPOUT,
    Plan,
)
from lmtools.parallel.random import split_dropout

Model: TypeAlias = TransformerLM | TransformerXL


def model_config(fields: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """The configuration with these fields, as a run's options or a checkpoint's JSON have them.

    Raises:
        ConfigError: fields that contradict each other, or this vocabulary.
        TypeError: fields of another version of lmtools.
    """
    if "d_model" in fields:
        return TransformerXLConfig(**{**fields, "cutoffs": tuple(fields["cutoffs"]), "vocab_size": vocab_size})
    return TransformerLMConfig(**{**fields, "vocab_size": vocab_size})


def new_model(config: ModelConfig) -> Model:
    """The model, on the device that is torch's default."""
    return TransformerXL(config) if isinstance(config, TransformerXLConfig) else TransformerLM(config)


def initializer(config: ModelConfig) -> InitializeParameter:
    """What gives the model's parameters their initial values."""
    if isinstance(config, TransformerXLConfig):
        return partial(transformer_xl.initialize_parameter, config=config)
    return transformer_lm.initialize_parameter


def plan_of(config: ModelConfig) -> Plan:
    """How the model's parameters are split."""
    return TRANSFORMER_XL if isinstance(config, TransformerXLConfig) else TRANSFORMER_LM


def split_model(model: Model, mesh: Mesh, *, for_training: bool = False, sequence_parallel: bool = False) -> None:
    """Split a model over the tensor-parallel ranks, in place. Every rank must call it.

    Args:
        model: its parameters may be on the meta device.
        mesh: where we are; one without tensor parallelism leaves the model as it is.
        for_training: what is dropped from split activations comes from streams of its own.
        sequence_parallel: split what lies between the layers along the sequence, in models that can.
    """
    if mesh.tp_mesh is None:
        return
    if isinstance(model, TransformerXL):
        parallelize(model, TRANSFORMER_XL, mesh.tp_mesh, shared_input=TRANSFORMER_XL_SHARED_INPUT)
        model.adaptive_softmax.ops = LogitOps(logits.nll, logits.log_normalizer, logits.whole)
        dropout = TRANSFORMER_XL_SPLIT_DROPOUT
    else:
        sequence_plan = TRANSFORMER_LM_SEQUENCE if sequence_parallel else None
        shared_input = TRANSFORMER_LM_SHARED_INPUT
        parallelize(model, TRANSFORMER_LM, mesh.tp_mesh, shared_input=shared_input, sequence_plan=sequence_plan)
        dropout = (*TRANSFORMER_LM_SPLIT_DROPOUT, *(sequence_plan.dropout if sequence_plan else ()))
    if for_training:
        split_dropout(model, dropout, tp_rank=mesh.tp_rank, device=mesh.device)
