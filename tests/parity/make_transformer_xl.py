"""Makes transformer_xl.safetensors: small Transformer-XLs run by Hugging Face transformers, losses and gradients.

    pip install torch==2.13.0 'numpy<2' transformers==4.30.2 safetensors
    python tests/parity/make_transformer_xl.py

4.30.2 is one of the last versions that have the model. For each case: the state dict, two segments of tokens, and what
came out of them one after the other, the memory of the first given to the second; gradients are of the sum over both.
Also the names that `save_pretrained(safe_serialization=True)` writes, which has shared tensors once.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "cutoffs": [6, 14],
    "d_model": 10,
    "d_embed": 10,
    "n_head": 2,
    "d_head": 5,
    "d_inner": 12,
    "n_layer": 2,
    "div_val": 1,
    "mem_len": 7,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "init_std": 0.3,
    "proj_init_std": 0.3,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrowing": {"div_val": 2, "same_length": True, "clamp_len": 6},
    "pre_lnorm": {"pre_lnorm": True, "untie_r": False, "clamp_len": 3},
    "projected": {"d_embed": 8, "mem_len": 4},
    "unshared": {"div_val": 2, "tie_word_embeddings": False, "proj_share_all_but_first": False, "mem_len": 0},
    "one_cluster": {"cutoffs": [], "d_embed": 8, "same_length": True},
}
LENGTHS = (6, 5)


def run(options: dict[str, Any], seed: int) -> tuple[dict[str, Any], list[str], dict[str, Tensor]]:
    """One case: its config.json, the names in its model.safetensors, and its tensors.

    They are under `state.`, `grad.`, `tokens.`, `nll.` and `log_probs`.
    """
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    torch.manual_seed(seed)
    config = TransfoXLConfig(**(SHAPE | options))
    model = TransfoXLLMHeadModel(config).train()
    # Biases start at zero, which would hide one that is read from the wrong place.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    tensors = {}
    total, memories = 0.0, None
    for index, length in enumerate(LENGTHS):
        tokens = torch.randint(0, config.vocab_size, (2, length))
        output = model(input_ids=tokens, mems=memories)
        memories = output.mems
        if index == 0:
            # Its softmax sorts losses by cluster when it is given labels, so they are picked here.
            tensors["log_probs"] = output.logits.detach().clone()
        nll = -output.logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        tensors |= {f"tokens.{index}": tokens, f"nll.{index}": nll.detach()}
        total = total + nll.sum()
    total.backward()
    tensors |= {f"state.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    tensors |= {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=True)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            names = sorted(file.keys())
    return config.to_diff_dict(), names, tensors


def main() -> None:
    warnings.simplefilter("ignore")
    configs, names, tensors = {}, {}, {}
    for seed, (case, options) in enumerate(CASES.items()):
        configs[case], names[case], of_case = run(options, seed)
        tensors |= {f"{case}.{name}": tensor.contiguous() for name, tensor in of_case.items()}
    metadata = {"configs": json.dumps(configs), "names": json.dumps(names)}
    save_file(tensors, Path(__file__).with_name("transformer_xl.safetensors"), metadata)


if __name__ == "__main__":
    main()
