"""Any number of parts to any other: the same bits, all or nothing, in a few megabytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.reshard import reshard
from lmtools.checkpoints.unpickle import read_torch_file
from lmtools.errors import CheckpointError, ConfigError, LmtoolsError
from lmtools.models.architectures import transformer_lm
from tests.support.models import MANY_HEADS, random_values, same_bits, values_of, write_random
from tests.support.ranks import run_ranks
from tests.support.training import train_a_leg

REPOSITORY = Path(__file__).parents[2]


# --- the same model ---


@pytest.mark.parametrize("format", ["fairseq", "safetensors"])
@pytest.mark.parametrize("source", ["mp4", "mp2_2020", "plain/model.pt"])
def test_golden_checkpoints_keep_every_bit_through_every_number_of_parts(golden, tmp_path, source, format):
    expected = values_of(open_checkpoint(golden / source))
    here = golden / source
    for step, num_parts in enumerate([1, 4, 2, 4, 1]):
        there = tmp_path / str(step)
        reshard(here, there, num_parts=num_parts, format=format, verify=True)
        checkpoint = open_checkpoint(there)
        assert checkpoint.num_parts == num_parts
        assert checkpoint.config == open_checkpoint(golden / source).config
        assert same_bits(values_of(checkpoint), expected)
        here = there


@pytest.mark.parametrize("format", ["fairseq", pytest.param("safetensors", marks=pytest.mark.slow)])
def test_numbers_of_parts_that_do_not_divide_each_other(tmp_path, format):
    """And a vocabulary of 157 that no number of parts divides."""
    write_random(tmp_path / "source", MANY_HEADS, 8)
    here = tmp_path / "source"
    for step, num_parts in enumerate([3, 16, 1, 8, 4, 8, 2, 12]):
        there = tmp_path / str(step)
        result = reshard(here, there, num_parts=num_parts, format=format, verify=True)
        assert same_bits(values_of(open_checkpoint(there)), random_values(MANY_HEADS))
        assert result["rows_added"] == (-157 % num_parts if format == "fairseq" else 0)
        here = there


@pytest.mark.slow
@pytest.mark.shared
def test_the_shared_golden_checkpoints_too(shared_golden, tmp_path):
    for source in ("mp8", "mp8/legacy_fp16", "mp2_2020"):
        expected = values_of(open_checkpoint(shared_golden / source))
        here = shared_golden / source
        for step, num_parts in enumerate([4, 8, 1, 2]):
            there = tmp_path / source / str(step)
            reshard(here, there, num_parts=num_parts, format=("fairseq", "safetensors")[step % 2], verify=True)
            assert same_bits(values_of(open_checkpoint(there)), expected)
            here = there


def test_a_training_checkpoint_of_two_ranks(tmp_path):
    run_ranks(2, train_a_leg, {"save_dir": str(tmp_path / "run"), "mp": 2, "max_update": 2})
    source = tmp_path / "run" / "checkpoint_last"
    reshard(source, tmp_path / "set", num_parts=4, format="safetensors", verify=True)
    assert same_bits(values_of(open_checkpoint(tmp_path / "set")), values_of(open_checkpoint(source)))
    assert json.loads((tmp_path / "set" / "model.json").read_text())["origin"]["format"] == "training"


@pytest.mark.parametrize("format", ["fairseq", "safetensors"])
def test_parameters_are_converted_to_the_dtype_that_was_asked_for(golden, tmp_path, format):
    reshard(golden / "mp4", tmp_path / "half", num_parts=2, format=format, dtype=torch.float16, verify=True)
    for name, value in values_of(open_checkpoint(golden / "mp4")).items():
        assert torch.equal(values_of(open_checkpoint(tmp_path / "half"))[name], value.half())


def test_a_value_that_the_dtype_cannot_hold_is_an_error(tmp_path):
    values = random_values(MANY_HEADS)
    values["layers.0.fc1.bias"][7] = 1e6
    write_fairseq_parts(
        tmp_path / "source", MANY_HEADS, lambda name, at: values[name][at], num_parts=1, dtype=torch.float32
    )
    with pytest.raises(CheckpointError, match=r"layers\.0\.fc1\.bias: holds 1e\+06, too large for float16"):
        reshard(tmp_path / "source", tmp_path / "half", num_parts=2, format="fairseq", dtype=torch.float16)
    assert not (tmp_path / "half").exists()
    reshard(tmp_path / "source", tmp_path / "half", num_parts=2, format="fairseq", dtype=torch.bfloat16)


def test_untied_and_learned_parameters_are_split_too(tmp_path):
    config = replace(MANY_HEADS, share_decoder_input_output_embed=False, decoder_learned_pos=True)
    write_random(tmp_path / "source", config, 3)
    reshard(tmp_path / "source", tmp_path / "set", num_parts=4, format="fairseq", verify=True)
    assert same_bits(values_of(open_checkpoint(tmp_path / "set")), random_values(config))


# --- what is refused ---


def test_heads_that_do_not_divide_are_named(golden, tmp_path):
    with pytest.raises(ConfigError, match=r"--mp 3: does not divide the model's 4 attention heads"):
        reshard(golden / "mp4", tmp_path / "three", num_parts=3, format="safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_left_alone(golden, tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(LmtoolsError, match="exists already"):
        reshard(golden / "mp4", tmp_path, num_parts=1, format="safetensors")
    assert (tmp_path / "kept").read_text() == "mine"


def test_replicated_tensors_that_differ_are_an_error_unless_allowed(tmp_path):
    config = replace(MANY_HEADS, vocab_size=160)
    first, second = write_random(tmp_path / "source", config, 2)
    content = torch.load(second, weights_only=False)
    content["model"]["decoder.layers.0.fc2.bias"][-1] = 3.0
    torch.save(content, second)
    with pytest.raises(CheckpointError, match=r"part-1\.pt: layers\.0\.fc2\.bias is replicated but differs"):
        reshard(first.parent, tmp_path / "set", num_parts=1, format="safetensors")
    assert not (tmp_path / "set").exists()
    result = reshard(
        first.parent, tmp_path / "set", num_parts=1, format="safetensors", allow_replica_drift=True, verify=True
    )
    assert result["replica_drift"] == ["layers.0.fc2.bias"]
    assert same_bits(values_of(open_checkpoint(tmp_path / "set")), random_values(config))


def test_damage_is_found_before_anything_is_written(golden, tmp_path):
    reshard(golden / "mp4", tmp_path / "source", num_parts=2, format="fairseq")
    path = tmp_path / "source" / "model-model_part-1.pt"
    tensor = read_torch_file(path).content["model"]["decoder.layers.0.fc1.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.storage.offset + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model-model_part-1\.pt: the bytes of storage \d+ have checksum"):
        reshard(tmp_path / "source", tmp_path / "set", num_parts=1, format="safetensors")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("format", ["fairseq", "safetensors"])
def test_what_was_written_wrong_is_found(golden, tmp_path, monkeypatch, format):
    from lmtools.checkpoints import reshard as module

    def write_and_damage(folder, weights, **options):
        def read(name, at):
            values = weights.read(name, at)
            return values + 1 if name == "layers.1.fc2.bias" else values

        return original(folder, replace(weights, read=read), **options)

    original = module.WRITERS[format]
    monkeypatch.setitem(module.WRITERS, format, write_and_damage)
    with pytest.raises(CheckpointError, match=r"layers\.1\.fc2\.bias is not what was read"):
        reshard(golden / "mp4", tmp_path / "set", num_parts=2, format=format, verify=True)
    assert list(tmp_path.iterdir()) == []


# --- killed, and in how much memory ---

KILLED_IN_THE_SECOND_PART = """
import os, signal, sys
from pathlib import Path
from lmtools.checkpoints import weights
from lmtools.checkpoints.reshard import reshard

source, target, format, second_part = sys.argv[1:]
original, calls = weights.bytes_of, []
def bytes_of(values):
    calls.extend(Path(target).parent.rglob(second_part))
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(values)
weights.bytes_of = bytes_of
reshard(source, target, num_parts=2, format=format)
"""


@pytest.mark.parametrize(
    ("format", "second_part"),
    [("fairseq", "*part-1.pt"), pytest.param("safetensors", "model-1-of-2*", marks=pytest.mark.slow)],
)
def test_killed_in_the_middle_leaves_nothing_that_loads(golden, tmp_path, format, second_part):
    arguments = [golden / "mp4", tmp_path / "out" / "set", format, second_part]
    command = [sys.executable, "-c", KILLED_IN_THE_SECOND_PART, *map(str, arguments)]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "set").exists()
    left = list(tmp_path.rglob("*"))
    assert len(left) > 2, "it was killed in the middle"
    for path in left:
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


MEASURED = """
import resource, sys
from lmtools.checkpoints.reshard import reshard

reshard(sys.argv[1], sys.argv[2] + "-warm", num_parts=2, format=sys.argv[4])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reshard(sys.argv[3], sys.argv[2], num_parts=int(sys.argv[5]), format=sys.argv[4], verify=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""

LARGE = transformer_lm(
    32768,
    decoder_layers=3,
    decoder_embed_dim=1024,
    decoder_ffn_embed_dim=4096,
    decoder_attention_heads=16,
    share_decoder_input_output_embed=True,
)
"""285 MB in float32, of which the embedding has 134."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The large model in 4 zip archives, and in 4 legacy files."""
    folder = tmp_path_factory.mktemp("large")

    def read(name: str, at: tuple[slice, ...]) -> torch.Tensor:
        return torch.full([piece.stop - piece.start for piece in at], 0.5)

    paths = write_fairseq_parts(folder / "zip", LARGE, read, num_parts=4, dtype=torch.float32)
    (folder / "legacy").mkdir()
    for path in paths:
        content = torch.load(path, weights_only=False)
        torch.save(content, folder / "legacy" / path.name, _use_new_zipfile_serialization=False)
    return {"zip": folder / "zip", "legacy": folder / "legacy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("container", "format", "num_parts"),
    [("legacy", "fairseq", 1), pytest.param("zip", "safetensors", 2, marks=pytest.mark.slow)],
)
def test_memory_does_not_grow_with_the_model(golden, tmp_path, large, container, format, num_parts):
    """A few blocks of 8 MB: far less than the largest tensor, 134 MB, or the smallest part, 36 MB."""
    arguments = [golden / "mp4", tmp_path / "out", large[container], format, num_parts]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout) * 1024 < 50_000_000
