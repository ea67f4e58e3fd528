"""Small models that transformers makes, each value far from every other, in folders as it saves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import GPT2Config, GPT2LMHeadModel, XGLMConfig, XGLMForCausalLM
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 20, "vocab_size": 61, "eos_token_id": 60}
XGLM = {"d_model": 24, "attention_heads": 4, "num_layers": 2, "ffn_dim": 40, "vocab_size": 61}
MODELS: dict[str, Any] = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2, untied": GPT2Config(**GPT2, tie_word_embeddings=False, n_inner=40),
    "gpt2, erf": GPT2Config(**GPT2, activation_function="gelu"),
    "xglm": XGLMConfig(**XGLM),
    "xglm, untied, relu": XGLMConfig(**XGLM, tie_word_embeddings=False, activation_function="relu"),
    "xglm, not scaled, tanh": XGLMConfig(**XGLM, scale_embedding=False, activation_function="gelu_pytorch_tanh"),
}


def save(folder: Path, config: Any, **options: Any) -> Any:
    """Make a model whose values, biases and norms included, are all far from each other, and save it."""
    torch.manual_seed(0)
    model = (GPT2LMHeadModel if config.model_type == "gpt2" else XGLMForCausalLM)(config)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder, **options)
    return model
