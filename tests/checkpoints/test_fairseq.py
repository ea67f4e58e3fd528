"""fairseq's checkpoints: found by any of their names, complete, consistent, and read from any parts for any ranks.

Whatever is wrong with one is an error that says what and where, before any forward pass. The damaged checkpoints are
copies of genuine ones, written with torch.save in both formats.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtools.checkpoints.fairseq import FairseqCheckpoint, open_fairseq
from lmtools.checkpoints.fairseq_config import model_settings, transformer_lm_config
from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.errors import CheckpointError
from lmtools.models.architectures import TransformerLMConfig, transformer_lm, transformer_lm_megatron_11b
from lmtools.models.transformer_lm import TransformerLM
from lmtools.parallel.parallelize import without_memory
from lmtools.parallel.plans import TRANSFORMER_LM, shard_bounds, split_of

GOLDEN = Path(__file__).parent.parent / "golden"
PART = "model-model_part-{}.pt"
EMBEDDING, FC1 = "decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight"
NORM = "decoder.layers.1.final_layer_norm.weight"

Damage = Callable[[dict[str, Any]], None]


def load(path: Path) -> dict[str, Any]:
    """The genuine file as torch reads it; ours name nothing that is not here."""
    content: dict[str, Any] = torch.load(path, weights_only=False)
    return content


def damaged(folder: Path, damage: Damage, *, part: int = 1, source: str = "mp4", legacy: bool = False) -> Path:
    """A copy of a genuine checkpoint, one part of it changed."""
    target = folder / source
    shutil.copytree(GOLDEN / source, target)
    content = load(target / PART.format(part))
    damage(content)
    torch.save(content, target / PART.format(part), _use_new_zipfile_serialization=not legacy)
    return target


def verify(checkpoint: FairseqCheckpoint) -> None:
    for part in range(checkpoint.num_parts):
        checkpoint.verify_part(part)


def whole(checkpoint: FairseqCheckpoint, name: str) -> Tensor:
    shape = checkpoint.parts[0][name].shape
    dim = split_of(name, TRANSFORMER_LM).dim
    sizes = [n * checkpoint.num_parts if i == dim else n for i, n in enumerate(shape)]
    return checkpoint.read(name, tuple(slice(0, n) for n in sizes))


# --- finding it ---


@pytest.mark.parametrize("name", ["", "model.pt", "model", PART.format(0), PART.format(3)])
def test_a_folder_a_stem_and_any_part_name_the_whole_checkpoint(golden: Path, name):
    checkpoint = open_fairseq(golden / "mp4" / name)
    assert [path.name for path in checkpoint.paths] == [PART.format(part) for part in range(4)]


def test_a_single_file_is_a_checkpoint_of_one_part(golden: Path) -> None:
    checkpoint = open_fairseq(golden / "plain" / "model.pt")
    assert checkpoint.num_parts == 1
    assert checkpoint.config.vocab_size == 144


def test_a_stem_with_dots(tmp_path, golden: Path) -> None:
    for part in range(2):
        shutil.copy(golden / "mp2_2020" / PART.format(part), tmp_path / f"checkpoint.best.1-model_part-{part}.pt")
    for name in ("", "checkpoint.best.1", "checkpoint.best.1.pt"):
        assert open_fairseq(tmp_path / name).num_parts == 2


def test_ten_parts_are_in_order_of_their_numbers(tmp_path) -> None:
    config = transformer_lm(
        32, decoder_layers=1, decoder_embed_dim=16, decoder_ffn_embed_dim=16, decoder_attention_heads=16
    )
    write_fairseq_parts(tmp_path / "model", config, zeros(config), num_parts=16, dtype=torch.float32)
    checkpoint = open_fairseq(tmp_path / "model")
    assert [path.name for path in checkpoint.paths] == [PART.format(part) for part in range(16)]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("plain", r"plain: holds 2 checkpoints; name one of checkpoint_init.pt, model.pt"),
        ("bin", r"bin: no .pt file in this folder"),
        ("absent", r"absent: no such checkpoint, and no absent-model_part-0.pt beside it"),
        ("absent/model.pt", r"no such checkpoint"),
        ("mp4/other.pt", r"other.pt: no such checkpoint"),
        ("test.txt", r"test.txt: .* not a file of torch.save"),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(golden: Path, path, message):
    with pytest.raises(CheckpointError, match=message):
        open_fairseq(golden / path)


def test_a_file_and_parts_of_one_stem_are_two_checkpoints(tmp_path, golden: Path) -> None:
    shutil.copytree(golden / "mp4", tmp_path / "both")
    shutil.copy(golden / "plain" / "model.pt", tmp_path / "both" / "model.pt")
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints; name one of model-model_part-0.pt, model.pt"):
        open_fairseq(tmp_path / "both")
    assert open_fairseq(tmp_path / "both" / "model.pt").num_parts == 1
    assert open_fairseq(tmp_path / "both" / PART.format(0)).num_parts == 4


# --- all of it ---


@pytest.mark.parametrize("missing", [[0], [2], [0, 1, 2]])
def test_missing_parts_are_named(tmp_path, golden: Path, missing):
    target = tmp_path / "mp4"
    shutil.copytree(golden / "mp4", target)
    for part in missing:
        (target / PART.format(part)).unlink()
    names = ", ".join(PART.format(part) for part in missing)
    with pytest.raises(CheckpointError, match=f"{len(missing)} of 4 parts missing: {names}$"):
        open_fairseq(target)


@pytest.mark.parametrize("source", ["mp4", "mp2_2020"])
def test_a_missing_last_part_is_named_too(tmp_path, golden: Path, source):
    """The files alone do not say so; the checkpoint's options do."""
    shutil.copytree(golden / source, tmp_path / source)
    last = max((tmp_path / source).glob("*.pt"))
    last.unlink()
    with pytest.raises(CheckpointError, match=f"1 of . parts missing: {last.name}$"):
        open_fairseq(tmp_path / source)


def test_a_part_too_many_is_refused(tmp_path, golden: Path) -> None:
    shutil.copytree(golden / "mp2_2020", tmp_path / "model")
    shutil.copy(golden / "mp2_2020" / PART.format(1), tmp_path / "model" / PART.format(2))
    with pytest.raises(CheckpointError, match="3 parts, but the checkpoint was written by 2"):
        open_fairseq(tmp_path / "model")


def test_a_part_that_lost_its_name_is_refused(tmp_path, golden: Path) -> None:
    shutil.copy(golden / "mp4" / PART.format(0), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is one of 4 model-parallel parts; keep the names"):
        open_fairseq(tmp_path / "model.pt")


def test_parts_of_two_sets_of_lmtools_are_refused(tmp_path) -> None:
    config = transformer_lm(16, decoder_layers=1, decoder_embed_dim=16, decoder_ffn_embed_dim=16)
    for name in ("one", "other"):
        write_fairseq_parts(tmp_path / name, config, zeros(config), num_parts=2, dtype=torch.float32)
    shutil.copy(tmp_path / "other" / PART.format(1), tmp_path / "one" / PART.format(1))
    with pytest.raises(CheckpointError, match=f"{PART.format(1)}: belongs to another set of parts"):
        open_fairseq(tmp_path / "one")


# --- what is in it ---


@pytest.mark.parametrize("source", ["mp4", "mp2_2020"])
def test_values_are_those_that_torch_reads(golden: Path, source):
    checkpoint = open_fairseq(golden / source)
    verify(checkpoint)
    states = [load(path)["model"] for path in checkpoint.paths]
    for name in checkpoint.parts[0]:
        dim = split_of(name, TRANSFORMER_LM).dim
        tensors = [state[f"decoder.{name}"] for state in states]
        expected = tensors[0] if dim is None else torch.cat(tensors, dim=dim)
        assert torch.equal(whole(checkpoint, name), expected), name


def test_both_generations_say_the_same_of_the_model(golden: Path) -> None:
    """Options in `args` (2020) and in `cfg`."""
    new, old = open_fairseq(golden / "mp4").config, open_fairseq(golden / "mp2_2020").config
    assert replace(new, vocab_size=144) == old
    assert (new.vocab_size, new.decoder_normalize_before, new.activation_fn) == (160, True, "gelu")
    plain = open_fairseq(golden / "plain" / "model.pt").config
    assert (plain.decoder_normalize_before, plain.activation_fn, plain.max_target_positions) == (False, "relu", 32)


def drop(name: str) -> Damage:
    return lambda content: content["model"].pop(name)


def put(name: str, value: Any) -> Damage:
    return lambda content: content["model"].update({name: value})


def change(name: str, edit: Callable[[Tensor], Tensor]) -> Damage:
    return lambda content: content["model"].update({name: edit(content["model"][name])})


def option(name: str, value: Any) -> Damage:
    """Of the model, wherever this generation keeps it."""

    def damage(content: dict[str, Any]) -> None:
        options = content["args"] or content["cfg"]["model"]
        options.__dict__[name] = value

    return damage


UNFIT = {
    "missing": (drop(FC1), "part-1.pt: .* unknown none; missing layers.0.fc1.weight"),
    "unknown": (put("decoder.layers.0.fc3.weight", torch.zeros(2)), "part-1.pt: .* unknown layers.0.fc3.weight"),
    "not a tensor": (put("decoder.layers.0.fc1.weight", 3), "part-1.pt: unknown entry 'decoder.layers.0.fc1.weight'"),
    "an encoder": (put("encoder.layers.0.fc1.weight", torch.zeros(2)), "unknown entry 'encoder.layers.0.fc1.weight'"),
    "a number for a name": (put(7, torch.zeros(2)), "unknown entry 7"),  # type: ignore[arg-type]
    "no embedding": (drop(EMBEDDING), "part-1.pt: has no embed_tokens.weight"),
    "a flat embedding": (change(EMBEDDING, Tensor.flatten), "part-1.pt: has no embed_tokens.weight of rows and col"),
    "fewer rows": (change(FC1, lambda t: t[1:].clone()), r"fc1.weight has shape \(63, 32\) over all .* \(64, 32\)"),
    "narrower": (change(FC1, lambda t: t[:, 1:].clone()), r"part-1.pt: .*fc1.weight has shape \(16, 31\), but \(16, "),
    "flat": (change(FC1, Tensor.flatten), r"part-1.pt: .*fc1.weight has shape \(512,\), but \(16, 32\) in"),
    "only here": (drop("decoder.output_projection.weight"), "output_projection.weight is in 3 of 4 parts"),
    "fewer layers": (
        lambda content: [content["model"].pop(name) for name in list(content["model"]) if ".layers.1." in name],
        "part-1.pt: holds 1 layers, its options say decoder_layers=2",
    ),
    "no model": (lambda content: content.pop("model"), "part-1.pt: holds no `model`"),
    "a list for a model": (lambda content: content.update(model=[1]), "part-1.pt: holds no `model`"),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", UNFIT)
def test_tensors_that_do_not_fit_the_options_are_named(tmp_path, case, legacy):
    damage, message = UNFIT[case]
    with pytest.raises(CheckpointError, match=message):
        open_fairseq(damaged(tmp_path, damage, legacy=legacy))


OPTIONS = {
    "another architecture": ("arch", "fconv_lm", "architecture 'fconv_lm', expected a fairseq transformer_lm"),
    "more layers": ("decoder_layers", 3, "holds 2 layers, its options say decoder_layers=3"),
    "endless layers": ("decoder_layers", 10**9, "decoder_layers=1000000000"),
    "another width": ("decoder_ffn_embed_dim", 32, r"fc1.weight has shape \(64, 32\) over all parts, .* \(32, 32\)"),
    "heads": ("decoder_attention_heads", 5, "5 heads do not divide decoder_embed_dim 32"),
    "no heads": ("decoder_attention_heads", 0, "decoder_attention_heads=0, expected a whole number from 1"),
    "a text": ("decoder_ffn_embed_dim", "64", "decoder_ffn_embed_dim='64', expected a whole number from 1"),
    "a fraction": ("decoder_layers", 2.0, "decoder_layers=2.0, expected a whole number from 1"),
    "dropout": ("dropout", 2.5, "dropout=2.5, expected a number from 0 to 1"),
    "a switch": ("decoder_normalize_before", "yes", "decoder_normalize_before='yes', expected True or False"),
    "activation": ("activation_fn", "swish", "activation_fn='swish', expected one of relu, gelu"),
    "activation list": ("activation_fn", ["gelu"], r"activation_fn=\['gelu'\], expected one of"),
    "adaptive": ("adaptive_softmax_cutoff", "10,20", "adaptive_softmax_cutoff='10,20', which lmtools does not supp"),
    "bottleneck": ("decoder_output_dim", 16, "decoder_output_dim=16 differs from decoder_embed_dim=32"),
    "post-norm": ("decoder_normalize_before", False, "unknown layer_norm.bias, layer_norm.weight; missing none"),
    "learned positions": ("decoder_learned_pos", True, "unknown none; missing embed_positions.weight"),
    "number of parts": ("model_parallel_size", "4", "model_parallel_size is str, expected a whole number"),
    "many parts": ("model_parallel_size", 10**12, "4 parts, but the checkpoint was written by 1000000000000"),
    "long": ("activation_fn", "x" * 10**6, r"activation_fn='xxxx.{0,40}xxx', expected"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_do_not_fit_the_tensors_are_named(tmp_path, case):
    name, value, message = OPTIONS[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        open_fairseq(damaged(tmp_path, option(name, value), part=0))
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_options_without_an_end_are_refused(tmp_path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match=r"part-0.pt: options are nested deeper than"):
        open_fairseq(damaged(tmp_path, option("adaptive_input", endless), part=0))


def test_a_file_without_options_is_refused(tmp_path) -> None:
    def damage(content: dict[str, Any]) -> None:
        content.update(args=None, cfg=None)

    with pytest.raises(CheckpointError, match="holds neither `args` nor `cfg`"):
        open_fairseq(damaged(tmp_path, damage, part=0))


def test_transformer_xl_is_another_architecture(golden: Path) -> None:
    with pytest.raises(CheckpointError, match=r"architecture .* expected a fairseq transformer_lm"):
        open_fairseq(golden / "txl" / "checkpoint_last.pt")


# --- what must be equal, is ---


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_replicated_tensor_that_differs_is_named(tmp_path, legacy):
    nudge = change(NORM, lambda tensor: tensor + torch.nn.functional.one_hot(torch.tensor(31), 32) * 1e-6)
    checkpoint = open_fairseq(damaged(tmp_path, nudge, part=2, legacy=legacy))
    with pytest.raises(CheckpointError, match=r"part-2.pt: layers.1.final_layer_norm.weight is replicated but differs"):
        verify(checkpoint)


def test_a_replicated_tensor_of_another_type_differs(tmp_path) -> None:
    checkpoint = open_fairseq(damaged(tmp_path, change(NORM, Tensor.double), part=3))
    with pytest.raises(CheckpointError, match=r"part-3.pt: layers.1.final_layer_norm.weight is replicated but differs"):
        verify(checkpoint)


def test_a_part_of_another_update_is_found_by_its_replicated_tensors(tmp_path, golden: Path) -> None:
    """fairseq's parts carry no id; every layer has norms and biases that each update moves."""
    shutil.copytree(golden / "mp2_2020", tmp_path / "model")
    content = load(tmp_path / "model" / PART.format(1))
    for tensor in content["model"].values():
        tensor += 1e-3
    torch.save(content, tmp_path / "model" / PART.format(1))
    with pytest.raises(CheckpointError, match="the parts are not of one training step"):
        verify(open_fairseq(tmp_path / "model"))


@pytest.mark.parametrize("model", ["mp4", "mp2_2020"])
def test_one_part_under_two_names_is_found(tmp_path, golden: Path, model: str) -> None:
    """All shapes and replicated values fit, and the loss would be a number."""
    shutil.copytree(golden / model, tmp_path / "model")
    shutil.copy(tmp_path / "model" / PART.format(0), tmp_path / "model" / PART.format(1))
    with pytest.raises(CheckpointError, match=r"part-1.pt: holds the same share of the model as .*part-0.pt; one of"):
        verify(open_fairseq(tmp_path / "model"))


def test_parts_of_a_model_of_zeros_are_no_copies(tmp_path, golden: Path) -> None:
    shutil.copytree(golden / "mp2_2020", tmp_path / "model")
    for part in range(2):
        content = load(tmp_path / "model" / PART.format(part))
        for tensor in content["model"].values():
            tensor.zero_()
        torch.save(content, tmp_path / "model" / PART.format(part))
    verify(open_fairseq(tmp_path / "model"))


def test_a_tied_output_that_differs_from_the_embedding_is_named(tmp_path) -> None:
    untie = change(
        "decoder.output_projection.weight", lambda tensor: tensor.clone().index_fill_(0, torch.tensor(39), 0)
    )
    checkpoint = open_fairseq(damaged(tmp_path, untie))
    with pytest.raises(CheckpointError, match=r"part-1.pt: output_projection.weight differs from embed_tokens.weight"):
        verify(checkpoint)


def test_a_tied_output_saved_as_a_copy_is_fine(tmp_path) -> None:
    verify(open_fairseq(damaged(tmp_path, change("decoder.output_projection.weight", Tensor.clone))))


def test_damaged_bytes_are_found_by_their_checksum(tmp_path, golden: Path) -> None:
    shutil.copytree(golden / "mp4", tmp_path / "model")
    path = tmp_path / "model" / PART.format(3)
    tensor = open_fairseq(tmp_path / "model").parts[3]["layers.1.fc2.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.storage.offset + 77] ^= 4
    path.write_bytes(content)
    checkpoint = open_fairseq(tmp_path / "model")
    checkpoint.verify_part(2)
    with pytest.raises(CheckpointError, match=rf"{path.name}: the bytes of storage \d+ have checksum .* it is damaged"):
        checkpoint.verify_part(3)


# --- any parts, for any ranks ---


def zeros(config: TransformerLMConfig) -> Callable[[str, tuple[slice, ...]], Tensor]:
    with without_memory():
        model = TransformerLM(config)
    return lambda name, at: torch.zeros(model.get_parameter(name).shape)[at]


@pytest.fixture(scope="module")
def sixteen_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[int, FairseqCheckpoint]]:
    """One model of 16 heads, and its checkpoints in 1, 2, 4, 8 and 16 parts."""
    config = transformer_lm(
        144,
        decoder_layers=1,
        decoder_embed_dim=32,
        decoder_ffn_embed_dim=48,
        decoder_attention_heads=16,
        decoder_normalize_before=True,
        share_decoder_input_output_embed=True,
    )
    with without_memory():
        model = TransformerLM(config)
    values = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    folder = tmp_path_factory.mktemp("sixteen")
    checkpoints = {}
    for num_parts in (1, 2, 4, 8, 16):
        target = folder / str(num_parts)
        write_fairseq_parts(target, config, lambda name, at: values[name][at], num_parts=num_parts, dtype=torch.float32)
        checkpoints[num_parts] = open_fairseq(target)
    return values, checkpoints


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 5, 8, 16, 100])
def test_any_number_of_parts_is_read_for_any_number_of_ranks(sixteen_heads, num_parts, tp_size):
    values, checkpoints = sixteen_heads
    for name, value in values.items():
        dim = split_of(name, TRANSFORMER_LM).dim
        slices = [slice(0, length) for length in value.shape]
        pieces = []
        for rank in range(tp_size if dim is not None else 1):
            if dim is not None:
                slices[dim] = slice(*shard_bounds(value.shape[dim], tp_size, rank))
            pieces.append(checkpoints[num_parts].read(name, tuple(slices)))
        assert torch.equal(torch.cat(pieces, dim or 0), value), name


@settings(max_examples=60)
@given(data=st.data(), num_parts=st.sampled_from([1, 2, 4, 8, 16]))
def test_any_piece_of_any_parameter(sixteen_heads, data, num_parts):
    values, checkpoints = sixteen_heads
    name = data.draw(st.sampled_from(sorted(values)))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in values[name].shape]
    slices = tuple(slice(*pair) for pair in bounds)
    assert torch.equal(checkpoints[num_parts].read(name, slices), values[name][slices])


# --- the options themselves ---


def test_the_published_checkpoints_options_are_megatron_11b() -> None:
    """As the 2020 code wrote them: what counts of its Namespace."""
    args = argparse.Namespace(
        arch="transformer_lm_megatron_11b",
        model_parallel_size=8,
        activation_fn="gelu",
        adaptive_input=False,
        adaptive_softmax_cutoff=None,
        attention_dropout=0.1,
        character_embeddings=False,
        decoder_attention_heads=32,
        decoder_embed_dim=3072,
        decoder_ffn_embed_dim=18432,
        decoder_input_dim=3072,
        decoder_layers=72,
        decoder_learned_pos=False,
        decoder_normalize_before=True,
        decoder_output_dim=3072,
        dropout=0.1,
        max_target_positions=None,
        no_decoder_final_norm=False,
        no_token_positional_embeddings=False,
        share_decoder_input_output_embed=True,
        tokens_per_sample=1024,
    )
    settings = model_settings({"args": vars(args)}, "model.pt")
    config = transformer_lm_config(settings, 51200, "model.pt")
    assert config == transformer_lm_megatron_11b(51200, share_decoder_input_output_embed=True)


def test_2019s_name_of_the_activations_dropout() -> None:
    settings = {"arch": "transformer_lm_wiki103", "relu_dropout": 0.25, "tokens_per_sample": 512}
    config = transformer_lm_config(settings, 16, "model.pt")
    assert (config.activation_dropout, config.max_target_positions) == (0.25, 512)


def test_a_checkpoint_must_say_how_long_its_windows_are() -> None:
    with pytest.raises(CheckpointError, match="says neither max_target_positions nor tokens_per_sample"):
        transformer_lm_config({"arch": "transformer_lm"}, 16, "model.pt")
