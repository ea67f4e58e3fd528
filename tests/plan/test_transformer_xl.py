"""The arithmetic of a Transformer-XL's memory, traffic and work against what real models take, on CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lmtools.checkpoints.models import model_config
from lmtools.models.architectures import TransformerXLConfig, transformer_xl
from lmtools.models.flops import training_flops_per_token
from lmtools.models.transformer_xl import TransformerXL
from lmtools.plan import transformer_xl as plan
from lmtools.plan.evaluation import plan_stream_evaluation
from lmtools.plan.memory import TrainingMemory, num_elements, parameter_shapes, training_memory
from lmtools.plan.traffic import training_traffic
from lmtools.plan.transformer_xl import Batch
from lmtools.train.batch import Batch as Chunks
from lmtools.train.precision import parameter_dtype
from lmtools.train.step import forward_backward, loss_sum
from tests.support.live_memory import LiveMemory
from tests.support.ranks import run_ranks
from tests.support.training import cpu_mesh, state_of_noise, tiny_run

SHAPE: dict[str, Any] = {"n_layer": 3, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 80, "cutoffs": (100, 200)}
NUM_TYPES, LENGTH, MEM_LEN = 500, 32, 24
WIKITEXT_103 = transformer_xl(267_744, n_layer=16, d_model=410, n_head=10, d_head=41, d_inner=2100, mem_len=640)


def chunk(batch_size: int, length: int = LENGTH) -> Tensor:
    """Tokens by Zipf's law."""
    weights = 1 / torch.arange(1, NUM_TYPES + 1)
    generator = torch.Generator().manual_seed(1)
    return weights.multinomial(batch_size * length, replacement=True, generator=generator).view(batch_size, length)


def chunk_after_context(config: TransformerXLConfig, batch_size: int) -> tuple[Tensor, Tensor]:
    """What a step reads, with what it reads again, and what it predicts."""
    tokens = chunk(batch_size, config.ext_len + LENGTH)
    return tokens, tokens[:, config.ext_len :].clone(memory_format=torch.contiguous_format)


def in_clusters(config: TransformerXLConfig, tokens: Tensor) -> list[int]:
    return [int(((tokens >= start) & (tokens < end)).sum()) for start, end in config.cluster_bounds]


def small_model(dtype: torch.dtype = torch.float32, **overrides: Any) -> TransformerXL:
    model = TransformerXL(transformer_xl(NUM_TYPES, **(SHAPE | {"mem_len": MEM_LEN} | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model.to(dtype)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1, "dropatt": 0.1},
    "pre-norm": {"pre_lnorm": True, "dropout": 0.1},
    "narrowing": {"div_val": 2},
    "projected": {"d_embed": 16},
    "one cluster": {"cutoffs": ()},
    "no memory": {"mem_len": 0},
    "a chunk's memory": {"mem_len": LENGTH},
    "more memory": {"mem_len": LENGTH + 8},
    "one row": {"batch_size": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "read again": {"ext_len": 8, "dropout": 0.1},
    "read again, one row": {"ext_len": 8, "batch_size": 1, "pre_lnorm": True},
    "read again, a chunk's memory": {"ext_len": 8, "mem_len": LENGTH},
    "read again, more memory": {"ext_len": 40, "mem_len": LENGTH + 8, "div_val": 2, "dropatt": 0.1},
    "read again, recomputed": {"checkpoint_activations": True, "ext_len": 8, "mem_len": LENGTH + 8},
    "recomputed": {"checkpoint_activations": True, "dropout": 0.1},
    "recomputed, more memory": {"checkpoint_activations": True, "mem_len": LENGTH + 8},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_are_those_of_a_real_model(variant):
    """After as many steps as fill the memory, and leave none of those that were not full."""
    options = dict(VARIANTS[variant])
    again, batch_size = options.pop("checkpoint_activations", False), options.pop("batch_size", 4)
    dtype = options.pop("dtype", torch.float32)
    model = small_model(dtype, **options).train()
    model.checkpoint_activations = again
    tokens, targets = chunk_after_context(model.config, batch_size)
    with LiveMemory(except_for=model.parameters()) as memory:
        memories = None
        for _ in range(3):
            nll, memories = model(tokens, targets, memories)
            del nll
        nll, after = model(tokens, targets, memories)
        kept = memory.now
    assert nll.isfinite().all()
    assert len(after) == len(memories)
    planned = plan.activation_bytes(
        model.config,
        Batch(batch_size, LENGTH, tp=1, itemsize=dtype.itemsize, mask=dtype.itemsize),
        checkpoint_activations=again,
        in_clusters=in_clusters(model.config, targets),
    )
    # Mean and deviation of both norms are in float32 on a GPU, which is planned; on a CPU in the model's dtype.
    smaller_here = model.config.n_layer * 2 * 2 * (4 - dtype.itemsize) * tokens.numel()
    assert planned == kept + smaller_here


def test_a_gpu_keeps_a_byte_of_a_mask():
    config = replace(WIKITEXT_103, dropout=0.1)
    on_cpu, on_gpu = (plan.activation_bytes(config, Batch(4, 64, 1, 2, mask)) for mask in (2, 1))
    n = 4 * 64
    assert on_cpu - on_gpu == n * (16 * (2 * 410 + 2100) + 2 * 410)


def test_what_is_offloaded_is_no_longer_on_the_device():
    batch = Batch(4, LENGTH, 1, 4, 1)
    kept = plan.activation_bytes(WIKITEXT_103, batch, checkpoint_activations=True)
    offloaded = plan.activation_bytes(WIKITEXT_103, batch, checkpoint_activations=True, offload_activations=True)
    rows = 4 * (LENGTH + 2 * (640 + LENGTH))
    assert kept - offloaded == 16 * rows * 410 * 4
    assert plan.host_bytes(WIKITEXT_103, batch) == 16 * 4 * (LENGTH + 2 * 640) * 410 * 4


# --- a whole run ---


RUN: dict[str, Any] = {"arch": "transformer_xl", **SHAPE, "mem_len": MEM_LEN, "tokens_per_sample": LENGTH}


def planned(flags: dict[str, Any]) -> TrainingMemory:
    run = tiny_run(**RUN | flags)
    return training_memory(run.train, model_config(run.model, NUM_TYPES), batch_size=4, device="cpu")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_by_a_run(flags: dict[str, Any]) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients and optimizer state on this rank, and the peak of everything."""
    run = tiny_run(**RUN | flags)
    mesh = cpu_mesh(run)
    state = state_of_noise(run, mesh, vocab_size=NUM_TYPES, dtype=parameter_dtype(run.train))
    parameters = list(state.model.parameters())
    state.optimizer.create_state()
    batch = Chunks(None, *chunk_after_context(state.model.config, 4), 4 * LENGTH)  # type: ignore[arg-type]
    memories = None
    with LiveMemory(except_for=[local(parameter.detach()) for parameter in parameters]) as memory:
        for _ in range(3):
            _, memories = forward_backward(state.model, batch, mesh.device, loss_scale=1.0, memories=memories)
        state.optimizer.step()
    gradients = sum(local(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None)
    states = [value for entry in state.optimizer.state.values() for value in entry.values()]
    weights, optimizer = sum(local(p).nbytes for p in parameters), sum(local(value).nbytes for value in states)
    return weights, gradients, optimizer, memory.peak + weights + optimizer


@pytest.mark.parametrize(
    "flags",
    [{"bf16": True}, {"mp": 2}, pytest.param({"dp": 2, "zero": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_weights_gradients_and_optimizer_state_are_exact(flags):
    """To the byte, on the first rank."""
    [first, *_] = run_ranks(flags.get("mp", 1) * flags.get("dp", 1), held_by_a_run, flags)
    found = planned(flags)
    assert (found.weights, found.gradients, found.optimizer) == first[:3]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"checkpoint_activations": True},
        {"n_layer": 6, "mem_len": 64},
        {"d_inner": 600},
        {"cutoffs": ()},
        {"bf16": True},
        {"ext_len": 20},
        {"ext_len": 20, "checkpoint_activations": True},
    ],
    ids=str,
)
def test_total_is_at_least_the_peak_of_a_real_update_and_little_more(flags):
    *_, peak = held_by_a_run(flags)
    total = planned(flags).total
    assert peak <= total * 1.01
    assert total <= peak * 1.2


def test_the_published_model():
    assert num_elements(parameter_shapes(WIKITEXT_103)) == 151_123_537


# --- traffic ---


class AllReduces(TorchDispatchMode):
    """The number of elements of each all-reduce of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) == "_c10d_functional.all_reduce.default" and args[0].dim() > 1:
            self.elements[args[0].numel()] += 1
        return function(*args, **(kwargs or {}))


def all_reduces_of_a_batch(flags: dict[str, Any]) -> dict[int, int]:
    run = tiny_run(**RUN | flags, mp=2)
    mesh = cpu_mesh(run)
    state = state_of_noise(run, mesh, vocab_size=NUM_TYPES, dtype=torch.float32)
    batch = Chunks(None, *chunk_after_context(state.model.config, 4), 4 * LENGTH)  # type: ignore[arg-type]
    _, memories = loss_sum(state.model, batch, mesh.device)
    with AllReduces() as seen:
        loss_sum(state.model, batch, mesh.device, memories)[0].backward()  # type: ignore[no-untyped-call]
    return dict(seen.elements)


@pytest.mark.parametrize(
    ("pre_lnorm", "checkpoint_activations"),
    [(False, True), *(pytest.param(*flags, marks=pytest.mark.slow) for flags in [(False, False), (True, True)])],
)
def test_a_batch_makes_the_planned_all_reduces(pre_lnorm, checkpoint_activations):
    flags = {"pre_lnorm": pre_lnorm, "checkpoint_activations": checkpoint_activations, "div_val": 2, "ext_len": 8}
    [found, *_] = run_ranks(2, all_reduces_of_a_batch, flags)
    run = tiny_run(**RUN | flags, mp=2)
    model = model_config(run.model, NUM_TYPES)
    assert isinstance(model, TransformerXLConfig)
    sizes = {"batch_size": 4, "length": LENGTH, "checkpoint_activations": checkpoint_activations}
    assert found == Counter(
        plan.tp_all_reduces(model, **sizes, in_clusters=in_clusters(model, chunk_after_context(model, 4)[1]))
    )
    [row] = training_traffic(run.train, model, batch_size=4)
    assert (row.axis, row.kind, row.count) == ("tp", "all-reduce", sum(found.values()))
    assert row.message_bytes == round(4 * sum(plan.tp_all_reduces(model, **sizes)))


# --- evaluation ---


@pytest.mark.parametrize(
    "options", [{}, {"div_val": 2}, {"cutoffs": (), "d_embed": 16}, {"div_val": 2, "ext_len": 20}], ids=str
)
def test_operations_are_those_that_torch_counts(options):
    model = small_model(**options).eval()
    tokens, targets = chunk_after_context(model.config, 2)
    with torch.no_grad():
        _, memories = model(tokens, targets, None, keep_projections=True)
        with FlopCounterMode(display=False) as counter:
            model(tokens, targets, memories, keep_projections=True)
    counts = in_clusters(model.config, targets)
    assert counter.get_total_flops() == plan.evaluation_flops(
        model.config, batch_size=2, length=LENGTH, in_clusters=counts
    )


@pytest.mark.parametrize("options", [{}, {"ext_len": 20}, {"ext_len": 20, "same_length": True}], ids=str)
def test_operations_of_training_are_those_that_torch_counts(options):
    """But for what is left out: position keys, which a batch shares, and keys that a query does not look at."""
    model = small_model(cutoffs=(), **options)
    config, batch_size = model.config, 2
    tokens, targets = chunk_after_context(config, batch_size)
    _, memories = model(tokens, targets)
    _, memories = model(tokens, targets, memories)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets, memories)
    num_read, width = config.ext_len + LENGTH, config.n_head * config.d_head
    num_keys = config.mem_len + num_read
    seen = config.mem_len if config.same_length else config.mem_len + (num_read + 1) / 2
    left_out = 2 * (num_keys + 1) * config.d_model * width + 2 * batch_size * num_read * width * (
        3 * num_keys + 1 - 3 * seen
    )
    fields = {name: value for name, value in asdict(config).items() if name != "vocab_size"}
    for_a_token = training_flops_per_token(vocab_size=NUM_TYPES, tokens_per_sample=LENGTH, fields=fields)
    counted = counter.get_total_flops() - config.n_layer * left_out
    assert for_a_token == pytest.approx(3 * counted / targets.numel(), rel=1e-12)


@pytest.mark.parametrize(
    ("mem_len", "ext_len", "num_rows"),
    [(MEM_LEN, 0, 1), (MEM_LEN, 0, 4), (200, 0, 1), (200, 0, 4), (MEM_LEN, 40, 4), (200, 40, 1)],
)
def test_memory_is_close_to_a_real_evaluations(mem_len, ext_len, num_rows):
    model = small_model(mem_len=mem_len, ext_len=ext_len).eval()
    tokens, targets = chunk_after_context(model.config, num_rows)
    with torch.no_grad(), LiveMemory(except_for=model.parameters()) as memory:
        memories = None
        for _ in range(mem_len // LENGTH + 3):
            _, memories = model(tokens, targets, memories, keep_projections=True)
    planned = plan.evaluation_activation_bytes(model.config, Batch(num_rows, LENGTH, 1, 4, 0))
    assert planned == pytest.approx(memory.peak, rel=0.15)


def test_the_published_evaluation():
    found = plan_stream_evaluation(
        WIKITEXT_103, num_tokens=245_569, tokens_per_sample=64, batch_size=1, itemsize=4, mp=1, dp=1, speed=None
    )
    assert (found.num_windows, found.tokens_scored, found.tokens_read) == (3838, 245_569, 245_569)
    assert found.weights == 4 * 151_123_537
    assert found.hours is None


def test_what_is_read_again_is_read_by_every_chunk():
    sizes: dict[str, Any] = {"num_tokens": 6400, "tokens_per_sample": 64, "batch_size": 1, "itemsize": 4}
    ranks: dict[str, Any] = {"mp": 1, "dp": 1, "speed": None}
    once, twice = (
        plan_stream_evaluation(replace(WIKITEXT_103, ext_len=ext_len), **sizes, **ranks) for ext_len in (0, 64)
    )
    assert (twice.tokens_scored, twice.num_windows, twice.tokens_read) == (6400, 100, 12_800)
    assert once.tokens_read == 6400
    assert 1.2 < twice.flops / once.flops < 2, "the softmax once, the layers twice"
    assert twice.activations > once.activations


def test_tokens_are_spread_over_clusters_by_zipfs_law():
    counts = plan.tokens_in_clusters(WIKITEXT_103, 1000)
    assert sum(counts) == pytest.approx(1000)
    exact = [sum(1 / rank for rank in range(start + 1, end + 1)) for start, end in WIKITEXT_103.cluster_bounds]
    assert counts == pytest.approx([1000 * weight / sum(exact) for weight in exact], rel=1e-6)
