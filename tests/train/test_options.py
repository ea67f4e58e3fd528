"""Options arrive where they are for, and a run does what they say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtools.data.indexed import IndexedDataset
from lmtools.train import validation
from lmtools.train.build import build_optimizer
from lmtools.train.checkpoints import BEST
from lmtools.train.data import open_data
from tests.support.ranks import run_ranks
from tests.support.training import GOLDEN, cpu_mesh, metrics, state_of_noise, tiny_run, train_a_leg


def test_adafactors_options():
    run = tiny_run(
        optimizer="adafactor",
        adafactor_eps=(1e-20, 1e-4),
        clip_threshold=2.0,
        decay_rate=-0.7,
        beta1=0.9,
        scale_parameter=True,
        weight_decay=0.1,
        lr=0.5,
    )
    state = state_of_noise(run, cpu_mesh(run), vocab_size=9, dtype=torch.float32)
    assert build_optimizer(state.model, run.train).defaults == {
        "eps": (1e-20, 1e-4),
        "clip_threshold": 2.0,
        "decay_rate": -0.7,
        "beta1": 0.9,
        "scale_parameter": True,
        "weight_decay": 0.1,
        "lr": 0.5,
    }


def test_batch_sizes_are_cut_to_a_multiple_where_the_last_batch_is_short():
    sizes = {}
    for multiple in (1, 8):
        data = open_data(tiny_run(batch_size=100, required_batch_size_multiple=multiple).train)
        batches = data.batches(1)
        sizes[multiple] = sorted(len(batches[index]) for index in range(len(batches)))
    assert sum(sizes[1]) == sum(sizes[8])
    assert sizes[1] == [29, 100, 100, 100]
    assert sizes[8] == [5, 24, 100, 100, 100]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint_*") if not path.is_symlink())


def test_no_epoch_checkpoints_keeps_what_the_links_name(tmp_path):
    flags = {"batch_size": 128, "max_epoch": 3, "max_update": 100}
    run_ranks(1, train_a_leg, flags | {"save_dir": str(tmp_path / "all")})
    run_ranks(1, train_a_leg, flags | {"save_dir": str(tmp_path / "last"), "no_epoch_checkpoints": True})
    assert kept(tmp_path / "all") == ["checkpoint_1_4", "checkpoint_2_8", "checkpoint_3_12"]
    assert kept(tmp_path / "last") == ["checkpoint_3_12"]


# --- which data ---


def num_tokens(split: Path) -> int:
    return len(IndexedDataset(split).tokens)


def folder_of(folder: Path, splits: dict[str, str]) -> Path:
    """A folder with the golden dictionary, and golden splits under other names."""
    folder.mkdir()
    shutil.copy(GOLDEN / "bin" / "dict.txt", folder)
    for name, source in splits.items():
        for suffix in (".bin", ".idx"):
            shutil.copy(GOLDEN / "bin" / f"{source}{suffix}", folder / f"{name}{suffix}")
    return folder


def trained_tokens(lines: list[dict[str, Any]]) -> dict[int, int]:
    """Tokens that were trained on, by epoch."""
    counts: dict[int, int] = {}
    for line in lines:
        if line["kind"] == "update":
            counts[line["epoch"]] = counts.get(line["epoch"], 0) + line["num_tokens"]
    return counts


def test_an_epoch_takes_the_next_folder_and_validation_the_first(tmp_path):
    """As fairseq, which loads the validation splits as of epoch 1: the other folders need none."""
    first = folder_of(tmp_path / "a", {"train": "train", "valid": "valid"})
    second = folder_of(tmp_path / "b", {"train": "test"})
    flags = {"data": f"{first}:{second}", "valid_subset": "valid", "batch_size": 128, "max_epoch": 3}
    train_a_leg(flags | {"save_dir": str(tmp_path / "run")})
    lines = metrics(tmp_path / "run")
    in_first, in_second = num_tokens(first / "train"), num_tokens(second / "train")
    assert in_first != in_second
    assert trained_tokens(lines) == {1: in_first, 2: in_second, 3: in_first}
    validated = [(line["subset"], line["num_tokens"]) for line in lines if line["kind"] == "valid"]
    assert validated == [("valid", num_tokens(first / "valid"))] * 3


def test_train_subset_and_several_valid_subsets(tmp_path):
    flags = {"train_subset": "test", "valid_subset": "valid,train", "batch_size": 128, "max_epoch": 1}
    leg = train_a_leg(flags | {"save_dir": str(tmp_path)})
    lines = metrics(tmp_path)
    assert trained_tokens(lines) == {1: num_tokens(GOLDEN / "bin" / "test")}
    validated = [line for line in lines if line["kind"] == "valid"]
    assert [line["subset"] for line in validated] == ["valid", "train"]
    assert [line["num_tokens"] for line in validated] == [
        num_tokens(GOLDEN / "bin" / name) for name in ("valid", "train")
    ]
    assert validated[0]["loss_base2"] != validated[1]["loss_base2"]
    assert leg.progress["best_loss"] == validated[0]["loss_base2"], "the first split decides what is best"


# --- what is kept ---


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(
            {"keep_last_epochs": 2}, ["checkpoint_1_4", "checkpoint_3_12", "checkpoint_4_16"], marks=pytest.mark.slow
        ),
        ({"keep_last_epochs": 1, "keep_best_checkpoints": 2}, ["checkpoint_1_4", "checkpoint_3_12", "checkpoint_4_16"]),
        ({"keep_last_epochs": 1, "best_checkpoint_metric": "ppl"}, ["checkpoint_1_4", "checkpoint_4_16"]),
    ],
    ids=str,
)
def test_a_run_keeps_the_last_and_the_best(tmp_path, monkeypatch, flags, expected):
    losses = iter([1.0, 4.0, 2.0, 3.0])
    monkeypatch.setattr(validation.Validation, "loss_base2", property(lambda self: next(losses)))
    monkeypatch.setattr("lmtools.train.report.Reporter.validation", lambda *_: None)  # asks for the loss again
    run = {"batch_size": 128, "max_epoch": 4, "valid_subset": "valid"}
    train_a_leg(run | flags | {"save_dir": str(tmp_path)})
    assert kept(tmp_path) == expected
    assert os.readlink(tmp_path / BEST) == "checkpoint_1_4"


# --- from another's checkpoint ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the middle of the second epoch, whose best loss no later validation reaches."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation.Validation, "loss_base2", property(lambda self: 0.5))
        train_a_leg(SECOND_RUN | {"max_update": 6, "save_dir": str(folder)})
    return folder / "checkpoint_2_6"


SECOND_RUN: dict[str, Any] = {
    "batch_size": 128,
    "valid_subset": "valid",
    "lr_scheduler": "inverse_sqrt",
    "warmup_updates": 10,
    "lr": 0.01,
}


@pytest.mark.parametrize(
    ("flags", "num_updates", "lr", "epoch", "is_best"),
    [
        ({}, 7, 0.007, 2, False),
        ({"reset_lr_scheduler": True}, 7, 0.001, 2, False),
        ({"reset_dataloader": True}, 7, 0.007, 1, False),
        ({"reset_meters": True}, 7, 0.007, 2, True),
        ({"reset_optimizer": True}, 1, 0.001, 2, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_restored_run_goes_on_with(tmp_path, trained, flags, num_updates, lr, epoch, is_best):
    """Its first update: number, rate and epoch; and whether its validation is the best so far."""
    run = SECOND_RUN | flags | {"restore_file": str(trained), "max_update": num_updates, "save_dir": str(tmp_path)}
    leg = train_a_leg(run)
    assert leg.origin == f"restored from {trained}"
    (update,) = [line for line in metrics(tmp_path) if line["kind"] == "update"]
    assert (update["num_updates"], update["epoch"]) == (num_updates, epoch)
    assert update["lr"] == pytest.approx(lr)
    assert (tmp_path / BEST).exists() == is_best
    assert float(leg.tensors["optimizer.layer_norm.weight.step"]) == num_updates


def test_a_restored_run_does_not_go_on_with_another_runs_metrics(tmp_path, trained):
    flags = SECOND_RUN | {"restore_file": str(trained), "max_update": 7, "save_dir": str(tmp_path)}
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "update", "num_updates": 6, "num_skipped": 0, "loss_base2": 99}\n'
    )
    train_a_leg(flags)
    assert [line["num_updates"] for line in metrics(tmp_path) if line["kind"] == "update"] == [7]
    again = flags | {"restore_file": str(tmp_path / "checkpoint_2_7"), "resume": "never", "max_update": 8}
    train_a_leg(again)
    assert [line["num_updates"] for line in metrics(tmp_path) if line["kind"] == "update"] == [7, 8], "its own"


def test_a_run_that_goes_on_within_an_epoch_says_when_its_batches_are_others(tmp_path, trained):
    flags = SECOND_RUN | {"restore_file": str(trained), "max_update": 6}
    found = {}
    for name, value in {"batch_size": 64, "seed": 2, "update_freq": 2, "reset_dataloader": True}.items():
        found[name] = train_a_leg(flags | {"save_dir": str(tmp_path / name), name: value}).origin
    plain = f"restored from {trained}"
    within = f"{plain}, which is within an epoch of"
    assert found == {
        "batch_size": f"{within} --batch-size 128: some of its blocks are read twice or left out",
        "seed": f"{within} --seed 1: some of its blocks are read twice or left out",
        "update_freq": plain,
        "reset_dataloader": plain,
    }


def test_a_finetuned_run_is_a_new_one_but_for_its_weights(tmp_path, trained):
    run = SECOND_RUN | {"max_update": 1, "save_dir": str(tmp_path / "tuned")}
    tuned = train_a_leg(run | {"finetune_from": str(trained)})
    new = train_a_leg(run | {"save_dir": str(tmp_path / "new")})
    assert tuned.origin == f"weights of {trained}"
    assert tuned.progress | {"best_loss": None} == new.progress | {"best_loss": None}
    first, of_new = metrics(tmp_path / "tuned")[0], metrics(tmp_path / "new")[0]
    assert [first[name] for name in ("num_updates", "epoch", "lr")] == [1, 1, pytest.approx(0.001)]
    assert first["loss_base2"] < of_new["loss_base2"], "it has learned something"
