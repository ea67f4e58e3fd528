"""A plan and a mesh, applied to a module that knows neither.

The order is always: build the module in `without_memory`, `parallelize` it, `materialize` its parameters from a
checkpoint or from `seeded_values`. No rank ever holds more of the model than its share and one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.overrides import TorchFunctionMode

from lmtools.parallel.plans import ModulePatterns, Plan, SequencePlan, Split, matches_any, split_of

ReadSlice = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads part of a whole (unsplit) parameter: its name and one slice for each dimension."""

InitializeParameter = Callable[[str, Tensor, torch.Generator], None]
"""Fills a whole parameter, given its name, from the generator alone."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are built within have parameters on the meta device: shapes, but no memory and no values."""
    with torch.device("meta"), _NoInitialValues():
        yield


class _NoInitialValues(TorchFunctionMode):
    """Skips torch.nn.init: on the meta device nothing is there to fill, and trying imports all of torch's compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def parallelize(
    model: nn.Module,
    plan: Plan,
    tp_mesh: DeviceMesh,
    *,
    shared_input: ModulePatterns = (),
    sequence_plan: SequencePlan | None = None,
) -> None:
    """Split a model over the tensor-parallel ranks, in place. Every rank of `tp_mesh` must call it.

    Vocabularies that the ranks do not divide are cut unevenly, as DTensor does, so no row is ever added.

    Args:
        model: any module whose parameters `plan` names; parameters may be on the meta device.
        plan: the model's table in `lmtools.parallel.plans`.
        tp_mesh: one-dimensional mesh of the tp ranks.
        shared_input: modules that are given what several column-split layers in them read.
        sequence_plan: split what lies between the split layers along the sequence (Korthikanti et al. 2022); the ranks
            must divide the length of every batch.
    """
    ties = _tied_names(model)
    # Between the layers an activation is whole on every rank, or each rank has its part of the sequence (dimension 1).
    between: Placement = Replicate() if sequence_plan is None else Shard(1)
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            within = matches_any(name.rpartition(".")[0], shared_input)
            style = _style(module, split_of(f"{name}.weight", plan), between, within_shared_input=within)
            if style is not None:
                styles[name] = style
        elif set(dict(module.named_parameters(recurse=False))) == {"bias"}:
            assert split_of(f"{name}.bias", plan) is Split.COLUMN, (
                f"{name}: a bias alone is split with what it is added to"
            )
            styles[name] = _ColumnBias()
        elif matches_any(name, shared_input):
            styles[name] = _SharedInput(between)
    parallelize_module(model, tp_mesh, styles)
    if sequence_plan is not None:
        _split_sequence(model, tp_mesh, sequence_plan)
    # Splitting replaced each module's parameters by its own DTensors: what was one tensor must be one again.
    for first, *others in ties:
        for other in others:
            _set_parameter(model, other, model.get_parameter(first))


def _style(module: nn.Module, split: Split, between: Placement, *, within_shared_input: bool) -> ParallelStyle | None:
    match split:
        case Split.COLUMN if within_shared_input:
            return _ColumnOfSharedInput()
        case Split.COLUMN:
            return ColwiseParallel(input_layouts=between)
        case Split.ROW:
            return RowwiseParallel(output_layouts=between)
        case Split.VOCABULARY if isinstance(module, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate())
        case Split.VOCABULARY:
            # Logits stay split, for a cross-entropy under `loss_parallel` that never gathers them.
            return ColwiseParallel(input_layouts=between, use_local_output=False)
        case Split.REPLICATED:
            return None


class _SharedInput(ParallelStyle):
    """For a module whose column-split layers read what it is given: whole within it, as ordinary tensors.

    What comes back as its gradient is each rank's addend of it, which is summed here.
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(whole(value) for value in inputs)

        def whole(value: Any) -> Any:
            is_whole = self._layout == Replicate()
            if not isinstance(value, Tensor) or (is_whole and not value.requires_grad):
                return value
            distributed = DTensor.from_local(value, device_mesh, [self._layout], run_check=False)
            return distributed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        module.register_forward_pre_hook(enter)
        return module


class _ColumnOfSharedInput(ColwiseParallel):
    """For a column-split layer in a module of a `_SharedInput`: it leaves its addend of the gradient as it is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[DTensor]:
            addend = [Partial()]
            return (DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False, grad_placements=addend),)

        module.register_forward_pre_hook(enter)  # before the one of ColwiseParallel, which takes a DTensor as it is
        return super()._apply(module, device_mesh)


class _ColumnBias(ParallelStyle):
    """For a module that only adds its bias, to features that a column-split layer has split."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            bias = module.get_parameter("bias")
            module.register_parameter("bias", nn.Parameter(distribute_tensor(bias.detach(), mesh, [Shard(0)])))

        def enter(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> tuple[DTensor]:
            return (DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False),)

        def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, split, enter, leave)  # type: ignore[arg-type]


def _split_sequence(model: nn.Module, tp_mesh: DeviceMesh, sequence_plan: SequencePlan) -> None:
    cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    styles: dict[str, ParallelStyle] = {sequence_plan.enter: cut}
    for name, _ in model.named_modules():
        if matches_any(name, sequence_plan.norms):
            styles[name] = SequenceParallel(use_local_output=True)
    parallelize_module(model, tp_mesh, styles)


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def local_slices(parameter: Tensor, shape: torch.Size) -> tuple[slice, ...]:
    """Which part of a whole tensor of `shape` lives on this rank.

    Args:
        parameter: a DTensor, or a plain tensor that is whole on every rank.
        shape: the whole tensor's shape.

    Returns:
        One slice for each dimension.
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, length) for length in shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def materialize(model: nn.Module, read: ReadSlice, *, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter of a model on the meta device its value, in place.

    Peak memory is the parameters on this rank and the one slice that is being read. Tied parameters are read once and
    stay tied. Call it before data parallelism is applied, on every rank.

    Args:
        model: its parameters are on the meta device, split or not.
        read: called once for each parameter with the slices that live here.
        device: where the values go.
        dtype: what they are converted to.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    for name, meta in list(model.named_parameters(remove_duplicate=False)):
        if meta not in done:
            local = read(name, local_slices(meta, meta.shape)).to(device, dtype)
            if isinstance(meta, DTensor):
                value: Tensor = DTensor.from_local(
                    local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
                )
            else:
                value = local
            done[meta] = nn.Parameter(value, requires_grad=meta.requires_grad)
        _set_parameter(model, name, done[meta])


def seeded_values(model: nn.Module, initialize: InitializeParameter, seed: int) -> ReadSlice:
    """A reader for `materialize` that makes up initial values from (seed, parameter name) alone.

    Each parameter is drawn whole, from a generator of its own, and then cut: the same model at any dp, tp or order.

    Args:
        model: gives the shapes.
        initialize: the model's `initialize_parameter`.
        seed: the run's seed.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.empty(shapes[name])
        initialize(name, whole, generator)
        return whole[slices].clone()

    return read
