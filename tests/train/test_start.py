"""A run starts new, goes on, or starts from another's checkpoint, and says at once when it cannot."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtools.checkpoints.fairseq import open_fairseq
from lmtools.checkpoints.fairseq_training import read_fairseq_training
from lmtools.checkpoints.lazy_tensor import LazyTensor
from lmtools.data.batches import Position
from lmtools.errors import CheckpointError, LmtoolsError
from lmtools.train.checkpoints import BEST, LAST
from lmtools.train.data import open_data
from lmtools.train.start import find_origin, start_state
from lmtools.train.state import TrainState
from tests.support.ranks import run_ranks
from tests.support.training import cpu_mesh, tiny_run, train_a_leg, whole_state

GENUINE: dict[str, Any] = {
    "tokens_per_sample": 32,
    "batch_size": 8,
    "decoder_embed_dim": 32,
    "decoder_ffn_embed_dim": 64,
    "resume": "never",
}
"""The shape of the golden models `mp4` and `mp2_2020`, which genuine fairseq trained."""


def start(**flags: Any) -> tuple[TrainState, str]:
    run = tiny_run(**flags)
    return start_state(run, open_data(run.train), cpu_mesh(run))


def started(flags: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    state, origin = start(**flags)
    return whole_state(state), vars(state.progress), origin


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 3 updates, validated once."""
    folder = tmp_path_factory.mktemp("trained")
    train_a_leg({"save_dir": str(folder), "max_update": 3, "valid_subset": "valid"})
    return folder


def copy_of(trained: Path, folder: Path) -> Path:
    shutil.copytree(trained, folder, symlinks=True)
    return folder


# --- from lmtools' own checkpoints ---


def test_a_new_run_depends_on_nothing_but_the_seed(tmp_path: Path):
    flags = {"save_dir": str(tmp_path), "seed": 5}
    tensors, progress, origin = started(flags)
    assert origin == "new, from seed 5"
    assert progress["num_updates"] == 0
    assert tensors["model.embed_tokens.weight"].shape == (144, 16)
    for rank in run_ranks(2, started, flags | {"mp": 2}):
        assert all(torch.equal(rank[0][name], tensor) for name, tensor in tensors.items())
    assert not torch.equal(
        started(flags | {"seed": 6})[0]["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"]
    )


def test_auto_resumes_everything_and_never_starts_anew(trained: Path, tmp_path: Path):
    folder = copy_of(trained, tmp_path / "run")
    tensors, progress, origin = started({"save_dir": str(folder), "valid_subset": "valid"})
    assert origin == f"resumed from {folder / 'checkpoint_1_3'}"
    assert (progress["num_updates"], progress["position"]) == (3, Position(1, 3))
    assert progress["best_loss"] is not None
    assert float(tensors["optimizer.layer_norm.weight.step"]) == 3

    tensors, progress, origin = started({"save_dir": str(folder), "resume": "never"})
    assert origin == "new, from seed 1"
    assert progress["num_updates"] == 0
    assert float(tensors["optimizer.layer_norm.weight.step"]) == 0
    assert not os.path.lexists(folder / LAST), "killed now, the new run shall not be resumed from the old one"
    assert not os.path.lexists(folder / BEST)
    assert (folder / "checkpoint_1_3").is_dir()


def test_workers_that_elastic_starts_again_go_on_whatever_they_were_told(trained: Path, tmp_path: Path, monkeypatch):
    folder = copy_of(trained, tmp_path / "run")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    _, progress, origin = started({"save_dir": str(folder), "resume": "never"})
    assert origin.startswith("resumed")
    assert progress["num_updates"] == 3


def test_workers_that_elastic_starts_again_leave_what_another_run_has_saved(trained: Path, tmp_path: Path, monkeypatch):
    """The first attempt may have failed before it has saved anything."""
    folder = copy_of(trained, tmp_path / "run")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this one")
    flags = {"save_dir": str(folder), "resume": "never"}
    assert started(flags)[2] == "new, from seed 1"
    train_a_leg(flags | {"max_update": 2})
    assert started(flags)[2] == f"resumed from {folder / 'checkpoint_1_2'}"


def test_restored_is_all_but_what_is_reset(trained: Path, tmp_path: Path):
    flags = {"restore_file": str(trained / LAST), "save_dir": str(tmp_path), "valid_subset": "valid"}
    expected = started({"save_dir": str(trained), "valid_subset": "valid"})[0]

    tensors, progress, origin = started(flags)
    assert origin == f"restored from {trained / 'checkpoint_1_3'}"
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert (progress["num_updates"], progress["position"], progress["schedule_offset"]) == (3, Position(1, 3), 0)

    tensors, progress, _ = started(flags | {"reset_optimizer": True})
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name] if name.startswith("model.") else torch.zeros_like(tensor)), name
    assert (progress["num_updates"], progress["position"]) == (0, Position(1, 3))

    _, progress, _ = started(flags | {"reset_lr_scheduler": True})
    assert (progress["num_updates"], progress["schedule_offset"]) == (3, -3)

    _, progress, _ = started(flags | {"reset_dataloader": True})
    assert (progress["num_updates"], progress["position"]) == (3, Position(1, 0))
    assert progress["best_loss"] is not None

    _, progress, _ = started(flags | {"reset_meters": True})
    assert (progress["best_loss"], progress["seconds"], progress["validations_since_best"]) == (None, 0.0, 0)


def test_weights_alone_start_a_new_run(trained: Path, tmp_path: Path):
    expected = started({"save_dir": str(trained)})[0]
    tensors, progress, origin = started({"finetune_from": str(trained / LAST), "save_dir": str(tmp_path)})
    assert origin == f"weights of {trained / 'checkpoint_1_3'}"
    assert (progress["num_updates"], progress["position"], progress["best_loss"]) == (0, Position(), None)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name] if name.startswith("model.") else torch.zeros_like(tensor)), name


def test_weights_come_from_the_masters_and_go_to_the_masters(trained: Path, tmp_path: Path):
    """bfloat16 parameters are the rounded ones: neither into a run nor out of one shall their rounding last."""
    expected = started({"save_dir": str(trained)})[0]
    low = {"bf16": True, "finetune_from": str(trained / LAST), "save_dir": str(tmp_path / "low"), "max_update": 1}
    in_low = train_a_leg(low | {"lr": 0.0, "weight_decay": 0.0}).tensors
    for name, tensor in in_low.items():
        if name.endswith(".master"):
            name = name.replace("optimizer.", "model.").removesuffix(".master")
            assert torch.equal(tensor, expected[name])
            assert torch.equal(in_low[name], expected[name].bfloat16())
    back = started({"finetune_from": str(tmp_path / "low" / LAST), "save_dir": str(tmp_path / "back")})[0]
    weights = {name: tensor for name, tensor in expected.items() if name.startswith("model.")}
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    assert not torch.equal(in_low["model.layers.0.fc1.weight"].float(), expected["model.layers.0.fc1.weight"])


# --- from genuine fairseq's ---


def assembled(folder: Path, entry: Any) -> dict[str, Tensor]:
    """A tensor of each parameter, put together from the parts by hand; `entry` finds it in a part's content."""
    parts = [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))]
    names = [
        name
        for name in parts[0]["model"]
        if not name.endswith(("version", "_float_tensor", "output_projection.weight"))
    ]
    whole = {}
    for index, name in enumerate(names):
        tensors = [entry(part, index, name) for part in parts]
        kind = ".".join(name.split(".")[-2:])
        if kind in ("out_proj.weight", "fc2.weight"):
            tensor = torch.cat(tensors, dim=1)
        elif "norm" in kind or kind in ("out_proj.bias", "fc2.bias"):
            tensor = tensors[0]
        else:
            tensor = torch.cat(tensors, dim=0)
        whole[name.removeprefix("decoder.")] = tensor
    return whole


@pytest.mark.parametrize(
    ("parts", "rows", "step"), [("mp4", 160, 120), pytest.param("mp2_2020", 144, 105, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("mp", "dp"), [(1, 1), (4, 1), (2, 2)])
def test_fairseqs_parts_and_adams_moments_are_restored_on_any_mesh(
    golden: Path, tmp_path: Path, parts, rows, step, mp, dp
):
    folder = golden / parts
    flags = {**GENUINE, "restore_file": str(folder), "save_dir": str(tmp_path), "mp": mp, "dp": dp, "zero": 3}
    expected = {f"model.{name}": t for name, t in assembled(folder, lambda part, _, name: part["model"][name]).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = assembled(folder, lambda part, index, _, key=key: part["last_optimizer_state"]["state"][index][key])
        expected |= {f"optimizer.{name}.{key}": tensor for name, tensor in moments.items()}
    for tensors, progress, _ in run_ranks(mp * dp, started, flags):
        steps = {name: float(tensors.pop(name)) for name in list(tensors) if name.endswith(".step")}
        assert set(steps.values()) == {step}
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        assert tensors["model.embed_tokens.weight"].shape == (rows, 32)
        assert progress["num_updates"] == step


def test_progress_of_a_genuine_run(golden: Path, tmp_path: Path):
    flags = {**GENUINE, "save_dir": str(tmp_path)}
    of_head = started(flags | {"restore_file": str(golden / "mp4")})[1]
    assert (of_head["num_updates"], of_head["position"]) == (120, Position(7, 0))
    # 2020's code says that all 21 batches of epoch 5 are done.
    of_2020 = started(flags | {"restore_file": str(golden / "mp2_2020")})[1]
    assert (of_2020["num_updates"], of_2020["position"]) == (105, Position(6, 0))
    weights = started(flags | {"finetune_from": str(golden / "mp4")})
    assert (weights[1]["num_updates"], weights[1]["position"]) == (0, Position())
    assert not weights[0]["optimizer.layer_norm.weight.exp_avg"].any()


def flipped(path: Path, tensor: LazyTensor) -> None:
    """One bit of a tensor's last value changes, as on a failing disk."""
    data = bytearray(path.read_bytes())
    data[tensor.storage.offset + tensor.storage.num_bytes - 2] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["restore_file", "finetune_from"])
def test_fairseqs_parts_are_checked_as_those_that_are_evaluated(golden: Path, tmp_path: Path, kind):
    """A damaged file, or an earlier part under another name: what is trained from it would look as any other run."""
    folder = tmp_path / "mp4"
    shutil.copytree(golden / "mp4", folder)
    first, second = (folder / f"model-model_part-{part}.pt" for part in (0, 1))
    flags = {**GENUINE, "save_dir": str(tmp_path / "run"), kind: str(folder)}
    flipped(second, open_fairseq(folder).parts[1]["layers.0.fc1.weight"])
    with pytest.raises(CheckpointError, match=rf"{second}: the bytes of storage .* have checksum"):
        start(**flags)
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match=rf"{second}: .*{first.name}"):
        start(**flags)


def test_adams_moments_of_fairseqs_are_checked_where_they_are_used(golden: Path, tmp_path: Path):
    shutil.copytree(golden / "mp4", tmp_path / "mp4")
    training = read_fairseq_training(open_fairseq(tmp_path / "mp4"))
    path = tmp_path / "mp4" / "model-model_part-2.pt"
    flipped(path, training.moments["exp_avg_sq"].parts[2]["layers.0.fc1.weight"])
    flags = {**GENUINE, "save_dir": str(tmp_path / "run")}
    with pytest.raises(CheckpointError, match=rf"{path}: the bytes of storage .* have checksum"):
        start(**flags, restore_file=str(tmp_path / "mp4"))
    start(**flags, finetune_from=str(tmp_path / "mp4"))


def test_half_precision_has_masters_of_the_files_precision(golden: Path, tmp_path: Path):
    flags = {**GENUINE, "save_dir": str(tmp_path), "restore_file": str(golden / "mp4"), "fp16": True}
    tensors = started(flags)[0]
    full = started(flags | {"fp16": False})[0]
    name = "layers.0.fc1.weight"
    assert torch.equal(tensors[f"optimizer.{name}.master"], full[f"model.{name}"])
    assert torch.equal(tensors[f"model.{name}"], full[f"model.{name}"].half())
    assert torch.equal(tensors[f"optimizer.{name}.exp_avg"], full[f"optimizer.{name}.exp_avg"])


# --- what cannot be started from ---


def refusal(**flags: Any) -> str:
    run = tiny_run(**flags)
    with pytest.raises(LmtoolsError) as caught:
        find_origin(run, open_data(run.train))
    return str(caught.value)


def test_a_last_checkpoint_that_is_gone_is_not_passed_over(trained: Path, tmp_path: Path):
    folder = copy_of(trained, tmp_path / "run")
    (folder / "checkpoint_1_3").rename(folder / "elsewhere")
    message = refusal(save_dir=str(folder))
    assert message.startswith(f"{folder / LAST}: names checkpoint_1_3, which is no complete checkpoint")


def test_a_checkpoint_of_another_dictionary_model_or_kind(trained: Path, golden: Path, tmp_path: Path):
    path, resolved = str(trained / LAST), trained / "checkpoint_1_3"
    words = tmp_path / "bin"
    shutil.copytree(golden / "bin", words)
    with open(words / "dict.txt", "a") as stream:
        stream.write("onemoreword 1\n")
    message = refusal(restore_file=path, data=str(words))
    assert message == f"{resolved}: was trained with another dictionary than {words}/dict.txt"
    message = refusal(restore_file=path, decoder_layers=3)
    assert message == f"{resolved}: --decoder-layers is 2 in the checkpoint, 3 in this run"
    assert "no such checkpoint" in refusal(restore_file=str(tmp_path / "nothing"))
    free = {"dropout": 0.5, "tokens_per_sample": 8, "reset_dataloader": True}
    origin = started({"restore_file": path, "save_dir": str(tmp_path)} | free)[2]
    assert origin == f"restored from {resolved}", "dropout and, without learned positions, the window are free"


def test_a_place_that_the_data_have_not(trained: Path, tmp_path: Path):
    """Of a run with other batches, or of other data: said before anything starts."""
    at = {"restore_file": str(trained / LAST), "resume": "never"}
    found = refusal(**at, batch_size=400)
    assert found.startswith("epoch 1 has 2 batches and 3 of them are done: the training split or the batch size is")
    run = tiny_run(**at, batch_size=400, reset_dataloader=True)
    assert find_origin(run, open_data(run.train)).kind == "restored"


def test_a_broken_record_is_named(trained: Path, tmp_path: Path):
    folder = copy_of(trained, tmp_path / "run")
    record = folder / "checkpoint_1_3" / "lmtools.json"
    text = record.read_text()
    record.write_text(text[:100])
    assert refusal(save_dir=str(folder)).startswith(f"{record}: not JSON")
    record.write_text(text.replace('"num_updates"', '"updates"'))
    assert refusal(save_dir=str(folder)).startswith(
        f"{folder / 'checkpoint_1_3'}: its record is not that of a training"
    )
    record.write_text(text.replace("lmtools-training", "something"))
    assert refusal(save_dir=str(folder)) == f"{record}: expected lmtools-training version 1"


def test_fairseqs_checkpoint_that_does_not_fit(golden: Path):
    flags = {**GENUINE, "restore_file": str(golden / "mp4")}
    message = refusal(**flags | {"decoder_attention_heads": 8})
    assert message == f"{golden / 'mp4'}: --decoder-attention-heads is 4 in the checkpoint, 8 in this run"
    assert "use --optimizer adam, or --reset-optimizer" in refusal(**flags, optimizer="sgd")
    run = tiny_run(**flags, optimizer="sgd", reset_optimizer=True)
    assert find_origin(run, open_data(run.train)).kind == "restored"


@pytest.mark.parametrize("precision", [{}, {"memory_efficient_bf16": True}])
def test_without_master_weights_a_run_goes_on_from_those_of_the_checkpoint(tmp_path: Path, precision: dict[str, bool]):
    low = train_a_leg({"save_dir": str(tmp_path), "bf16": True, "max_update": 2}).tensors
    tensors, progress, _ = started({"save_dir": str(tmp_path), **precision})
    assert progress["num_updates"] == 2
    for name, tensor in tensors.items():
        master = low.get(f"optimizer.{name.removeprefix('model.')}.master") if name.startswith("model.") else None
        expected = low[name] if master is None else master.to(tensor.dtype)
        assert torch.equal(tensor, expected), name


def test_another_optimizer_or_precision_needs_a_reset(trained: Path, tmp_path: Path):
    flags = {"restore_file": str(trained / LAST), "save_dir": str(tmp_path)}
    for other, message in (
        ({"optimizer": "sgd"}, r"--optimizer is adam in the checkpoint, sgd in this run; .*--reset-optimizer"),
        ({"fp16": True}, r"another optimizer or precision; .*--reset-optimizer"),
    ):
        with pytest.raises(CheckpointError, match=message):
            started(flags | other)
        assert started(flags | other | {"reset_optimizer": True})[1]["num_updates"] == 0
