"""Text from a model whose blocks stay in their files: the same, and in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.checkpoints.offload import BASE_BYTES, load_offloaded, rows_together
from lmtools.checkpoints.reshard import reshard
from lmtools.errors import ConfigError
from lmtools.generate.beam import beam_search
from lmtools.generate.decode import Limits, continue_prompts
from lmtools.generate.sampling import Sampling
from lmtools.models.architectures import TransformerLMConfig, transformer_lm_megatron, transformer_lm_megatron_11b
from tests.generate.models import ALONE, CPU, EOS, limits, some_prompts
from tests.support.live_memory import LiveMemory

REPOSITORY = Path(__file__).parents[2]
SAMPLINGS = [Sampling(), Sampling(1.5, seed=3), Sampling(1.0, top_k=5, seed=4), Sampling(1.0, top_p=0.8, seed=5)]


@pytest.mark.parametrize("path", ["mp4", pytest.param("mp2_2020", marks=pytest.mark.slow), "plain/model.pt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_and_probabilities_are_those_of_the_model_in_memory(golden: Path, path, dtype):
    """Greedy, drawn and by beam search, to the last bit: the same operations on the same rows."""
    checkpoint, prompts, bounds = open_checkpoint(golden / path), some_prompts(7), limits(10)
    whole, offloaded = load_model(checkpoint, ALONE, dtype), load_offloaded(checkpoint, CPU, dtype)
    for sampling in SAMPLINGS:
        expected = continue_prompts(whole, prompts, ALONE, bounds, sampling)
        assert continue_prompts(offloaded, prompts, ALONE, bounds, sampling) == expected
    expected_best = beam_search(whole, prompts[:3], ALONE, bounds, beam=4)
    assert beam_search(offloaded, prompts[:3], ALONE, bounds, beam=4) == expected_best


class Watched:
    """An open checkpoint that counts what is read of its blocks, and the bytes of it that are still there."""

    def __init__(self, checkpoint) -> None:
        self._checkpoint = checkpoint
        self.counts: Counter[str] = Counter()
        self.now = self.peak = 0

    def __getattr__(self, name):
        return getattr(self._checkpoint, name)

    def read(self, name, slices):
        tensor = self._checkpoint.read(name, slices)
        if name.startswith("layers."):
            self.counts[name] += 1
            self.now += tensor.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._forget, tensor.nbytes)
        return tensor

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


def model_of(folder: Path, **shape: int) -> tuple[TransformerLMConfig, Watched]:
    """A model of a shape, with small values."""
    config = transformer_lm_megatron(**shape, max_target_positions=1024, share_decoder_input_output_embed=True)

    def read(name: str, at: tuple[slice, ...]) -> torch.Tensor:
        return torch.full([piece.stop - piece.start for piece in at], 0.01)

    write_fairseq_parts(folder, config, read, num_parts=1, dtype=torch.float32)
    return config, Watched(open_checkpoint(folder))


SMALL = {
    "vocab_size": 150,
    "decoder_layers": 6,
    "decoder_embed_dim": 32,
    "decoder_ffn_embed_dim": 128,
    "decoder_attention_heads": 4,
}


def test_a_new_token_of_all_prompts_reads_each_block_once_and_two_are_there(tmp_path):
    """The one that computes and the one that is read; `rows_together` has room for three."""
    _, checkpoint = model_of(tmp_path / "model", **SMALL)
    model = load_offloaded(checkpoint, CPU, torch.float32)
    found = continue_prompts(model, some_prompts(8), ALONE, limits(5, eos_index=0), Sampling())
    assert [len(one.tokens) for one in found] == [5] * 8
    of_the_last = {name: count for name, count in checkpoint.counts.items() if "layers.5." in name}
    assert set(of_the_last.values()) == {5}, "prompts and four tokens: the fifth is not read"
    block = sum(parameter.numel() * 4 for parameter in model.layers[0].parameters())
    assert block < checkpoint.peak <= 2 * block


def most_memory(model, prompts: list[list[int]], bounds: Limits, beam: int) -> int:
    """The most bytes that are there at once, without the model's."""
    with LiveMemory(except_for=[p for p in model.parameters() if not p.is_meta]) as memory:
        if beam > 1:
            beam_search(model, prompts[: len(prompts) // beam], ALONE, bounds, beam=beam)
        else:
            continue_prompts(model, prompts, ALONE, bounds, Sampling(1.0, top_p=0.9))
    return memory.peak


PROMPT, CACHE, CHOICE = "its prompts", "its cache", "the choice"
MOST = {
    PROMPT: ({"decoder_layers": 2, "decoder_ffn_embed_dim": 256}, 96),
    CACHE: ({"decoder_layers": 12, "decoder_ffn_embed_dim": 32}, 24),
    CHOICE: ({"decoder_layers": 1, "vocab_size": 5000}, 8),
}


@pytest.mark.parametrize(("beam", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (8, torch.float32)], ids=str)
@pytest.mark.parametrize("most_for", MOST)
def test_as_many_rows_as_are_said_to_fit_do(tmp_path, most_for, beam, dtype):
    """And not many more: what 8 rows took is said to be enough for 5 to 8. A beam reads its prompt as one row."""
    (shape, prompt_length), new_tokens, rows = MOST[most_for], 4, 8
    config, checkpoint = model_of(tmp_path / "model", **SMALL | shape)
    model = load_offloaded(checkpoint, CPU, dtype)
    peak = most_memory(model, [[5] * prompt_length] * rows, Limits(range(4, 140), EOS, new_tokens, 1024), beam)
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    outside = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    capacity = prompt_length + new_tokens - 1

    def fit(num_bytes: int) -> int:
        there = BASE_BYTES + (outside + 3 * block) * dtype.itemsize
        return rows_together(
            config, memory_bytes=there + num_bytes, prompt_length=prompt_length, capacity=capacity, dtype=dtype
        )

    assert fit(peak) <= rows
    if beam == 1 or most_for == CACHE:
        assert fit(peak) >= 5


MEGATRON_11B = transformer_lm_megatron_11b(51_200, share_decoder_input_output_embed=True)


def test_sequences_of_megatron_11b():
    """A sequence of 1,024 tokens has 906 MB of keys and values in bfloat16."""
    lengths = {"prompt_length": 24, "capacity": 1024, "dtype": torch.bfloat16}
    assert rows_together(MEGATRON_11B, memory_bytes=6 << 30, **lengths) == 4
    with pytest.raises(
        ConfigError, match=r"^--offload-memory 6: this model needs at least (\d+\.\d\d) GiB for 8 x 1024"
    ) as no:
        rows_together(MEGATRON_11B, memory_bytes=6 << 30, at_least=8, **lengths)
    enough = float(str(no.value).split("at least ")[1].split()[0]) + 0.01
    assert rows_together(MEGATRON_11B, memory_bytes=int(enough * 2**30), at_least=8, **lengths) == 8


MEASURED = """
import resource, sys
from lmtools.cli import main

def high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def generate(path: str) -> None:
    sys.argv = ["lmtools", "generate", "--path", path, *sys.argv[3:]]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0

arguments, before = sys.argv, 0
for path in arguments[1:3]:
    sys.argv = arguments
    before = high_water()
    generate(path)
print(high_water() - before)
"""


@pytest.mark.slow
def test_a_model_of_300_megabytes_is_never_in_memory(golden, tmp_path):
    """Blocks of 12.6 MB: three of them, and little beside; a model in memory would take 302."""
    shape = {"decoder_layers": 24, "decoder_embed_dim": 512, "decoder_ffn_embed_dim": 2048}
    model_of(tmp_path / "parts", **SMALL | shape | {"vocab_size": 144})
    reshard(tmp_path / "parts", tmp_path / "set", num_parts=2, format="safetensors")
    assert sum(path.stat().st_size for path in (tmp_path / "set").iterdir()) > 300_000_000
    options = ["--dict", golden / "bin", "--prompt", "and", "--prompt", "= and", "--max-new-tokens", 3, "--offload"]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, [golden / "mp4", tmp_path / "set", *options])],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout.splitlines()[-1]) * 1024 < 60_000_000
