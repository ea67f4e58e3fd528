"""A checkpoint onto a mesh: what does not fit is refused first, and a rank holds its share and one tensor more."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmtools.checkpoints import unpickle
from lmtools.checkpoints.fairseq import FairseqCheckpoint
from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.inspect import inspect_path
from lmtools.checkpoints.load import load_model, open_checkpoint, require_dictionary_fits, require_divisible
from lmtools.errors import CheckpointError, ConfigError
from lmtools.models.architectures import transformer_lm
from lmtools.models.transformer_lm import TransformerLM, initialize_parameter
from lmtools.parallel.mesh import make_mesh
from lmtools.parallel.parallelize import seeded_values, without_memory
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def with_shape(checkpoint: FairseqCheckpoint, vocab_size: int, num_heads: int) -> FairseqCheckpoint:
    config = replace(checkpoint.config, vocab_size=vocab_size, decoder_attention_heads=num_heads)
    return replace(checkpoint, config=config)


# --- opened ---


@pytest.mark.parametrize("opened_by", [open_checkpoint, inspect_path])
@pytest.mark.parametrize("name", ["plain/model.pt", "mp4", "txl/checkpoint_last.pt"])
def test_each_file_is_read_once(golden: Path, monkeypatch, name, opened_by) -> None:
    """A pickle names every tensor of its part: reading one twice is the time that it takes to open."""
    opened: list[Path] = []
    read_zip = unpickle._read_zip

    def counted(path, end):
        opened.append(path)
        return read_zip(path, end)

    monkeypatch.setattr(unpickle, "_read_zip", counted)
    opened_by(golden / name)
    assert opened
    assert len(opened) == len(set(opened))


# --- refused before a weight is read ---


def test_the_sizes_that_work_are_named(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "mp4")
    for tp_size in (1, 2, 4):
        require_divisible(checkpoint, tp_size)
    with pytest.raises(ConfigError, match=r"--mp 3: does not divide the model's 4 attention heads .* one of 1, 2, 4$"):
        require_divisible(checkpoint, 3)


def test_ranks_of_unequal_feed_forward_layers_are_refused(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "mp4")
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, decoder_ffn_embed_dim=66))
    require_divisible(checkpoint, 2)
    with pytest.raises(ConfigError, match=r"--mp 4: .* 4 attention heads and 66 feed-forward units; use one of 1, 2$"):
        require_divisible(checkpoint, 4)


def test_a_rank_without_any_of_the_vocabulary_is_refused(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "mp4")
    require_divisible(with_shape(checkpoint, 10, 4), 4)  # 3, 3, 3 and 1
    with pytest.raises(ConfigError, match=r"--mp 4: leaves a rank without any of the vocabulary of 9; use fewer"):
        require_divisible(with_shape(checkpoint, 9, 4), 4)


@pytest.mark.parametrize(
    ("num_types", "rows", "num_heads"),
    [
        (144, 144, 4),  # no padding: 2020's code, and any single file
        (144, 160, 4),  # the last fairseq's, for 4 parts: to a multiple of 32
        (1008, 1024, 8),  # for 8 parts: to a multiple of 64
        (50257, 50264, 32),  # for 1
        (50257, 50432, 32),  # for 32
        (51200, 51200, 32),
    ],
)
def test_a_dictionary_fits_with_and_without_fairseqs_padding(golden: Path, num_types, rows, num_heads):
    require_dictionary_fits(with_shape(open_checkpoint(golden / "mp4"), rows, num_heads), num_types, "dict.txt")


@pytest.mark.parametrize(
    ("num_types", "rows", "num_heads"),
    [(145, 144, 4), (128, 160, 4), (100, 160, 4), (1008, 1040, 8), (50257, 51200, 32), (267744, 51200, 32)],
)
def test_a_dictionary_of_another_size_is_refused(golden: Path, num_types, rows, num_heads):
    checkpoint = with_shape(open_checkpoint(golden / "mp4"), rows, num_heads)
    with pytest.raises(
        CheckpointError, match=rf"bin/dict.txt: has {num_types} types, the embedding .* has {rows} rows"
    ):
        require_dictionary_fits(checkpoint, num_types, "bin/dict.txt")


# --- loaded ---


def pieces_of(path: Path, tp: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    mesh = make_mesh(CPU, dp=1, tp=tp)
    model = load_model(open_checkpoint(path), mesh, dtype)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (model.output_projection.weight is model.embed_tokens.weight) == (
        model.config.share_decoder_input_output_embed
    )
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
        for name, parameter in model.named_parameters()
    }


@pytest.mark.slow
def test_uneven_shares_of_an_untied_model_are_the_whole(tmp_path) -> None:
    """A vocabulary that is no multiple of the ranks."""
    config = transformer_lm(
        37, decoder_layers=1, decoder_embed_dim=12, decoder_ffn_embed_dim=9, decoder_attention_heads=6
    )
    with without_memory():
        model = TransformerLM(config)
    read = seeded_values(model, initialize_parameter, seed=1)
    write_fairseq_parts(tmp_path / "model", config, read, num_parts=1, dtype=torch.float32)
    for pieces in run_ranks(3, pieces_of, tmp_path / "model", 3, torch.float32):
        for name, parameter in model.named_parameters():
            whole = read(name, tuple(slice(0, length) for length in parameter.shape))
            assert torch.equal(pieces[name], whole), name


def test_values_are_converted_to_the_dtype_asked_for(golden: Path) -> None:
    exact = pieces_of(golden / "mp4", 1, torch.float32)
    for name, value in pieces_of(golden / "mp4", 1, torch.bfloat16).items():
        assert torch.equal(value, exact[name].bfloat16()), name


@pytest.mark.slow
def test_a_damaged_part_is_found_whichever_rank_would_read_it(tmp_path, golden: Path) -> None:
    shutil.copytree(golden / "mp4", tmp_path / "mp4")
    path = tmp_path / "mp4" / "model-model_part-2.pt"
    tensor = open_checkpoint(tmp_path / "mp4").parts[2]["layers.0.fc1.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.storage.offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"part-2.pt: the bytes of storage .* it is damaged"):
        pieces_of(tmp_path / "mp4", 1, torch.float32)
    with pytest.raises(CheckpointError, match=r"part-2.pt: the bytes of storage .* it is damaged"):
        run_ranks(2, pieces_of, tmp_path / "mp4", 2, torch.float32)


# --- in little memory ---


def share_largest_and_peak(path: Path, tp: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of this rank's parameters, of the largest one of them, and of memory while they were loaded."""
    # A group of which this process is the only member that is there: loading needs no word from the others.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    mesh = make_mesh(CPU, dp=1, tp=tp)
    load_model(open_checkpoint(path.parent / "small"), mesh, dtype)  # what the first use of anything takes
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    model = load_model(open_checkpoint(path), mesh, dtype)
    peak = _memory("VmHWM") - before
    sizes = [
        parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes
        for parameter in model.parameters()
    ]
    return sum(sizes), max(sizes), peak


def _memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 150 MB in 2 parts, zip and legacy, the embedding its largest tensor by far."""
    shape = {"decoder_layers": 8, "decoder_embed_dim": 512, "decoder_attention_heads": 8}
    folder = tmp_path_factory.mktemp("large")
    for name, vocab_size, layers in (("zip", 24000, 8), ("small", 16, 1)):
        config = transformer_lm(
            vocab_size, **shape | {"decoder_layers": layers, "share_decoder_input_output_embed": True}
        )
        with without_memory():
            shapes = {key: parameter.shape for key, parameter in TransformerLM(config).named_parameters()}
        write_fairseq_parts(
            folder / name,
            config,
            lambda key, at, shapes=shapes: torch.zeros(()).expand(shapes[key])[at],
            num_parts=2,
            dtype=torch.float32,
        )
    (folder / "legacy").mkdir()
    for path in sorted((folder / "zip").iterdir()):
        content = torch.load(path, weights_only=False, mmap=True)
        torch.save(content, folder / "legacy" / path.name, _use_new_zipfile_serialization=False)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (8, torch.float32), (2, torch.float16)])
def test_peak_memory_of_a_rank_is_its_share_and_one_tensor(large_model: Path, container, tp, dtype):
    [(share, largest, peak)] = run_ranks(1, share_largest_and_peak, large_model / container, tp, dtype)
    largest = largest * 4 // dtype.itemsize  # in the file it is float32
    assert share > 18e6
    assert peak <= share + largest + 12e6, (
        f"{peak / 1e6:.0f} MB for a share of {share / 1e6:.0f} MB with tensors of at most {largest / 1e6:.0f} MB"
    )
