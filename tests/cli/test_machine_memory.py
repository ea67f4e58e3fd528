"""What this machine's memory cannot hold is refused before a worker starts; what fits by a byte is not."""

from __future__ import annotations

import os

import pytest

from lmtools.cli import machine_memory
from lmtools.cli.machine_memory import machine_bytes, require_memory
from lmtools.errors import ConfigError

MATRICES_OF_MP4 = 2 * (4 * 32 * 32 + 2 * 32 * 64) + 160 * 32
EVAL = ["--context-window", 24, "--batch-size", 100]
TRAIN = ["--arch", "transformer_lm", "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32]
TRAIN += [
    "--decoder-attention-heads",
    2,
    "--tokens-per-sample",
    16,
    "--batch-size",
    2,
    "--lr",
    0.1,
    "--no-save",
    "--max-update",
    1,
]
MATRICES_OF_TRAIN = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 144 * 16


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def has(num_bytes: int) -> None:
        monkeypatch.setattr(machine_memory, "machine_bytes", lambda: num_bytes)

    return has


def test_this_machine_has_at_least_its_physical_memory():
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert physical * 0.99 <= machine_bytes() < 1 << 50


def test_only_what_does_not_fit_is_refused(machine):
    machine(3 << 30)
    require_memory(3 << 30, device="cpu", what="it", advice="leave it")
    with pytest.raises(ConfigError, match=r"^it takes 3\.5 GiB at least, this machine has 3\.0 GiB of .*; leave it$"):
        require_memory(7 << 29, device="cpu", what="it", advice="leave it")


def test_a_gpu_and_a_worker_are_not_asked(machine, monkeypatch):
    machine(1)
    require_memory(2, device="cuda", what="it", advice="leave it")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    require_memory(2, device="cpu", what="it", advice="leave it")


@pytest.mark.parametrize(
    ("dtype", "dp", "num_bytes"), [("float32", 1, 4), ("bfloat16", 1, 2), ("float32", 3, 12)], ids=str
)
def test_eval(lmtools, golden, machine, dtype, dp, num_bytes):
    machine(num_bytes * MATRICES_OF_MP4 - 1)
    command = ["eval", golden / "bin", "--path", golden / "mp4", *EVAL, "--device", "cpu", "--dtype", dtype]
    ran = lmtools(*command, "--dp", dp)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(
        f"lmtools: the model in {dtype} takes 0.0 GiB at least, this machine has 0.0 GiB of memory"
    )
    assert ran.err.endswith("use --dtype bfloat16, or --offload\n")
    machine(num_bytes * MATRICES_OF_MP4)
    assert dp > 1 or lmtools(*command).code == 0


def test_offload_needs_no_room_for_the_model(lmtools, golden, machine):
    machine(1)
    ran = lmtools("eval", golden / "bin", "--path", golden / "mp4", *EVAL, "--device", "cpu", "--offload")
    assert ran.code == 0, ran.err


def test_eval_of_streams(lmtools, golden, machine):
    machine(1000)
    options = ["--task", "truncated_bptt_lm", "--path", golden / "txl" / "checkpoint_last.pt", "--device", "cpu"]
    ran = lmtools("eval", golden / "bin", *options)
    assert (ran.code, "the model in float32 takes 0.0 GiB at least" in ran.err) == (2, True)


def test_generate(lmtools, golden, machine):
    machine(4 * MATRICES_OF_MP4 - 1)
    command = ["generate", "--path", golden / "mp4", "--dict", golden / "bin" / "dict.txt", "--prompt", "the"]
    ran = lmtools(*command, "--device", "cpu")
    assert (ran.code, "the model in float32 takes 0.0 GiB at least" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        ([], 16),
        (["--bf16"], 2 + 2 + 4 + 8),
        (["--memory-efficient-bf16"], 2 + 2 + 8),
        (["--optimizer", "sgd"], 8),
        (["--optimizer", "adafactor"], 8),
        (["--dp", 2], 32),
        (["--dp", 2, "--zero", 3], 16),
        (["--mp", 2], 16),
    ],
    ids=str,
)
def test_train(lmtools, golden, machine, tmp_path, options, num_bytes):
    machine(num_bytes * MATRICES_OF_TRAIN * 0.98)
    ran = lmtools("train", golden / "bin", "--save-dir", tmp_path / "run", "--device", "cpu", *TRAIN, *options)
    assert (ran.code, ran.out) == (2, "")
    assert (
        f"training {MATRICES_OF_TRAIN:,} parameters (weights, gradients, the optimizer's state) takes 0.0 GiB"
        in ran.err
    )
    assert not (tmp_path / "run").exists()


def test_a_run_that_fits_is_trained(lmtools, golden, machine, tmp_path):
    machine(16 * MATRICES_OF_TRAIN + 8)
    ran = lmtools("train", golden / "bin", "--save-dir", tmp_path / "run", "--device", "cpu", *TRAIN)
    assert ran.code == 0, ran.err
