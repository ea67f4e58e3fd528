"""What `TransformerXL` is called in other people's checkpoints. Pure: no file is read here.

Three writers, one module tree under different roots: fairseq's example (`decoder.model.transformer.` and
`decoder.model.crit.`), Hugging Face transformers (`transformer.`, `crit.`) and the original, kimiyoung/transformer-xl
in PyTorch (no root, or `module.` from data parallelism). Where they differ from lmtools or from each other:

- q, k and v are one matrix, `qkv_net`, in this order.
- With `div_val` 1 all clusters are rows of one matrix.
- The original counts the softmax's tails from the back (`head_logprob[:, -i]`), the others from the front.
- The original has one r_w_bias and r_r_bias at its root; Hugging Face lists shared ones there and in every layer.
- Tensors that are shared may be listed under each of their names or under one: safetensors files have them once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerXLConfig

_ROOTS = ("decoder.model.", "model.", "module.")
_OUR_LAYER_TO_THEIRS = {
    "self_attn.r_proj.weight": "dec_attn.r_net.weight",
    "self_attn.out_proj.weight": "dec_attn.o_net.weight",
    "self_attn_layer_norm.weight": "dec_attn.layer_norm.weight",
    "self_attn_layer_norm.bias": "dec_attn.layer_norm.bias",
    "fc1.weight": "pos_ff.CoreNet.0.weight",
    "fc1.bias": "pos_ff.CoreNet.0.bias",
    "fc2.weight": "pos_ff.CoreNet.3.weight",
    "fc2.bias": "pos_ff.CoreNet.3.bias",
    "final_layer_norm.weight": "pos_ff.layer_norm.weight",
    "final_layer_norm.bias": "pos_ff.layer_norm.bias",
}


@dataclass(frozen=True)
class Source:
    """Where a parameter is: a tensor of the checkpoint, or a run of its rows.

    Attributes:
        name: the tensor's name.
        rows: first row and end, or None for all.
        reversed: the rows are in the opposite order.
        copies: other tensors that hold the same, if the checkpoint has them.
    """

    name: str
    rows: tuple[int, int] | None = None
    reversed: bool = False
    copies: tuple[str, ...] = ()

    def take(self, state: Mapping[str, Tensor]) -> Tensor:
        """The parameter, as a view where it can be one."""
        tensor = state[self.name]
        if self.rows is not None:
            tensor = tensor[slice(*self.rows)]
        return tensor.flip(0) if self.reversed else tensor


def parameter_sources(names: Iterable[str], config: TransformerXLConfig, where: str) -> dict[str, Source]:
    """Where a checkpoint of any of the three writers holds each parameter of `TransformerXL(config)`.

    Args:
        names: all entries of the checkpoint's state dict.
        config: the model that it holds.
        where: the file, for messages.

    Returns:
        Source of each parameter; of a shared parameter under its first name in the model.

    Raises:
        CheckpointError: a parameter is missing, or an entry is none.
    """
    present = set(names)
    root = next((root for root in _ROOTS if any(name.startswith(root) for name in present)), "")
    is_original = not any(name.startswith(f"{root}transformer.") for name in present)
    body = root if is_original else f"{root}transformer."
    sources = _cluster_sources(f"{body}word_emb.", f"{root}crit.", config, tails_reversed=is_original)
    for layer in range(config.n_layer):
        sources |= _layer_sources(layer, body, config)
    sources = {name: _listed(source, present) for name, source in sources.items()}

    named = {source.name for source in sources.values()}
    missing = sorted(named - present)
    if missing:
        raise CheckpointError(f"{where}: has no {missing[0]} ({len(missing)} of {len(named)} tensors are missing)")
    copies = {copy for source in sources.values() for copy in source.copies}
    unknown = sorted(present - named - copies - {f"{body}pos_emb.inv_freq"})
    if unknown:
        raise CheckpointError(
            f"{where}: {unknown[0]} is no tensor of a Transformer-XL with these options ({len(unknown)} such entries)"
        )
    return sources


def _listed(source: Source, present: Collection[str]) -> Source:
    """The source under its name, or where only copies of it are listed under the first of these."""
    listed = [name for name in source.copies if name in present]
    if source.name in present or not listed:
        return source
    return replace(source, name=listed[0], copies=tuple(listed[1:]))


def _cluster_sources(
    embedding: str, softmax: str, config: TransformerXLConfig, *, tails_reversed: bool
) -> dict[str, Source]:
    bounds = config.cluster_bounds
    clusters = range(len(bounds))
    one_width = config.div_val == 1
    sources = {}
    for index in clusters:
        table = 0 if one_width else index
        rows = bounds[index] if one_width and len(bounds) > 1 else None
        inputs, outputs = f"{embedding}emb_layers.{table}.weight", f"{softmax}out_layers.{table}.weight"
        if config.not_tied:
            sources[f"embed_tokens.clusters.{index}.weight"] = Source(inputs, rows)
            sources[f"adaptive_softmax.clusters.{index}.weight"] = Source(outputs, rows)
        else:
            sources[f"embed_tokens.clusters.{index}.weight"] = Source(inputs, rows, copies=(outputs,))
        sources[f"adaptive_softmax.clusters.{index}.bias"] = Source(f"{softmax}out_layers.{table}.bias", rows)

    if not one_width or config.embedding_dims[0] != config.d_model:
        shared = clusters[1:] if config.proj_share_all_but_first else []
        for index in clusters[:1] if one_width else clusters:
            copies = tuple(f"{softmax}out_projs.{i}" for i in shared if one_width or i == index)
            sources[f"embed_tokens.projections.{index}"] = Source(f"{embedding}emb_projs.{index}", copies=copies)
        for index in clusters:
            if index not in shared:
                sources[f"adaptive_softmax.projections.{index}"] = Source(f"{softmax}out_projs.{index}")

    if len(bounds) > 1:
        for kind in ("weight", "bias"):
            sources[f"adaptive_softmax.tails.{kind}"] = Source(f"{softmax}cluster_{kind}", reversed=tails_reversed)
    return sources


def _layer_sources(layer: int, body: str, config: TransformerXLConfig) -> dict[str, Source]:
    ours, theirs = f"layers.{layer}.", f"{body}layers.{layer}."
    sources = {ours + name: Source(theirs + other) for name, other in _OUR_LAYER_TO_THEIRS.items()}
    width = config.n_head * config.d_head
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = (index * width, (index + 1) * width)
        sources[f"{ours}self_attn.{name}.weight"] = Source(f"{theirs}dec_attn.qkv_net.weight", rows)
    for name in ("r_w_bias", "r_r_bias"):
        if config.untie_r:
            sources[f"{ours}self_attn.{name}.bias"] = Source(f"{theirs}dec_attn.{name}")
        elif layer == 0:
            copies = tuple(f"{body}layers.{other}.dec_attn.{name}" for other in range(config.n_layer))
            sources[f"{ours}self_attn.{name}.bias"] = Source(f"{body}{name}", copies=copies)
    return sources


def config_from_settings(settings: Mapping[str, Any], vocab_size: int, where: str) -> TransformerXLConfig:
    """The model that fairseq's `cfg.model` or a Hugging Face `config.json` describes.

    Args:
        settings: the options; those that are no field of the model are left aside.
        vocab_size: rows of the embedding, which fairseq's options do not say.
        where: the file, for messages.

    Raises:
        CheckpointError: a variant that lmtools does not have.
        ConfigError: options that contradict each other.
    """
    if settings.get("sample_softmax", -1) > 0:
        raise CheckpointError(f"{where}: sample_softmax={settings['sample_softmax']}, which lmtools does not support")
    values = {field.name: settings[field.name] for field in fields(TransformerXLConfig) if field.name in settings}
    values |= {"vocab_size": vocab_size, "cutoffs": tuple(settings.get("cutoffs", TransformerXLConfig.cutoffs))}
    # Hugging Face says the same under other names, one of them from before 2020.
    for name in ("tie_word_embeddings", "tie_weight"):
        if name in settings:
            values["not_tied"] = not settings[name]
    if "tie_projs" in settings:
        first, *others = settings["tie_projs"]
        if first or len(set(others)) > 1:
            raise CheckpointError(
                f"{where}: tie_projs={settings['tie_projs']}, expected false and then all true or all false"
            )
        values["proj_share_all_but_first"] = bool(others) and others[0]
    return TransformerXLConfig(**values)


def settings_from_shapes(shapes: Mapping[str, Sequence[int]], where: str) -> dict[str, Any]:
    """What the shapes of the original's state dict say about its model, for want of options in the file.

    Cutoffs are among it only if `div_val` is above 1; else the rows do not tell, and the caller has to.

    Args:
        shapes: of all entries of the state dict.
        where: the file, for messages.

    Returns:
        Fields of `TransformerXLConfig`; lengths, `pre_lnorm` and `dropout` cannot be seen.

    Raises:
        CheckpointError: not the original's state dict.
    """
    root = "module." if any(name.startswith("module.") for name in shapes) else ""
    try:
        n_head, d_head = shapes[f"{root}r_w_bias"]
        d_inner, d_model = shapes[f"{root}layers.0.pos_ff.CoreNet.0.weight"]
        tables = [shapes[f"{root}word_emb.emb_layers.0.weight"]]
    except KeyError as error:
        raise CheckpointError(f"{where}: has no {error.args[0]}, expected the original's Transformer-XL") from error
    while (name := f"{root}word_emb.emb_layers.{len(tables)}.weight") in shapes:
        tables.append(shapes[name])
    settings: dict[str, Any] = {
        "vocab_size": sum(rows for rows, _ in tables),
        "d_model": d_model,
        "d_embed": tables[0][1],
        "n_head": n_head,
        "d_head": d_head,
        "d_inner": d_inner,
        "n_layer": sum(name.endswith(".dec_attn.qkv_net.weight") for name in shapes),
        "adaptive": f"{root}crit.cluster_weight" in shapes,
        "untie_r": False,
    }
    if len(tables) > 1:
        settings["div_val"] = tables[0][1] // tables[1][1]
        settings["cutoffs"] = tuple(sum(rows for rows, _ in tables[:count]) for count in range(1, len(tables)))
    return settings
