"""The arithmetic of an evaluation against counted windows, operations and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmtools.errors import ConfigError
from lmtools.evaluate.scoring import make_batch, score_batch
from lmtools.models.architectures import TransformerLMConfig, transformer_lm_megatron_11b
from lmtools.models.transformer_lm import TransformerLM
from lmtools.plan.evaluation import eval_activation_bytes, evaluation_flops, plan_evaluation
from lmtools.plan.speed import Speed
from tests.support.live_memory import LiveMemory

SMALL = TransformerLMConfig(
    vocab_size=500,
    decoder_layers=3,
    decoder_embed_dim=32,
    decoder_ffn_embed_dim=80,
    decoder_attention_heads=4,
    decoder_normalize_before=True,
    share_decoder_input_output_embed=True,
)
CPU = torch.device("cpu")


def test_the_published_evaluation():
    """WikiText-103's test set in windows of 1,024 with 992 of context, by Megatron-11b."""
    plan = plan_evaluation(
        transformer_lm_megatron_11b(51_200, share_decoder_input_output_embed=True),
        num_tokens=270_847,
        tokens_per_sample=1024,
        context_window=992,
        batch_size=8,
        itemsize=2,
        mp=8,
        dp=1,
        speed=Speed(125e12, 0.4, None),
    )
    assert (plan.num_windows, plan.tokens_scored) == (8464, 270_847)
    assert plan.tokens_read == pytest.approx(8464 * 1024, rel=0.01)
    assert plan.weights == 2 * 1_380_197_376
    assert plan.flops == pytest.approx(8464 * 1024 * 2 * 11e9, rel=0.05)
    assert plan.hours == pytest.approx(plan.flops / (8 * 0.4 * 125e12) / 3600)


@pytest.mark.parametrize("context_window", [0, 20])
def test_operations_are_those_that_torch_counts(context_window):
    """Of linear layers, exactly: torch counts attention over the whole square, and not at all on some devices."""
    windows = np.array([[start - context_window, start, start + 12] for start in (20, 32, 44)])
    model = TransformerLM(SMALL).eval()
    batch = make_batch(np.arange(4, 100), windows, eos_index=2)
    with FlopCounterMode(display=False) as counter:
        score_batch(model, batch, CPU)
    counted = sum(
        count
        for operation, count in counter.get_flop_counts()["Global"].items()
        if "mm" in str(operation) and "bmm" not in str(operation)
    )
    length, scored = context_window + 12, 12
    attention = sum(2 * 2 * 32 * (position + 1) for position in range(length)) * (SMALL.decoder_layers - 1)
    attention += sum(2 * 2 * 32 * (position + 1) for position in range(length - scored, length))
    assert evaluation_flops(SMALL, windows) == counted + len(windows) * attention


@pytest.mark.parametrize(("batch_size", "context_window", "vocab_size"), [(2, 0, 500), (4, 16, 500), (2, 0, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_within_a_tenth_of_a_real_evaluations(batch_size, context_window, vocab_size, dtype):
    config = replace(SMALL, vocab_size=vocab_size)
    model = TransformerLM(config).eval().to(dtype)
    starts = context_window + np.arange(batch_size) * 64
    windows = np.stack([starts - context_window, starts, starts + 64 - context_window], axis=1)
    batch = make_batch(np.arange(4, 400) % 400 + 4, windows, eos_index=2)
    with LiveMemory(except_for=model.parameters()) as memory:
        score_batch(model, batch, CPU)
    planned = eval_activation_bytes(
        config,
        batch_size=batch_size,
        length=64,
        num_scored=64 - context_window,
        tp=1,
        itemsize=dtype.itemsize,
    )
    assert planned == pytest.approx(memory.peak, rel=0.1)


def test_a_context_that_leaves_nothing_to_score_is_refused():
    with pytest.raises(ConfigError, match="--context-window 32: expected 0 to 31"):
        plan_evaluation(
            SMALL,
            num_tokens=100,
            tokens_per_sample=32,
            context_window=32,
            batch_size=1,
            itemsize=4,
            mp=1,
            dp=1,
            speed=None,
        )
