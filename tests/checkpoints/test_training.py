"""A training checkpoint is complete or absent, holds what the call was given, and is data on any mesh."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from lmtools.checkpoints import training
from lmtools.checkpoints.training import (
    CheckpointWriter,
    is_training_checkpoint,
    load_tensors,
    read_record,
    remove_leftovers,
)
from lmtools.checkpoints.training_index import tensor_shapes, verify_tensors
from lmtools.errors import CheckpointError
from lmtools.parallel.mesh import Mesh, make_mesh
from tests.support.ranks import run_ranks
from tests.support.training import cpu_mesh, noise, state_of_noise, tiny_run, whole_state

VOCAB_SIZE = 149  # a prime: no number of ranks divides it


def alone() -> Mesh:
    return make_mesh(torch.device("cpu"), dp=1, tp=1)


def save(
    target: Path, tensors: dict[str, Tensor], mesh: Mesh | None = None, *, links: tuple[str, ...] = ("last",)
) -> None:
    writer = CheckpointWriter(mesh or alone())
    writer.start(target, tensors, {"name": target.name}, links=links)
    assert writer.finish() == target


def load(path: Path, *names: str, shape: tuple[int, ...] = (1000,)) -> dict[str, Tensor]:
    tensors = {name: torch.zeros(shape) for name in names or ("x",)}
    load_tensors(path, tensors, alone())
    return tensors


# --- what is in it ---


def test_a_checkpoint_is_a_folder_with_a_record_and_links(tmp_path: Path):
    save(tmp_path / "checkpoint_1_5", {"x": torch.arange(1000.0)}, links=("last", "best"))
    save(tmp_path / "checkpoint_1_9", {"x": torch.arange(1000.0) + 1})
    assert os.readlink(tmp_path / "last") == "checkpoint_1_9"
    assert os.readlink(tmp_path / "best") == "checkpoint_1_5"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoint_1_5", "checkpoint_1_9", "last"]
    assert read_record(tmp_path / "best")["name"] == "checkpoint_1_5"
    assert tensor_shapes(tmp_path / "last") == {"x": (1000,)}
    assert torch.equal(load(tmp_path / "best")["x"], torch.arange(1000.0))
    assert torch.equal(load(tmp_path / "last")["x"], torch.arange(1000.0) + 1)


def test_it_holds_the_values_at_the_time_of_the_call_and_training_goes_on_meanwhile(tmp_path: Path, monkeypatch):
    disk_is_ready = threading.Event()
    write_data = dcp.FileSystemWriter.write_data

    def write_when_ready(*args: Any) -> Any:
        disk_is_ready.wait(20)
        return write_data(*args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_when_ready)
    tensor = torch.arange(1000.0)
    writer = CheckpointWriter(alone())
    writer.start(tmp_path / "checkpoint_1_5", {"x": tensor, "half of it": tensor[500:]}, {})
    for _ in range(10):  # updates, while nothing is on the disk yet
        tensor += 1
    assert not writer.written()
    assert not (tmp_path / "checkpoint_1_5").exists()
    disk_is_ready.set()
    writer.finish()
    assert writer.finish() is None, "nothing is under way any more"
    assert torch.equal(load(tmp_path / "checkpoint_1_5")["x"], torch.arange(1000.0))
    assert torch.equal(
        load(tmp_path / "checkpoint_1_5", "half of it", shape=(500,))["half of it"], torch.arange(500.0, 1000.0)
    )


def save_state(folder: Path, flags: dict[str, Any]) -> None:
    run = tiny_run(**flags)
    mesh = cpu_mesh(run)
    state = state_of_noise(run, mesh, vocab_size=VOCAB_SIZE, dtype=torch.float32)
    tensors = state.tensors()
    # Moments that are not 0: the parameters once more.
    for name, parameter in state.parameters.items():
        for key in ("exp_avg", "exp_avg_sq"):
            with torch.no_grad():
                tensors[f"optimizer.{name}.{key}"].copy_(parameter * 2)
    writer = CheckpointWriter(mesh)
    writer.start(folder, tensors, {})
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    writer.finish()


def load_state(folder: Path, flags: dict[str, Any]) -> dict[str, Tensor]:
    run = tiny_run(**flags)
    mesh = cpu_mesh(run)
    state = state_of_noise(run, mesh, vocab_size=VOCAB_SIZE, dtype=torch.float32)
    with torch.no_grad():
        for tensor in state.tensors().values():
            tensor.fill_(-1)
    load_tensors(folder, state.tensors(), mesh)
    return whole_state(state)


@pytest.mark.slow
def test_saved_on_one_mesh_loaded_on_another(tmp_path: Path):
    """A vocabulary that the ranks do not divide, cut by tensor parallelism and, in its pieces, by FSDP once more."""
    cut_twice = {"mp": 2, "dp": 2, "zero": 3}
    run_ranks(4, save_state, tmp_path / "checkpoint_1_1", cut_twice)
    read = noise(tiny_run(), VOCAB_SIZE)
    for flags in ({}, {"mp": 4}, cut_twice):
        for tensors in run_ranks(
            flags.get("mp", 1) * flags.get("dp", 1), load_state, tmp_path / "checkpoint_1_1", flags
        ):
            assert tensors["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 16)
            for name, tensor in tensors.items():
                kind, _, rest = name.partition(".")
                parameter, _, key = rest.rpartition(".") if kind == "optimizer" else (rest, "", "")
                if key == "step":
                    assert float(tensor) == 0
                else:
                    expected = read(parameter, tuple(slice(0, length) for length in tensor.shape))
                    assert torch.equal(tensor, expected * 2 if key else expected), name


# --- complete or absent ---


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_be_killed(folder: Path, where: str) -> None:
    tensors = {"x": torch.ones(1000)}
    save(folder / "checkpoint_1_5", tensors)
    module, name = {
        "before the data": (dcp.FileSystemWriter, "write_data"),
        "before the index": (dcp.FileSystemWriter, "finish"),
        "before the record": (training, "_complete"),
        "before the name": (Path, "rename"),
        "before the link": (training, "_link"),
    }[where]
    setattr(module, name, die)
    save(folder / "checkpoint_1_9", tensors)


@pytest.mark.parametrize(
    "where", ["before the data", "before the index", "before the record", "before the name", "before the link"]
)
def test_killed_in_a_save_the_one_before_is_whole_and_named(tmp_path: Path, where: str):
    with pytest.raises(ChildProcessError, match="exit code -9"):
        run_ranks(1, save_and_be_killed, tmp_path, where)
    assert os.readlink(tmp_path / "last") == "checkpoint_1_5"
    assert torch.equal(load(tmp_path / "last")["x"], torch.ones(1000))
    assert is_training_checkpoint(tmp_path / "checkpoint_1_9") == (where == "before the link")
    remove_leftovers(tmp_path)
    save(tmp_path / "checkpoint_1_9", {"x": torch.zeros(1000)})
    assert torch.equal(load(tmp_path / "last")["x"], torch.zeros(1000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1_5", "checkpoint_1_9", "last"]


def test_killed_while_one_is_removed_nothing_is_left_under_its_name(tmp_path: Path):
    save(tmp_path / "checkpoint_1_5", {"x": torch.ones(1000)})
    with pytest.raises(ChildProcessError, match="exit code -9"):
        run_ranks(1, remove_and_be_killed, tmp_path / "checkpoint_1_5")
    assert not (tmp_path / "checkpoint_1_5").exists()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def remove_and_be_killed(path: Path) -> None:
    unlink = os.unlink

    def unlink_and_die(*args: Any, **kwargs: Any) -> None:
        unlink(*args, **kwargs)
        die()

    os.unlink = unlink_and_die  # type: ignore[assignment]
    training.remove_checkpoint(path)


def save_twice_with_a_full_disk(folder: Path, full_on_rank: int, where: str) -> str:
    """The second save finds no room on one rank: its file may not grow. Returns what that rank and the others say."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh(torch.device("cpu"), dp=world_size, tp=1)
    names = [f"x{index}" for index in range(4)]  # dealt out over the ranks
    save(folder / "checkpoint_1_5", {name: torch.ones(10_000) for name in names}, mesh)
    if mesh.rank == full_on_rank:
        if where == "data":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        else:
            training.atomic_write_text = partial(raise_disk_full, where)  # type: ignore[assignment]
    writer = CheckpointWriter(mesh)
    writer.start(folder / "checkpoint_1_9", {name: torch.zeros(10_000) for name in names}, {}, links=("last",))
    with pytest.raises(CheckpointError) as caught:
        writer.finish()
    if where == "data":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        save(folder / "checkpoint_1_12", {name: torch.zeros(10_000) for name in names}, mesh)
    return str(caught.value)


def raise_disk_full(where: str, *_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("world_size", "full_on_rank", "where", "reason"),
    [(1, 0, "data", "File too large"), (2, 1, "data", "File too large"), (2, 0, "record", "No space left on device")],
)
def test_on_a_full_disk_the_one_before_stays_and_every_rank_says_so(tmp_path, world_size, full_on_rank, where, reason):
    for message in run_ranks(world_size, save_twice_with_a_full_disk, tmp_path, full_on_rank, where):
        assert message.startswith(f"{tmp_path / 'checkpoint_1_9'}: could not be written: ")
        assert reason in message
        assert "\n" not in message
    last = "checkpoint_1_12" if where == "data" else "checkpoint_1_5"
    assert os.readlink(tmp_path / "last") == last, "room again, saved again"
    assert torch.equal(load(tmp_path / "checkpoint_1_5", "x3", shape=(10_000,))["x3"], torch.ones(10_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"checkpoint_1_5", last, "last"})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(alone())
    with pytest.raises(CheckpointError, match=r"file/checkpoint_1_5: could not be written: .*Not a directory"):
        writer.start(tmp_path / "file" / "checkpoint_1_5", {}, {})


# --- data, never code ---


class Innocent:
    """Unpickled, it makes the file `ran`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {os.environ['RAN']}",)


def with_an_object(metadata: Metadata) -> Any:
    metadata.planner_data = Innocent()
    return metadata


def with_an_entry_of_bytes(metadata: Metadata) -> Any:
    metadata.state_dict_metadata["y"] = BytesStorageMetadata()
    return metadata


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_an_object, "names posix.system"),
        (lambda metadata: Innocent(), "names posix.system"),
        (with_an_entry_of_bytes, "BytesStorageMetadata"),
        (lambda metadata: ["no", "index"], "not the index of a checkpoint"),
        (lambda metadata: eval, "names builtins.eval"),
    ],
)
def test_an_index_that_would_run_something_is_refused(tmp_path: Path, monkeypatch, spoil, reason):
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    save(tmp_path / "checkpoint_1_5", {"x": torch.ones(1000)})
    index = tmp_path / "checkpoint_1_5" / ".metadata"
    index.write_bytes(pickle.dumps(spoil(pickle.loads(index.read_bytes()))))
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(tmp_path / "last")
    assert str(tmp_path / "last") in str(caught.value)
    assert not (tmp_path / "ran").exists()


# --- broken, or another one ---


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "garbage", "a persistent id"])
def test_a_damaged_file_is_an_error_that_names_the_checkpoint(tmp_path: Path, name: str, damage: str):
    save(tmp_path / "checkpoint_1_5", {"x": torch.ones(1000)})
    path = tmp_path / "checkpoint_1_5" / name
    content = path.read_bytes()
    match damage:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "garbage":
            path.write_bytes(os.urandom(len(content)))
        case "a persistent id":  # torch says in two lines that it does not know what to do with it
            path.write_bytes(b"Px\n.")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "last")
    assert str(caught.value).startswith(f"{tmp_path / 'last'}: ")
    assert "\n" not in str(caught.value)


def flip_a_bit(path: Path, value: bytes) -> None:
    """In the last of a run of values."""
    content = bytearray(path.read_bytes())
    content[content.rindex(value)] ^= 1
    path.write_bytes(content)


def test_a_value_that_has_changed_on_the_disk_is_not_trained_on(tmp_path: Path):
    """torch's reader would take it; only what is loaded is checked."""
    save(tmp_path / "checkpoint_1_5", {"x": torch.full((1000,), 3.0), "y": torch.full((1000,), 5.0)})
    path = tmp_path / "checkpoint_1_5" / "__0_0.distcp"
    flip_a_bit(path, torch.tensor([5.0]).numpy().tobytes())
    assert torch.equal(load(tmp_path / "last")["x"], torch.full((1000,), 3.0))
    with pytest.raises(CheckpointError, match=r"/__0_0.distcp: the bytes of storage .* have checksum"):
        load(tmp_path / "last", "x", "y")


def test_ranks_share_the_checking(tmp_path: Path):
    save(tmp_path / "checkpoint_1_5", {"x": torch.full((1000,), 3.0), "y": torch.full((1000,), 5.0)})
    flip_a_bit(tmp_path / "checkpoint_1_5" / "__0_0.distcp", torch.tensor([5.0]).numpy().tobytes())
    verify_tensors(tmp_path / "last", ["x", "y"], rank=0, world_size=2)
    with pytest.raises(CheckpointError, match="have checksum"):
        verify_tensors(tmp_path / "last", ["x", "y"], rank=1, world_size=2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_an_index_damaged_anywhere_is_read_or_refused(tmp_path: Path, place: int, byte: int):
    target = tmp_path / "checkpoint_1_5"
    if not target.exists():
        save(target, {"x": torch.ones(10)})
    content = bytearray((target / ".metadata").read_bytes())
    content[place % len(content)] = byte
    damaged = tmp_path / "damaged"
    shutil.copytree(target, damaged, dirs_exist_ok=True)
    (damaged / ".metadata").write_bytes(content)
    with suppress(CheckpointError):
        load(damaged, shape=(10,))


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path):
    save(tmp_path / "checkpoint_1_5", {"x": torch.ones(1000)})
    with pytest.raises(CheckpointError, match="has no tensor y"):
        load(tmp_path / "last", "y")
    with pytest.raises(CheckpointError, match=r"x has shape \(1000,\), expected \(999,\)"):
        load(tmp_path / "last", shape=(999,))


def test_a_folder_without_a_record_is_no_checkpoint(tmp_path: Path):
    save(tmp_path / "checkpoint_1_5", {"x": torch.ones(1000)})
    record = tmp_path / "checkpoint_1_5" / "lmtools.json"
    content = json.loads(record.read_text())
    assert (content["format"], content["format_version"]) == ("lmtools-training", 1)
    record.unlink()
    assert not is_training_checkpoint(tmp_path / "last")
    with pytest.raises(CheckpointError, match="not a complete training checkpoint"):
        read_record(tmp_path / "last")
