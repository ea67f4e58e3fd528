"""A training checkpoint is read without the mesh that wrote it: on one process, on another, by `eval`, for fairseq."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtools.checkpoints.fairseq import open_fairseq
from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.checkpoints.reshard import reshard
from lmtools.checkpoints.training_read import TrainingCheckpoint, open_training
from lmtools.cli import main
from lmtools.errors import CheckpointError, ConfigError
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.mesh import make_mesh
from tests.support.ranks import run_ranks
from tests.support.training import GOLDEN, metrics, train_a_leg, whole

MESHES = {
    "1 rank": {},
    "mp 2 x dp 2, zero 3, bfloat16, untied": {
        "mp": 2,
        "dp": 2,
        "zero": 3,
        "bf16": True,
        "share_decoder_input_output_embed": False,
    },
}
"""How a run was made, and so in which chunks its tensors are."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if flags else []) for name, flags in MESHES.items()],
)
def trained(request, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A run's folder, and its final weights, whole."""
    folder = tmp_path_factory.mktemp("run")
    flags = MESHES[request.param] | {"save_dir": str(folder), "max_update": 4, "valid_subset": "test"}
    world_size = flags.get("mp", 1) * flags.get("dp", 1)
    leg = run_ranks(world_size, train_a_leg, flags, timeout_seconds=200)[0]
    prefix = "model."
    return folder, {name[len(prefix) :]: value for name, value in leg.tensors.items() if name.startswith(prefix)}


def read_whole(checkpoint: Any, name: str, shape: torch.Size) -> Tensor:
    return checkpoint.read(name, tuple(slice(0, length) for length in shape))


def test_every_parameter_reads_as_it_was_trained(trained):
    folder, weights = trained
    checkpoint = open_training(folder / "checkpoint_last")
    assert checkpoint.chunks.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(read_whole(checkpoint, name, value.shape), value), name
    for part in range(checkpoint.num_parts):
        checkpoint.verify_part(part)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_any_slice_reads_as_that_slice_of_the_whole(trained, data):
    folder, weights = trained
    checkpoint = open_training(folder / "checkpoint_last")
    name = data.draw(st.sampled_from(sorted(weights)))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in weights[name].shape]
    slices = tuple(slice(*pair) for pair in bounds)
    assert torch.equal(checkpoint.read(name, slices), weights[name][slices])


def test_is_the_checkpoint_that_the_link_names_now(trained):
    folder, _ = trained
    checkpoint = open_checkpoint(folder / "checkpoint_last")
    assert isinstance(checkpoint, TrainingCheckpoint)
    assert checkpoint.folder == (folder / "checkpoint_1_4").resolve()
    assert checkpoint.identity() == open_training(folder / "checkpoint_1_4").identity()
    assert all(path.suffix == ".distcp" for path in checkpoint.paths)


def loaded(path: Path, tp: int) -> dict[str, Tensor]:
    model = load_model(open_checkpoint(path), make_mesh(torch.device("cpu"), dp=1, tp=tp), torch.float32)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def test_loads_on_another_mesh(trained):
    folder, weights = trained
    for name, value in run_ranks(4, loaded, folder / "checkpoint_last", 4)[0].items():
        assert torch.equal(value, weights[name].float()), name


@pytest.mark.parametrize("num_parts", [1, 4])
def test_fairseqs_parts_hold_what_was_trained(trained, tmp_path, num_parts):
    folder, weights = trained
    reshard(folder / "checkpoint_last", tmp_path / "parts", num_parts=num_parts, format="fairseq")
    exported = open_fairseq(tmp_path / "parts")
    assert exported.num_parts == num_parts
    assert exported.config == open_training(folder / "checkpoint_last").config
    for name, value in weights.items():
        assert torch.equal(read_whole(exported, name, value.shape), value), name


def test_fairseqs_parts_can_be_of_another_dtype(trained, tmp_path):
    folder, weights = trained
    reshard(folder / "checkpoint_last", tmp_path / "parts", num_parts=2, format="fairseq", dtype=torch.float16)
    exported = open_fairseq(tmp_path / "parts")
    for name, value in weights.items():
        assert torch.equal(read_whole(exported, name, value.shape), value.half()), name


def evaluated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    arguments = [str(GOLDEN / "bin"), "--gen-subset", "test", "--json", "--device", "cpu", *map(str, options)]
    monkeypatch.setattr(sys, "argv", ["lmtools", "eval", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 0, printed.err
    return dict(json.loads(printed.out))


def test_eval_gives_the_runs_own_validation_loss(trained, monkeypatch, capsys, tmp_path):
    """Of the training checkpoint, and of what was exported from it."""
    folder, weights = trained
    [last] = [line for line in metrics(folder) if line["kind"] == "valid"]
    dtype = str(weights["embed_tokens.weight"].dtype).removeprefix("torch.")
    # In bfloat16 a batch of another shape, or a sum of another order, is another rounding.
    tolerance = {"float32": 1e-6, "bfloat16": 2e-4}[dtype]
    reshard(folder / "checkpoint_best", tmp_path / "parts", num_parts=2, format="fairseq")
    for path in (folder / "checkpoint_best", tmp_path / "parts"):
        result = evaluated(monkeypatch, capsys, "--path", path, "--dtype", dtype)
        assert result["tokens_scored"] == last["num_tokens"]
        assert result["loss_base2"] == pytest.approx(last["loss_base2"], rel=tolerance)


# What is wrong with a checkpoint is one line.


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, train_a_leg, {"mp": 2, "save_dir": str(folder), "max_update": 1, "valid_subset": ""})
    return folder / "checkpoint_1_1"


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


def test_a_folder_of_runs_asks_which(good):
    with pytest.raises(
        CheckpointError, match=r"holds the checkpoints of a training run; name one, as .*/checkpoint_last"
    ):
        open_checkpoint(good.parent)


def test_an_export_that_does_not_divide_is_refused_before_anything_is_written(good, tmp_path):
    with pytest.raises(ConfigError, match="--mp 8: does not divide the model's 4 attention heads"):
        reshard(good, tmp_path / "parts", num_parts=8, format="fairseq")
    assert not (tmp_path / "parts").exists()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_found_before_it_is_used(copy, tmp_path):
    checkpoint = open_training(copy)
    chunk = checkpoint.chunks["embed_tokens.weight"][1]
    flip(chunk.path, chunk.open().storage.offset + 5)
    with pytest.raises(CheckpointError, match=rf"{chunk.path.name}: the bytes of storage 0 have checksum"):
        reshard(copy, tmp_path / "parts", num_parts=1, format="fairseq")
    assert not (tmp_path / "parts").exists()
    with pytest.raises(CheckpointError, match="have checksum"):
        loaded(copy, 1)


def test_an_optimizers_flipped_bit_is_not_the_models(copy, tmp_path):
    checkpoint = open_training(copy)
    ends = {
        chunk.span[1] for chunks in checkpoint.chunks.values() for chunk in chunks if chunk.path.name == "__0_0.distcp"
    }
    content = (copy / "__0_0.distcp").read_bytes()
    assert max(ends) < len(content), "what comes last is Adam's"
    flip(copy / "__0_0.distcp", len(content) - 2000)
    reshard(copy, tmp_path / "parts", num_parts=1, format="fairseq")


def test_a_file_of_another_checkpoint_is_refused(copy):
    """Its tensors lie at other places, or have other shapes."""
    first, second = sorted(copy.glob("*.distcp"))
    first.write_bytes(second.read_bytes() + b"\0" * max(0, first.stat().st_size - second.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: "):
        loaded(copy, 1)


def test_a_tensor_of_another_shape_is_refused(good):
    chunk = open_training(good).chunks["embed_tokens.weight"][0]
    with pytest.raises(CheckpointError, match=r"holds no tensor of shape \(1, 2\) at byte .* not of one checkpoint"):
        replace(chunk, sizes=(1, 2)).open()


def test_a_file_that_is_cut_short_or_missing_is_refused(copy):
    path = copy / "__1_0.distcp"
    with open(path, "r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: ends before byte .* the checkpoint is damaged"):
        open_training(copy)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: ends before byte"):
        open_training(copy)


def test_an_index_that_is_broken_or_missing_is_refused(copy):
    (copy / ".metadata").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(CheckpointError, match=r"its \.metadata is broken"):
        open_training(copy)
    (copy / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"No such file"):
        open_training(copy)


def test_a_checkpoint_that_was_not_completed_is_none(copy):
    (copy / "lmtools.json").unlink()
    with pytest.raises(CheckpointError, match=r"not a complete training checkpoint"):
        open_training(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"decoder_layers": 1}, r"model\.layers\.1\.\S+ is not of the model of its configuration"),
        ({"vocab_size": 145}, r"embed_tokens\.weight has shape \(144, 16\), expected \(145, 16\)"),
        ({"decoder_depth": 3}, "its configuration is of another version"),
    ],
)
def test_a_model_that_is_not_the_configurations_is_refused(copy, change, message):
    record = json.loads((copy / "lmtools.json").read_text())
    record["model"] |= change
    (copy / "lmtools.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=message):
        open_training(copy)


def test_one_tensor_is_in_memory_at_a_time(good, monkeypatch):
    """Export asks for a parameter's share, and reads no more of it than that."""
    elements: list[int] = []
    read = TrainingCheckpoint.read

    def counting(self: TrainingCheckpoint, name: str, slices: tuple[slice, ...]) -> Tensor:
        elements.append(torch.Size([piece.stop - piece.start for piece in slices]).numel())
        return read(self, name, slices)

    monkeypatch.setattr(TrainingCheckpoint, "read", counting)
    model = TransformerLM(open_training(good).config)
    largest = max(parameter.numel() for parameter in model.parameters())
    loaded(good, 1)
    assert max(elements) == largest
