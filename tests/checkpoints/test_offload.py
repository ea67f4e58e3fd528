"""A model whose blocks stay in their files computes what the same model in memory computes, and reads little."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.checkpoints.offload import is_offloaded, load_offloaded, windows_together
from lmtools.checkpoints.reshard import reshard
from lmtools.errors import ConfigError
from lmtools.models.architectures import transformer_lm_megatron_11b
from lmtools.models.cache import KeyValueCache
from lmtools.parallel.mesh import make_mesh

CPU = torch.device("cpu")
CHECKPOINTS = ["mp4", "mp2_2020", "plain/model.pt"]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def tokens(num_windows: int, length: int) -> torch.Tensor:
    return torch.randint(4, 144, (num_windows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("path", CHECKPOINTS)
@pytest.mark.parametrize("score_from", [0, 7])
def test_logits_are_those_of_the_model_in_memory(golden: Path, path, score_from):
    checkpoint = open_checkpoint(golden / path)
    expected = load_model(checkpoint, make_mesh(CPU, dp=1, tp=1), torch.float32)(tokens(50, 32), score_from)
    logits = load_offloaded(checkpoint, CPU, torch.float32)(tokens(50, 32), score_from)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_any_container_will_do(golden: Path, tmp_path):
    reshard(golden / "mp4", tmp_path / "two", num_parts=2, format="safetensors")
    expected = load_offloaded(open_checkpoint(golden / "mp4"), CPU, torch.float32)(tokens(5, 32))
    logits = load_offloaded(open_checkpoint(tmp_path / "two"), CPU, torch.float32)(tokens(5, 32))
    assert torch.equal(logits, expected)


class ReadCounts:
    """An open checkpoint that counts what is read of it."""

    def __init__(self, checkpoint) -> None:
        self._checkpoint = checkpoint
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name):
        return getattr(self._checkpoint, name)

    def read(self, name, slices):
        self.counts[name] += 1
        return self._checkpoint.read(name, slices)


def test_each_block_is_read_once_for_all_windows_of_a_batch(golden: Path):
    checkpoint = ReadCounts(open_checkpoint(golden / "mp4"))
    model = load_offloaded(checkpoint, CPU, torch.float32)
    assert not [name for name in checkpoint.counts if name.startswith("layers.")], "nothing before it is needed"
    for num_passes in (1, 2):
        model(tokens(100, 32))
        model.layers[0]._reader._next[1].result()  # the first block is read ahead for the next batch
        blocks = {name: count for name, count in checkpoint.counts.items() if name.startswith("layers.")}
        assert len(blocks) == 32
        assert {count for name, count in blocks.items() if "layers.0." in name} == {num_passes + 1}
        assert {count for name, count in blocks.items() if "layers.1." in name} == {num_passes}


def test_no_block_stays_in_memory(golden: Path):
    model = load_offloaded(open_checkpoint(golden / "mp4"), CPU, torch.float32)
    model(tokens(1, 32))
    assert all(parameter.is_meta for parameter in model.layers.parameters())
    assert not any(parameter.is_meta for parameter in (model.embed_tokens.weight, model.layer_norm.weight))
    assert is_offloaded(model)


def test_keys_and_values_can_be_kept(golden: Path):
    """As generation does: the prompt first, then a token at a time."""
    model = load_offloaded(open_checkpoint(golden / "mp4"), CPU, torch.float32)
    expected = model.features(tokens(2, 9))
    cache = KeyValueCache(2, capacity=9, device=CPU)
    for start, end in ((0, 8), (8, 9)):
        features = model.features(tokens(2, 9)[:, start:end], cache=cache)
        cache.advance(torch.full((2,), end - start))
        torch.testing.assert_close(features, expected[:, start:end], rtol=0, atol=1e-5)


MEGATRON_11B = transformer_lm_megatron_11b(51_200, share_decoder_input_output_embed=True)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_windows_together_follow_from_the_memory(dtype, itemsize):
    """Megatron-11b: 157 million parameters outside of 72 blocks of 151 million each."""
    block = 151_035_904
    outside = 11_032_246_272 - 72 * block
    intermediate = (3 * 3072 + 2 * 18432) * 1024
    left = (5 << 30) - (outside + 3 * block + intermediate) * itemsize
    num_windows = windows_together(MEGATRON_11B, memory_bytes=6 << 30, length=1024, dtype=dtype)
    assert num_windows == left // (2 * 3072 * 1024 * itemsize)


def test_too_little_memory_is_refused_with_how_much_it_takes():
    with pytest.raises(ConfigError, match=r"^--offload-memory 2: this model needs at least (\d\.\d\d) GiB") as refused:
        windows_together(MEGATRON_11B, memory_bytes=2 << 30, length=1024, dtype=torch.float32)
    enough = float(str(refused.value).split("at least ")[1].split()[0]) + 0.01
    assert windows_together(MEGATRON_11B, memory_bytes=int(enough * 2**30), length=1024, dtype=torch.float32) == 1


def test_an_error_of_the_reading_thread_is_raised_where_the_block_is_needed(golden: Path, tmp_path):
    folder = shutil.copytree(golden / "mp4", tmp_path / "mp4")
    model = load_offloaded(open_checkpoint(folder), CPU, torch.float32)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        model(tokens(1, 32))
