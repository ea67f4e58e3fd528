"""Dropout: one mask where ranks hold the same, another where each has its own, and the same again after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmtools.data.batches import Position
from lmtools.parallel.mesh import Mesh
from lmtools.parallel.random import seed_batch, stream_seed
from lmtools.train.data import open_data
from lmtools.train.loop import updates
from lmtools.train.state import TrainState
from lmtools.train.step import forward_backward
from tests.support.ranks import run_ranks
from tests.support.training import advance, cpu_mesh, state_of_noise, tiny_run, whole

EVERYWHERE = {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3}
CPU = torch.device("cpu")


def new_state(flags: dict[str, Any]) -> tuple[TrainState, Mesh]:
    run = tiny_run(**EVERYWHERE, **flags)
    mesh = cpu_mesh(run)
    return state_of_noise(run, mesh, vocab_size=144, dtype=torch.float64), mesh


def masks(flags: dict[str, Any], places: list[str], batches: list[int]) -> dict[str, Tensor]:
    """What each dropout keeps, by place, batch, module and call; and what the heads attend to.

    All heads are made alike on all ranks, so attention differs by its mask alone.
    """
    state, mesh = new_state(flags)
    found: dict[str, Tensor] = {}

    def record(label: str, module: nn.Module, name: str) -> None:
        def after(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls = sum(key.startswith(f"{label} {name} ") for key in found)
            local = output.to_local() if isinstance(output, DTensor) else output
            found[f"{label} {name} {calls}"] = local.detach() != 0

        def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            local = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
            found[f"{label} attended {name} 0"] = local.detach().clone()

        if isinstance(module, nn.Dropout):
            handles.append(module.register_forward_hook(after))
        elif name.endswith("out_proj"):
            handles.append(module.register_forward_pre_hook(before))

    with torch.no_grad():
        for name, parameter in state.parameters.items():
            if name.endswith("v_proj.bias"):
                parameter.fill_(1.0)  # every value of every head is 1: what comes out counts the weights kept
            elif "_proj.weight" in name and "out_proj" not in name:
                parameter.fill_(0.0)
    tokens = torch.arange(4, 4 + 2 * 8).reshape(2, 8)
    for place in places:
        for batch in batches:
            handles: list[Any] = []
            for name, module in state.model.named_modules():
                record(f"{place} {batch}", module, name)
            seed_batch(mesh.device, seed=1, place=place, batch=batch, dp_rank=mesh.dp_rank)
            state.model(tokens)
            for handle in handles:
                handle.remove()
    return found


def of(found: dict[str, Tensor], part: str) -> list[Tensor]:
    chosen = [tensor for name, tensor in found.items() if part in name]
    assert chosen, part
    return chosen


def equal(left: list[Tensor], right: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(left, right, strict=True)]


def test_what_every_tp_rank_holds_loses_the_same_and_what_is_split_does_not():
    first, second = run_ranks(2, masks, {"mp": 2}, ["1.1"], [0])
    assert all(equal(of(first, " dropout "), of(second, " dropout "))), "the embedded input"
    assert all(equal(of(first, ".dropout "), of(second, ".dropout "))), "what a sublayer adds"
    assert not any(equal(of(first, "activation_dropout"), of(second, "activation_dropout")))
    assert not any(equal(of(first, "attended"), of(second, "attended"))), "heads"
    for attended in of(first, "attended"):
        own_heads = attended.unflatten(-1, (2, -1))
        assert not torch.equal(own_heads[..., 0, :], own_heads[..., 1, :]), "nor are two heads of a rank alike"


def test_under_sequence_parallelism_each_rank_has_its_own_part_of_the_sequence():
    first, second = run_ranks(2, masks, {"mp": 2, "sequence_parallel": True}, ["1.1"], [0])
    assert all(equal(of(first, " dropout "), of(second, " dropout "))), "the embedded input is not cut yet"
    assert not any(equal(of(first, ".dropout "), of(second, ".dropout ")))
    assert not any(equal(of(first, "attended"), of(second, "attended")))


def test_replicas_batches_places_layers_and_calls_have_masks_of_their_own():
    first, second = run_ranks(2, masks, {"dp": 2}, ["1.1", "1.2"], [0, 1])
    for part in (" dropout ", "activation_dropout", "attended"):
        assert not any(equal(of(first, part), of(second, part))), "dp ranks"
    for left, right in (("1.1 0", "1.2 0"), ("1.1 0", "1.1 1"), ("1.1 1", "1.2 0")):
        assert not any(equal(of(first, left), of(first, right)))
    in_one_pass = [*of(first, "1.1 0 layers.0.dropout"), *of(first, "1.1 0 layers.1.dropout")]
    assert len(in_one_pass) == 4, "each of two layers drops twice"
    assert len({tuple(mask.flatten().tolist()) for mask in in_one_pass}) == 4


def test_a_place_has_its_masks_whatever_came_before():
    (long,) = run_ranks(1, masks, {}, ["1.1", "1.2", "1.3"], [0])
    (short,) = run_ranks(1, masks, {}, ["1.3"], [0])
    assert all(equal(of(long, "1.3"), of(short, "1.3")))


def gradients(flags: dict[str, Any]) -> dict[str, Tensor]:
    state, mesh = new_state(flags)
    run = tiny_run(**EVERYWHERE, **flags)
    _, batches = next(updates(open_data(run.train), run, Position(1, 3), mesh))
    seed_batch(mesh.device, seed=1, place="1.4", batch=0, dp_rank=mesh.dp_rank)
    forward_backward(state.model, batches[0], mesh.device, loss_scale=1.0)
    return {name: whole(parameter.grad) for name, parameter in state.parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"mp": 2}, marks=pytest.mark.slow),
        pytest.param({"mp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_computed_again_loses_the_same_again(flags):
    kept, again, offloaded = run_ranks(flags.get("mp", 1), three_ways, flags)[0]
    assert kept.keys() == again.keys() == offloaded.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-12, atol=1e-13, msg=name)
        assert torch.equal(offloaded[name], again[name]), name


def three_ways(flags: dict[str, Any]) -> list[dict[str, Tensor]]:
    ways: list[dict[str, Any]] = [{}, {"checkpoint_activations": True}, {"offload_activations": True}]
    return [gradients(flags | way) for way in ways]


def test_a_rank_leaves_the_shared_stream_where_its_peers_do():
    """After split modules the ranks draw the same numbers again, however much each has drawn in between."""
    assert len(set(run_ranks(2, next_draw, {"mp": 2}))) == 1


def next_draw(flags: dict[str, Any]) -> float:
    run = tiny_run(**EVERYWHERE, **flags)
    mesh = cpu_mesh(run)
    data = open_data(run.train)
    state = state_of_noise(run, mesh, vocab_size=149, dtype=torch.float32)  # vocabulary rows are not even
    advance(run, data, state, mesh, 1)
    return float(torch.rand(()))


def test_evaluation_draws_nothing():
    state, _ = new_state({})
    state.model.eval()
    before = torch.random.get_rng_state()
    with torch.no_grad():
        outputs = [state.model(torch.arange(4, 20).reshape(2, 8)) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(*outputs)


def test_seeds_are_the_same_on_every_machine():
    assert stream_seed("batch", 1, "1.1", 0, 0) == 14483937444511116
    assert len({stream_seed("batch", *parts) for parts in [(1, "1.1", 0), (1, "1.10", 0), (11, ".1", 0)]}) == 3
