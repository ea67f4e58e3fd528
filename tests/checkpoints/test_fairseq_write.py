"""What is written as fairseq's parts is read back as it was, in any number of parts, and is all there or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmtools.checkpoints.fairseq import open_fairseq
from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.unpickle import plain, read_torch_file
from lmtools.errors import CheckpointError, ConfigError, LmtoolsError
from lmtools.models.architectures import TransformerLMConfig, transformer_lm
from lmtools.models.transformer_lm import TransformerLM

MEGATRON = transformer_lm(
    144,
    decoder_layers=2,
    decoder_embed_dim=32,
    decoder_ffn_embed_dim=64,
    decoder_attention_heads=4,
    max_target_positions=32,
    activation_fn="gelu",
    decoder_normalize_before=True,
    share_decoder_input_output_embed=True,
    dropout=0.0,
)
"""The shape of the golden models that fairseq split over 2 and 4 ranks."""

VARIANTS = {
    "megatron": MEGATRON,
    "untied, learned positions": replace(
        MEGATRON, share_decoder_input_output_embed=False, decoder_learned_pos=True, layernorm_embedding=True
    ),
    "post-norm, tanh GELU": replace(MEGATRON, decoder_normalize_before=False, activation_fn="gelu_accurate"),
    "no positions": replace(MEGATRON, no_token_positional_embeddings=True, no_scale_embedding=True, dropout=0.3),
}


def parameters_of(config: TransformerLMConfig) -> dict[str, Tensor]:
    """Random values for every parameter, biases and norms too."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):
        model = TransformerLM(config)
    return {name: torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()}


def write(folder: Path, config: TransformerLMConfig, num_parts: int, dtype: torch.dtype = torch.float32) -> list[Path]:
    values = parameters_of(config)
    return write_fairseq_parts(folder, config, lambda name, at: values[name][at], num_parts=num_parts, dtype=dtype)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_back_as_it_was(tmp_path, variant, num_parts):
    config = VARIANTS[variant]
    paths = write(tmp_path / "checkpoint", config, num_parts)
    checkpoint = open_fairseq(tmp_path / "checkpoint")
    assert checkpoint.paths == tuple(paths)
    assert checkpoint.num_parts == num_parts
    assert checkpoint.config == config
    for part in range(num_parts):
        checkpoint.verify_part(part)
    for name, value in parameters_of(config).items():
        whole = checkpoint.read(name, tuple(slice(0, length) for length in value.shape))
        assert torch.equal(whole, value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_are_stored_in_the_dtype_that_was_asked_for(tmp_path, dtype):
    write(tmp_path / "checkpoint", MEGATRON, 2, dtype)
    checkpoint = open_fairseq(tmp_path / "checkpoint")
    for name, value in parameters_of(MEGATRON).items():
        whole = checkpoint.read(name, tuple(slice(0, length) for length in value.shape))
        assert torch.equal(whole, value.to(dtype)), name


def test_parts_are_laid_out_as_fairseqs_own(golden, tmp_path):
    """The names, shapes and model options that fairseq of 2020 gave its parts of the same model."""
    paths = write(tmp_path / "checkpoint", MEGATRON, 2)
    for part, path in enumerate(paths):
        assert path.name == f"model-model_part-{part}.pt"
        ours = read_torch_file(path).content
        theirs = read_torch_file(golden / "mp2_2020" / path.name).content
        shapes, expected = ({name: t.shape for name, t in c["model"].items()} for c in (ours, theirs))
        assert shapes == expected
        assert theirs.keys() <= ours.keys()
        options, original = plain(ours["args"]), plain(theirs["args"])
        differing = {name for name, value in options.items() if original.get(name, value) != value}
        assert differing == {"data"}, "the path of the data is the reader's business"
        built_from = {"arch", "task", "model_parallel_size", "max_target_positions"}
        built_from |= {name for name in original if name.startswith(("decoder_", "adaptive_", "share_"))}
        assert built_from <= options.keys()


def test_no_storage_is_larger_than_its_tensor(tmp_path):
    """A slice of a parameter is written, not the whole parameter that it is a view of."""
    [first, _] = write(tmp_path / "checkpoint", MEGATRON, 2)
    for name, tensor in read_torch_file(first).content["model"].items():
        assert tensor.storage.num_bytes == tensor.num_elements * tensor.dtype.itemsize, name


def test_one_part_needs_no_class_of_anyones(tmp_path):
    """torch's own loader takes it with its defaults, which refuse every class."""
    [path] = write(tmp_path / "checkpoint", MEGATRON, 1)
    content = torch.load(path, weights_only=True)
    assert content["cfg"]["model"]["decoder_layers"] == 2


@pytest.mark.parametrize(
    ("num_parts", "problem"),
    [(8, "4 attention heads"), (3, "4 attention heads"), (0, "4 attention heads")],
)
def test_parts_of_unequal_size_are_refused(tmp_path, num_parts, problem):
    with pytest.raises(ConfigError, match=problem):
        write(tmp_path / "checkpoint", MEGATRON, num_parts)
    assert not (tmp_path / "checkpoint").exists()


def test_rows_added_for_parts_of_equal_size_are_zeros_and_left_out_when_read(tmp_path):
    config = replace(MEGATRON, vocab_size=146)
    paths = write(tmp_path / "checkpoint", config, 4)
    embeddings = [read_torch_file(path).content["model"]["decoder.embed_tokens.weight"].read() for path in paths]
    whole = torch.cat(embeddings)
    assert [len(rows) for rows in embeddings] == [37, 37, 37, 37]
    assert torch.equal(whole[:146], parameters_of(config)["embed_tokens.weight"])
    assert not whole[146:].any()
    assert open_fairseq(tmp_path / "checkpoint").config.vocab_size == 146


def test_torch_loads_what_was_streamed_mapped_or_not(tmp_path):
    [path] = write(tmp_path / "checkpoint", MEGATRON, 1, torch.bfloat16)
    for content in (torch.load(path), torch.load(path, mmap=True)):
        for name, value in parameters_of(MEGATRON).items():
            loaded = content["model"][f"decoder.{name}"]
            assert torch.equal(loaded, value.bfloat16()), name
            assert loaded.untyped_storage().data_ptr() % 64 == 0


def test_a_failure_half_way_leaves_nothing(tmp_path):
    values = parameters_of(MEGATRON)
    calls = []

    def read(name: str, at: tuple[slice, ...]) -> Tensor:
        calls.append(name)
        if len(calls) > len(values) + 3:
            raise OSError("the second part's source is gone")
        return values[name][at]

    with pytest.raises(OSError, match="source is gone"):
        write_fairseq_parts(tmp_path / "checkpoint", MEGATRON, read, num_parts=2, dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_checkpoint_is_never_touched(tmp_path):
    write(tmp_path / "checkpoint", MEGATRON, 2)
    with pytest.raises(LmtoolsError, match="exists already"):
        write(tmp_path / "checkpoint", MEGATRON, 4)
    assert open_fairseq(tmp_path / "checkpoint").num_parts == 2


def test_parts_of_two_sets_are_refused(tmp_path):
    """Even when no replicated parameter tells them apart."""
    write(tmp_path / "one", MEGATRON, 2)
    write(tmp_path / "two", MEGATRON, 2)
    (tmp_path / "two" / "model-model_part-1.pt").replace(tmp_path / "one" / "model-model_part-1.pt")
    with pytest.raises(CheckpointError, match=r"model-model_part-1\.pt: belongs to another set of parts"):
        open_fairseq(tmp_path / "one")
