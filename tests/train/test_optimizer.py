"""The optimizers make fairseq's updates, whole or sharded, in any precision, and their state survives a checkpoint."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lmtools.train.adafactor import Adafactor
from lmtools.train.optimizer import SGD, Adam, local_grad
from tests.support.ranks import run_ranks

ADAM = partial(Adam, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.1)
SGD_ = partial(SGD, momentum=0.9, weight_decay=0.1)
ADAFACTOR = partial(Adafactor, beta1=0.9, weight_decay=0.1, scale_parameter=True)

# A matrix and a vector after 20 updates at 0.01 / sqrt(update), made with fairseq 0.12 on torch 2.13: its Adam (betas
# 0.9, 0.98, eps 1e-4, weight decay 0.1), its Adafactor (weight decay 0.1, scale_parameter and relative_step off), and
# torch's SGD (momentum 0.9, weight decay 0.1), which is fairseq's.
FAIRSEQ = {
    "adam": (
        ADAM,
        "-1.0170843640206504 -0.595190393177384 -0.1760515926645201 0.1938705503837495 0.5757436233561626 "
        "1.019142873255437 0.5137860096303599 1.256323393404796 1.9943892579270668",
    ),
    "sgd": (
        SGD_,
        "-1.0022577003234783 -0.5591618054878353 -0.15762088896062149 0.16512282981191848 0.5497266970860979 "
        "0.997187083013472 0.4815166523913461 1.203527448610829 1.9253405520056335",
    ),
    "adafactor": (
        partial(Adafactor, weight_decay=0.1),
        "-1.0068642972786859 -0.5928275868082066 -0.18574277576634926 0.19431440571144148 0.5805526458808303 "
        "1.000911369799492 0.5099617642123114 1.2484763711143787 1.9908776203421852",
    ),
    "adafactor with a first moment": (
        partial(Adafactor, weight_decay=0.1, beta1=0.9),
        "-1.0047371560528668 -0.5907020788251114 -0.18829554886021807 0.19265602556158876 0.5839025769390875 "
        "1.0016500739589365 0.5082616146777843 1.246294530601858 1.9888559904294534",
    ),
}
FAIRSEQ_ADAM_FLOAT16 = (
    "-1.0166015625 -0.595703125 -0.176025390625 0.19384765625 0.57666015625 1.01953125 0.51318359375 1.2587890625 "
    "1.9970703125"
)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    matrix = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    return [nn.Parameter(value.to(dtype)) for value in (matrix, torch.linspace(0.5, 2, 3, dtype=torch.float64))]


def gradients(update: int) -> list[Tensor]:
    matrix = torch.sin(torch.arange(6, dtype=torch.float64).view(2, 3) * 1.7 + update)
    return [matrix, torch.cos(torch.arange(3, dtype=torch.float64) * 0.9 + 2 * update).mul(0.01)]


def train(optimizer: torch.optim.Optimizer, updates: range, grad_scale: float = 1.0) -> None:
    for update in updates:
        (group,) = optimizer.param_groups
        group["lr"] = 0.01 / math.sqrt(update)
        for parameter, grad in zip(group["params"], gradients(update), strict=True):
            parameter.grad = (grad * grad_scale).to(parameter.dtype)
        optimizer.step(grad_scale=grad_scale)


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def flat(parameters: list[nn.Parameter]) -> list[float]:
    return torch.cat([parameter.detach().double().flatten() for parameter in parameters]).tolist()


@pytest.mark.parametrize("name", FAIRSEQ)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_twenty_updates_are_fairseqs(name, dtype, tolerance):
    make, expected = FAIRSEQ[name]
    own = parameters(dtype)
    train(make(own), range(1, 21))
    assert flat(own) == pytest.approx(numbers(expected), abs=tolerance)


def test_memory_efficient_float16_rounds_the_parameters_themselves_as_fairseq_does():
    own = parameters(torch.float16)
    optimizer = ADAM(own, master_weights=False)
    train(optimizer, range(1, 21))
    assert flat(own) == pytest.approx(numbers(FAIRSEQ_ADAM_FLOAT16), abs=1e-3)
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert "master" not in optimizer.state[own[0]]


@pytest.mark.parametrize("make", [ADAM, SGD_, ADAFACTOR], ids=["adam", "sgd", "adafactor"])
def test_master_weights_keep_what_low_precision_would_round_away(make):
    low, full = parameters(torch.bfloat16), [nn.Parameter(value.float()) for value in parameters(torch.bfloat16)]
    optimizer, reference = make(low), make(full)
    for update in range(1, 21):
        for one, other, grad in zip(low, full, gradients(update), strict=True):
            one.grad = grad.bfloat16()
            other.grad = one.grad.float()
        optimizer.step()
        reference.step()
    masters = [optimizer.state[parameter]["master"] for parameter in low]
    assert flat(masters) == pytest.approx(flat(full), abs=1e-6)
    assert flat(low) == flat([master.bfloat16() for master in masters])


@pytest.mark.parametrize("make", [ADAM, SGD_, ADAFACTOR], ids=["adam", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_gradients_are_divided_by_what_they_were_multiplied_by(make, dtype):
    scaled, plain = parameters(dtype), parameters(dtype)
    train(make(scaled), range(1, 6), grad_scale=1024.0)
    train(make(plain), range(1, 6))
    assert flat(scaled) == pytest.approx(flat(plain), abs=1e-12)


def test_float16_gradients_are_unscaled_in_float32():
    """A gradient below float16's least number, 6e-8, is what the loss scale is there for."""
    (weight,) = own = [nn.Parameter(torch.ones(1, dtype=torch.float16))]
    optimizer = SGD(own, lr=1e8, master_weights=False)
    weight.grad = torch.tensor([1e-3], dtype=torch.float16)
    optimizer.step(grad_scale=2.0**20)
    assert weight.item() == pytest.approx(1 - 1e8 * 1e-3 / 2**20, abs=1e-3)


def test_adafactors_rate_is_scaled_by_each_parameters_own_size():
    """A parameter's update does not depend on which parameters stand before it."""
    together, alone = parameters(torch.float64), parameters(torch.float64)[1:]
    options = {"lr": 0.01, "scale_parameter": True}
    both, last = Adafactor(together, **options), Adafactor(alone, **options)
    for update in (1, 2):
        for parameter, grad in zip(together, gradients(update), strict=True):
            parameter.grad = grad.clone()
        alone[0].grad = gradients(update)[1]
        both.step()
        last.step()
    assert flat(together[1:]) == flat(alone)


def test_parameters_that_join_later_count_their_own_updates():
    late, expected = parameters(torch.float64), parameters(torch.float64)
    optimizer, reference = ADAM(late), ADAM(expected[1:])
    late[0].grad = gradients(1)[0]
    optimizer.step()
    late[1].grad, expected[1].grad = gradients(2)[1], gradients(2)[1]
    optimizer.step()
    reference.step()
    assert flat(late[1:]) == flat(expected[1:])
    assert [int(optimizer.state[parameter]["step"]) for parameter in late] == [2, 1]


@pytest.mark.parametrize("make", [ADAM, SGD_, ADAFACTOR], ids=["adam", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ten_updates_and_ten_after_a_reload_are_twenty(make, dtype):
    straight, first = parameters(dtype), parameters(dtype)
    train(make(straight), range(1, 21))
    optimizer = make(first)
    train(optimizer, range(1, 11))
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = make(second)
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, range(11, 21))
    assert flat(second) == flat(straight)


def test_loading_keeps_this_runs_options():
    saved = Adam(parameters(torch.float32), weight_decay=0.1)
    saved.create_state()
    optimizer = Adam(parameters(torch.float32), weight_decay=0.5)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_state_made_early_counts_no_update_and_changes_nothing():
    early, late = parameters(torch.float16), parameters(torch.float16)
    optimizer = ADAM(early)
    optimizer.create_state()
    assert flat(early) == flat(late)
    train(optimizer, range(1, 4))
    train(ADAM(late), range(1, 4))
    assert flat(early) == flat(late)


# Sharded. The model is small and awkward: 5 and 7 rows are divided by no number of ranks.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(self.embed(tokens)))))


def make_model(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def shard(model: Model, tp_size: int, *, fsdp: bool) -> Model:
    mesh = init_device_mesh("cpu", (4 // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    if tp_size > 1:
        styles = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], styles)
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def update_model(model: nn.Module, optimizer: torch.optim.Optimizer, updates: range) -> None:
    """Every rank draws the same whole gradients and keeps its part."""
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                # `redistribute` knows the two-fold cut by dp and tp, which `distribute_tensor` does not.
                mesh = parameter.device_mesh
                spread = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
                grad = spread.redistribute(placements=parameter.placements)
            parameter.grad = grad
        optimizer.step()


OPTIMIZERS: dict[str, Any] = {"adam": ADAM, "sgd": SGD_, "adafactor": ADAFACTOR}


MESHES = {"tp 4": (4, False), "tp 2": (2, False), "dp 2 x tp 2": (2, True), "dp 4": (1, True)}


def sharded_weights() -> dict[tuple[str, str], dict[str, Tensor]]:
    weights = {}
    for mesh, (tp_size, fsdp) in MESHES.items():
        for name, make in OPTIMIZERS.items():
            model = shard(make_model(torch.float64), tp_size, fsdp=fsdp)
            update_model(model, make(model.parameters(), lr=0.01), range(3))
            weights[mesh, name] = {key: whole(value) for key, value in model.named_parameters()}
    return weights


@pytest.fixture(scope="module")
def sharded() -> list[dict[tuple[str, str], dict[str, Tensor]]]:
    """What each of 4 ranks has for each mesh and optimizer: one start of processes for them all."""
    return run_ranks(4, sharded_weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_updates_are_the_whole_ones(sharded, mesh, name):
    model = make_model(torch.float64)
    update_model(model, OPTIMIZERS[name](model.parameters(), lr=0.01), range(3))
    for weights in sharded:
        for key, value in model.named_parameters():
            torch.testing.assert_close(weights[mesh, name][key], value.detach(), rtol=0, atol=1e-12)


def reloaded_weights(folder: Path, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Two updates on dp 2 x tp 2, a checkpoint, the third one on tp 4."""
    weights = {}
    for name, make in OPTIMIZERS.items():
        first = shard(make_model(dtype), 2, fsdp=True)
        optimizer = make(first.parameters(), lr=0.01)
        update_model(first, optimizer, range(2))
        state = {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, optimizer)}
        save(state, checkpoint_id=folder / name)

        second = shard(make_model(dtype), 4, fsdp=False)
        resumed = make(second.parameters(), lr=0.01)
        resumed.create_state()
        state = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, resumed)}
        load(state, checkpoint_id=folder / name)
        set_optimizer_state_dict(second, resumed, state["optimizer"])
        second.load_state_dict(state["model"])
        update_model(second, resumed, range(2, 3))
        weights[name] = {key: whole(value) for key, value in second.named_parameters()}
    return weights


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), pytest.param(torch.float16, 1e-3, marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_on_another_mesh(dtype, tolerance, tmp_path):
    reloaded = run_ranks(4, reloaded_weights, tmp_path, dtype)
    for name, make in OPTIMIZERS.items():
        model = make_model(dtype)
        update_model(model, make(model.parameters(), lr=0.01), range(3))
        for weights in reloaded:
            for key, value in model.named_parameters():
                torch.testing.assert_close(weights[name][key], value.detach(), rtol=0, atol=tolerance)


def partial_gradient() -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(3, dtype=torch.float64), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(3, dtype=torch.float64), mesh, [Partial()], run_check=False)
    local_grad(parameter).mul_(1.5)
    SGD([parameter], lr=0.25).step()
    return whole(parameter)


def test_a_gradient_of_which_each_rank_has_an_addend_is_added_up_once():
    """As of a norm's weight when the sequence is split over the ranks: 1 + 1, times 1.5 in place."""
    for weight in run_ranks(2, partial_gradient):
        assert weight.tolist() == [1 - 0.25 * (1 + 1) * 1.5] * 3
