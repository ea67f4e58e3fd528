"""`lmtools plan`: what a training run or an evaluation needs, before any machine is asked for it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtools.cli.options import DType, JsonOption, for_tab, print_json, require_none_given
from lmtools.errors import ConfigError
from lmtools.models.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from lmtools.plan.evaluation import EvalPlan
    from lmtools.plan.speed import Speed
    from lmtools.plan.training import TrainingPlan

GIB = 1 << 30


class Kernels(str, Enum):
    """Whose kernels activations are counted for."""

    cuda = "cuda"
    cpu = "cpu"


class OptimizerName(str, Enum):
    """As `lmtools train --optimizer`."""

    adam = "adam"
    sgd = "sgd"
    adafactor = "adafactor"


def plan(
    arch: Annotated[
        str | None, typer.Option(help="Preset, as for `lmtools train`.", autocompletion=for_tab(tuple(ARCHITECTURES)))
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any option of `lmtools train`; options here come before it.")
    ] = None,
    evaluate: Annotated[bool, typer.Option("--eval", help="Plan an evaluation instead of training.")] = False,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Types of the dictionary; 51,200, or 267,744 for transformer_xl.")
    ] = None,
    decoder_layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    decoder_embed_dim: Annotated[int | None, typer.Option(min=1, help="Width of the model.")] = None,
    decoder_ffn_embed_dim: Annotated[int | None, typer.Option(min=1, help="Width of the feed-forward layers.")] = None,
    decoder_attention_heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    share_decoder_input_output_embed: Annotated[
        bool | None,
        typer.Option(
            "--share-decoder-input-output-embed/--no-share-decoder-input-output-embed",
            help="Output projection and embedding are one. Megatron's presets are taken as tied if this is not given.",
        ),
    ] = None,
    n_layer: Annotated[int | None, typer.Option(min=1, help="Transformer-XL: layers.")] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Transformer-XL: width of the model.")] = None,
    n_head: Annotated[int | None, typer.Option(min=1, help="Transformer-XL: attention heads.")] = None,
    d_head: Annotated[int | None, typer.Option(min=1, help="Transformer-XL: width of a head.")] = None,
    d_inner: Annotated[
        int | None, typer.Option(min=1, help="Transformer-XL: width of the feed-forward layers.")
    ] = None,
    d_embed: Annotated[int | None, typer.Option(help="Transformer-XL: width of the first cluster's embedding.")] = None,
    div_val: Annotated[int | None, typer.Option(min=1, help="Transformer-XL: as for `lmtools train`.")] = None,
    cutoffs: Annotated[
        str | None, typer.Option(metavar="<int,int,...>", help="Transformer-XL: first type of each tail cluster.")
    ] = None,
    mem_len: Annotated[int | None, typer.Option(min=0, help="Transformer-XL: positions that are remembered.")] = None,
    ext_len: Annotated[
        int | None, typer.Option(min=0, help="Transformer-XL: tokens before each chunk that are read again.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(min=0, max=1, help="As for `lmtools train`.")] = None,
    dropatt: Annotated[float | None, typer.Option(min=0, max=1, help="Transformer-XL: as for `lmtools train`.")] = None,
    mp: Annotated[
        int | None, typer.Option("--mp", "--model-parallel-size", min=1, help="Ranks that one model is split over.")
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Replicas.")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="0, 2 or 3.")] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel", help="As for `lmtools train`.")
    ] = None,
    checkpoint_activations: Annotated[
        bool | None, typer.Option("--checkpoint-activations", help="As for `lmtools train`.")
    ] = None,
    offload_activations: Annotated[
        bool | None, typer.Option("--offload-activations", help="As for `lmtools train`.")
    ] = None,
    tokens_per_sample: Annotated[int | None, typer.Option(min=1, help="Tokens of a block or window; 1024.")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "--max-sentences", min=1, help="Of one replica; 1, --eval 8.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in a batch of one replica, at most.")] = None,
    update_freq: Annotated[int | None, typer.Option(min=1, help="Batches of one replica in an update.")] = None,
    optimizer: Annotated[OptimizerName | None, typer.Option(help="As for `lmtools train`.")] = None,
    fp16: Annotated[bool | None, typer.Option("--fp16", help="Train in float16.")] = None,
    bf16: Annotated[bool | None, typer.Option("--bf16", help="Train in bfloat16.")] = None,
    memory_efficient_fp16: Annotated[
        bool | None, typer.Option("--memory-efficient-fp16", help="float16 with no float32 copy.")
    ] = None,
    memory_efficient_bf16: Annotated[
        bool | None, typer.Option("--memory-efficient-bf16", help="bfloat16 with no float32 copy.")
    ] = None,
    device: Annotated[
        Kernels, typer.Option(help="Whose kernels activations are counted for; nothing runs on it.")
    ] = Kernels.cuda,
    num_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --eval: tokens of the split; 270,847 if not given.")
    ] = None,
    context_window: Annotated[int | None, typer.Option(min=0, help="With --eval: tokens only seen; none.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="With --eval: what the model computes in; float16 if not given.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="GiB of a device: says whether it fits.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(min=1, max=1e30, help="Operations a second of a device, such as 125e12.")
    ] = None,
    utilisation: Annotated[float, typer.Option(min=0.001, max=1, help="Share of --flops that is reached.")] = 0.4,
    link_bandwidth: Annotated[
        float | None, typer.Option(min=1, max=1e30, help="Bytes a second between devices, such as 25e9.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a run needs: memory of a rank, traffic, operations, time. No GPU and no memory is taken."""
    given: dict[str, Any] = {
        "arch": arch,
        "decoder_layers": decoder_layers,
        "decoder_embed_dim": decoder_embed_dim,
        "decoder_ffn_embed_dim": decoder_ffn_embed_dim,
        "decoder_attention_heads": decoder_attention_heads,
        "share_decoder_input_output_embed": share_decoder_input_output_embed,
        "n_layer": n_layer,
        "d_model": d_model,
        "n_head": n_head,
        "d_head": d_head,
        "d_inner": d_inner,
        "d_embed": d_embed,
        "div_val": div_val,
        "cutoffs": _numbers("--cutoffs", cutoffs),
        "mem_len": mem_len,
        "ext_len": ext_len,
        "dropout": dropout,
        "dropatt": dropatt,
        "mp": mp,
        "dp": dp,
        "zero": zero,
        "sequence_parallel": sequence_parallel,
        "checkpoint_activations": checkpoint_activations,
        "offload_activations": offload_activations,
        "tokens_per_sample": tokens_per_sample,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "update_freq": update_freq,
        "optimizer": optimizer.value if optimizer else None,
        "fp16": fp16,
        "bf16": bf16,
        "memory_efficient_fp16": memory_efficient_fp16,
        "memory_efficient_bf16": memory_efficient_bf16,
    }
    flags = {name: value for name, value in given.items() if value is not None}
    if config is None:
        # What no plan depends on, and what a file would say.
        flags["max_update"] = 1
        is_of_streams = arch == "transformer_xl"
        if is_of_streams:
            flags["task"] = "truncated_bptt_lm"
        if batch_size is None and max_tokens is None:
            flags["batch_size"] = 8 if evaluate and not is_of_streams else 1
    if not evaluate:
        of_eval = {"--num-tokens": num_tokens, "--context-window": context_window, "--dtype": dtype}
        require_none_given(of_eval, "is of an evaluation; give --eval, or leave it out")
    num_tokens, context_window, dtype = num_tokens or 270_847, context_window or 0, dtype or DType.float16
    if link_bandwidth is not None and flops is None:
        raise ConfigError("--link-bandwidth: an estimate of time needs --flops too")

    import torch

    from lmtools.checkpoints.load import require_rows_on_every_rank
    from lmtools.checkpoints.models import model_config
    from lmtools.models.architectures import TransformerXLConfig
    from lmtools.plan.evaluation import eval_document, plan_evaluation, plan_stream_evaluation
    from lmtools.plan.speed import Speed
    from lmtools.plan.training import blocks_in_batch, plan_training, training_document
    from lmtools.train.config import resolve

    run = resolve(config, flags)
    tied = "share_decoder_input_output_embed"
    # fairseq trains Megatron's models in no other way, but its presets do not say so.
    assumed = config is None and tied not in flags and run.train.arch.startswith("transformer_lm_megatron")
    assumed = assumed and not run.model[tied]
    if assumed:
        run = resolve(config, flags | {tied: True})
    if vocab_size is None:
        vocab_size = 267_744 if run.train.task == "truncated_bptt_lm" else 51_200
    model = model_config(run.model, vocab_size)
    require_rows_on_every_rank(model, run.train.mp)
    speed = Speed(flops, utilisation, link_bandwidth) if flops else None
    limit = int(gpu_memory * GIB) if gpu_memory is not None else None
    if evaluate:
        train = run.train
        sizes: dict[str, Any] = {
            "num_tokens": num_tokens,
            "tokens_per_sample": train.tokens_per_sample,
            "batch_size": blocks_in_batch(train.batch_size, train.max_tokens, train.tokens_per_sample),
            "itemsize": getattr(torch, dtype.value).itemsize,
            "mp": train.mp,
            "dp": train.dp,
            "speed": speed,
        }
        if isinstance(model, TransformerXLConfig):
            require_none_given({"--context-window": context_window}, "a stream has a memory instead")
            outcome = plan_stream_evaluation(model, **sizes)
        else:
            outcome = plan_evaluation(model, context_window=context_window, **sizes)
        document = eval_document(outcome, limit)
        lines = _eval_lines(outcome, dtype.value, "chunks" if isinstance(model, TransformerXLConfig) else "windows")
    else:
        training = plan_training(run, vocab_size=vocab_size, speed=speed, device=device.value)
        document = training_document(training, limit)
        lines = _training_lines(training, speed)
    if isinstance(model, TransformerXLConfig):
        document["clusters"] = [end - start for start, end in model.cluster_bounds]
        lines.insert(1, f"clusters               {', '.join(f'{rows:,}' for rows in document['clusters'])} types")
    else:
        document |= {tied: run.model[tied], "assumed": [tied] if assumed else []}
        lines.insert(1, f"output projection      {_output_projection(run.model[tied], assumed)}")
    if as_json:
        print_json(document)
        return
    typer.echo("\n".join(lines))
    if gpu_memory is not None:
        typer.echo(f"{'fits' if document['fits'] else 'does NOT fit'} in {gpu_memory:g} GiB")


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{name} {text}: expected whole numbers with commas between them") from error


def _output_projection(tied: bool, assumed: bool) -> str:
    if assumed:
        return "tied to the embedding, which is assumed; --no-share-decoder-input-output-embed if it is not"
    return "tied to the embedding" if tied else "untied, a matrix of its own"


def _training_lines(plan: TrainingPlan, speed: Speed | None) -> list[str]:
    memory = plan.memory
    lines = [
        f"parameters             {plan.parameters:,}, {plan.parameters_on_rank:,} on a rank, {plan.dtype}",
        f"update                 {plan.tokens_in_update:,} tokens, {plan.batch_size} blocks in a batch of a replica",
        "memory of a rank",
    ]
    for name in ("weights", "gradients", "optimizer", "activations", "workspace", "gathered"):
        lines.append(f"  {name:20} {_gib(getattr(memory, name))}")
    lines.append(f"  {'total':20} {_gib(memory.total)}")
    if memory.host:
        lines.append(f"  {'on the host':20} {_gib(memory.host)}")
    lines.append("sent by a rank in an update")
    lines += [
        f"  {row.axis} {row.kind:17} {_gib(row.sent_bytes)}, {row.count:,} of {_gib(row.message_bytes).strip()} in all"
        for row in plan.traffic
    ] or ["  nothing"]
    lines.append(f"operations of a rank   {plan.flops_in_update:.3g} in an update")
    if plan.time is not None and speed is not None:
        lines.append(
            f"time of an update      {plan.time.seconds:.3g} s: {plan.time.compute_seconds:.3g} s computing at "
            f"{100 * speed.utilisation:g} % of {speed.flops:.3g} FLOP/s, {plan.time.communication_seconds:.3g} s sent"
        )
    return lines


def _eval_lines(plan: EvalPlan, dtype: str, windows: str) -> list[str]:
    lines = [
        f"parameters             {plan.parameters:,}, {plan.parameters_on_rank:,} on a rank, {dtype}",
        f"{windows:22} {plan.num_windows:,} for {plan.tokens_scored:,} tokens, {plan.tokens_read:,} read",
        "memory of a rank",
        f"  weights              {_gib(plan.weights)}",
        f"  activations          {_gib(plan.activations)}",
        f"  total                {_gib(plan.memory)}",
        f"operations             {plan.flops:.3g}",
    ]
    if plan.hours is not None:
        lines.append(f"time                   {plan.hours:.3g} hours, all ranks together")
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:10.3f} GiB"
