"""Genuine fairseq loads what lmtools wrote in one part, and computes what lmtools computes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.models.architectures import transformer_lm, transformer_lm_megatron
from lmtools.models.transformer_lm import TransformerLM
from tests.support.arrays import read_npz

SMALL = {"decoder_layers": 2, "decoder_embed_dim": 32, "decoder_ffn_embed_dim": 64, "decoder_attention_heads": 4}
MODELS = {
    "megatron": transformer_lm_megatron(
        144, **SMALL, max_target_positions=32, share_decoder_input_output_embed=True, dropout=0.0
    ),
    "plain, untied": transformer_lm(144, **SMALL, max_target_positions=32),
    "learned positions": transformer_lm(144, **SMALL, max_target_positions=32, decoder_learned_pos=True),
}

LOAD_AND_RUN = """
import sys
import numpy as np
import torch
from fairseq import checkpoint_utils

data, out, *paths = sys.argv[1:]
tokens = torch.arange(4, 24)[None, :]
logits = []
for path in paths:
    [model], cfg, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": data})
    logits.append(model.eval()(tokens)[0].detach().numpy())
np.savez(out, *logits)
"""


def test_fairseq_computes_the_same_logits(fairseq_python: str, golden: Path, tmp_path: Path) -> None:
    tokens = torch.arange(4, 24)[None, :]
    paths, expected = [], []
    for number, config in enumerate(MODELS.values()):
        torch.manual_seed(number)
        model = TransformerLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)  # biases and norms too
        values = dict(model.named_parameters())
        paths += write_fairseq_parts(
            tmp_path / str(number),
            config,
            lambda name, at, values=values: values[name].detach()[at],
            num_parts=1,
            dtype=torch.float32,
        )
        with torch.no_grad():
            expected.append(model(tokens).numpy())

    command = [fairseq_python, "-c", LOAD_AND_RUN, str(golden / "bin"), str(tmp_path / "logits.npz"), *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    logits = read_npz(tmp_path / "logits.npz")
    for name, found, wanted in zip(MODELS, logits.values(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=name)
