"""State dicts of small Transformer-XLs as Hugging Face and the original write them, without either program."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtools.models.architectures import TransformerXLConfig, transformer_xl

D_MODEL, N_HEAD, D_HEAD, D_INNER, VOCAB_SIZE = 8, 2, 3, 12, 13


def config_of(**overrides: Any) -> TransformerXLConfig:
    shape = {"n_layer": 2, "d_model": D_MODEL, "n_head": N_HEAD, "d_head": D_HEAD, "d_inner": D_INNER}
    return transformer_xl(VOCAB_SIZE, **({"cutoffs": (5, 8)} | shape | overrides))


def huggingface_state(config: TransformerXLConfig) -> dict[str, Tensor]:
    """A state dict as TransfoXLLMHeadModel writes it, shared tensors under all their names; every number is unique."""
    numbers = iter(range(1, 1_000_000))

    def tensor(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([float(next(numbers)) for _ in range(count)]).view(shape)

    state = {}
    dims, width = config.embedding_dims, config.n_head * config.d_head
    tables = (
        [(VOCAB_SIZE, dims[0])]
        if config.div_val == 1
        else [(end - start, dim) for (start, end), dim in zip(config.cluster_bounds, dims, strict=True)]
    )
    for index, shape in enumerate(tables):
        state[f"transformer.word_emb.emb_layers.{index}.weight"] = tensor(*shape)
        state[f"crit.out_layers.{index}.weight"] = (
            tensor(*shape) if config.not_tied else state[f"transformer.word_emb.emb_layers.{index}.weight"]
        )
        state[f"crit.out_layers.{index}.bias"] = tensor(shape[0])
    if config.div_val > 1 or dims[0] != D_MODEL:
        for index in range(len(tables)):
            state[f"transformer.word_emb.emb_projs.{index}"] = tensor(D_MODEL, dims[index])
        for index, dim in enumerate(dims):
            shared = index > 0 and config.proj_share_all_but_first
            owner = index if config.div_val > 1 else 0
            state[f"crit.out_projs.{index}"] = (
                state[f"transformer.word_emb.emb_projs.{owner}"] if shared else tensor(D_MODEL, dim)
            )
    if len(dims) > 1:
        state["crit.cluster_weight"] = tensor(len(dims) - 1, dims[0])
        state["crit.cluster_bias"] = tensor(len(dims) - 1)
    if not config.untie_r:
        state |= {f"transformer.{name}": tensor(N_HEAD, D_HEAD) for name in ("r_w_bias", "r_r_bias")}
    for index in range(config.n_layer):
        layer = f"transformer.layers.{index}."
        for name in ("r_w_bias", "r_r_bias"):
            state[f"{layer}dec_attn.{name}"] = (
                tensor(N_HEAD, D_HEAD) if config.untie_r else state[f"transformer.{name}"]
            )
        state |= {
            f"{layer}dec_attn.qkv_net.weight": tensor(3 * width, D_MODEL),
            f"{layer}dec_attn.r_net.weight": tensor(width, D_MODEL),
            f"{layer}dec_attn.o_net.weight": tensor(D_MODEL, width),
            f"{layer}pos_ff.CoreNet.0.weight": tensor(D_INNER, D_MODEL),
            f"{layer}pos_ff.CoreNet.0.bias": tensor(D_INNER),
            f"{layer}pos_ff.CoreNet.3.weight": tensor(D_MODEL, D_INNER),
            f"{layer}pos_ff.CoreNet.3.bias": tensor(D_MODEL),
        }
        for norm in ("dec_attn", "pos_ff"):
            state |= {f"{layer}{norm}.layer_norm.{kind}": tensor(D_MODEL) for kind in ("weight", "bias")}
    return state | {"transformer.pos_emb.inv_freq": tensor(D_MODEL // 2)}


def original_state(config: TransformerXLConfig) -> dict[str, Tensor]:
    """The same model as kimiyoung/transformer-xl writes it: biases at the root, tails counted from the back."""
    state = {
        name.removeprefix("transformer."): tensor.flip(0) if "cluster_" in name else tensor
        for name, tensor in huggingface_state(config).items()
    }
    return {
        name: tensor for name, tensor in state.items() if not name.endswith(("dec_attn.r_w_bias", "dec_attn.r_r_bias"))
    }


def write_huggingface_folder(folder: Path, config: TransformerXLConfig) -> None:
    """A folder as transformers 4.30 saves it, with weights that are small enough for probabilities above zero."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {**asdict(config), "model_type": "transfo-xl", "d_embed": D_MODEL, "tgt_len": 4}
    (folder / "config.json").write_text(json.dumps(options))
    state = {name: torch.sin(tensor) for name, tensor in huggingface_state(config).items()}
    torch.save(state, folder / "pytorch_model.bin")


def vocabulary_fields(words: Sequence[str]) -> dict[str, Any]:
    """What a TransfoXLTokenizer's vocab.pkl holds of its words; it holds much more, which says nothing of them."""
    counter = Counter({word: 100 - row for row, word in enumerate(words)})
    rows = OrderedDict((word, row) for row, word in enumerate(words))
    return {"counter": counter, "special": ["<eos>"], "lower_case": False, "idx2sym": list(words), "sym2idx": rows}
