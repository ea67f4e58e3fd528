"""Options that are handed on arrive where they are for."""

from __future__ import annotations

from pathlib import Path

import torch

from lmtools.train.build import build_optimizer
from lmtools.train.data import open_data
from tests.support.ranks import run_ranks
from tests.support.training import cpu_mesh, state_of_noise, tiny_run, train_a_leg


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
