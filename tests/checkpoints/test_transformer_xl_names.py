"""Names of Transformer-XL's parameters in checkpoints of fairseq, Hugging Face and the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmtools.checkpoints.transformer_xl_names import (
    Source,
    config_from_settings,
    parameter_sources,
    settings_from_shapes,
)
from lmtools.errors import CheckpointError
from lmtools.models.architectures import transformer_xl
from lmtools.models.transformer_xl import TransformerXL
from tests.support.transformer_xl_states import (
    config_of,
    huggingface_state,
    original_state,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "one width": {},
    "narrowing": {"div_val": 2},
    "projected": {"d_embed": 4},
    "shared biases": {"untie_r": False},
    "nothing shared": {"div_val": 2, "not_tied": True, "proj_share_all_but_first": False},
    "one cluster": {"cutoffs": ()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_parameter_has_a_source_of_its_shape_and_every_number_a_parameter(options):
    config = config_of(**options)
    state = huggingface_state(config)
    sources = parameter_sources(state, config, "file")
    parameters = dict(TransformerXL(config).named_parameters())
    assert sources.keys() == parameters.keys()
    taken = {name: source.take(state) for name, source in sources.items()}
    assert {name: tensor.shape for name, tensor in taken.items()} == {
        name: parameter.shape for name, parameter in parameters.items()
    }
    numbers = torch.cat([tensor.flatten() for tensor in taken.values()])
    distinct = {
        number for name, tensor in state.items() if "inv_freq" not in name for number in tensor.flatten().tolist()
    }
    assert sorted(numbers.tolist()) == sorted(distinct)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shared_tensors_may_be_listed_once(options):
    config = config_of(**options)
    state = huggingface_state(config)
    sources = parameter_sources(state, config, "file")
    once = {source.name for source in sources.values()}
    assert parameter_sources(once, config, "file") == sources
    for source in sources.values():
        assert all(torch.equal(state[copy], state[source.name]) for copy in source.copies if copy in state)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shared_tensors_may_be_listed_under_any_of_their_names(options):
    """As tools that leave out the other names choose; here the last."""
    config = config_of(**options)
    state = huggingface_state(config)
    sources = parameter_sources(state, config, "file")
    last = {[name for name in (source.name, *source.copies) if name in state][-1] for source in sources.values()}
    found = parameter_sources(last, config, "file")
    assert {source.name for source in found.values()} == last
    for name, source in found.items():
        assert torch.equal(source.take(state), sources[name].take(state)), name


def test_queries_keys_and_values_are_thirds():
    state = huggingface_state(config_of())
    sources = parameter_sources(state, config_of(), "file")
    fused = state["transformer.layers.1.dec_attn.qkv_net.weight"]
    for name, third in zip(("q", "k", "v"), fused.chunk(3), strict=True):
        assert torch.equal(sources[f"layers.1.self_attn.{name}_proj.weight"].take(state), third)


def test_fairseqs_root():
    config = config_of()
    state = huggingface_state(config)
    theirs = {f"decoder.model.{name}": tensor for name, tensor in state.items()}
    sources = parameter_sources(theirs, config, "file")
    expected = parameter_sources(state, config, "file")
    assert sources == {
        name: Source(
            f"decoder.model.{source.name}",
            source.rows,
            source.reversed,
            tuple(f"decoder.model.{copy}" for copy in source.copies),
        )
        for name, source in expected.items()
    }


@pytest.mark.parametrize("root", ["", "module."])
@pytest.mark.parametrize("options", [{}, {"div_val": 2}], ids=["one width", "narrowing"])
def test_the_original(options, root):
    config = config_of(untie_r=False, **options)
    theirs = {root + name: tensor for name, tensor in original_state(config).items()}
    state = huggingface_state(config)
    expected = parameter_sources(state, config, "file")
    sources = parameter_sources(theirs, config, "file")
    for name, source in sources.items():
        assert torch.equal(source.take(theirs), expected[name].take(state)), name


def test_the_originals_tail_i_is_entry_minus_i_of_the_first_choice():
    config = config_of(untie_r=False)
    state = original_state(config)
    sources = parameter_sources(state, config, "file")
    tails = sources["adaptive_softmax.tails.weight"].take(state)
    for i in (1, 2):
        assert torch.equal(tails[i - 1], state["crit.cluster_weight"][-i])


def test_a_missing_tensor_is_named():
    state = huggingface_state(config_of())
    del state["transformer.layers.1.dec_attn.o_net.weight"]
    with pytest.raises(CheckpointError, match=r"^model.pt: has no transformer.layers.1.dec_attn.o_net.weight \(1 of"):
        parameter_sources(state, config_of(), "model.pt")


def test_an_entry_that_is_no_parameter_is_named():
    state = huggingface_state(config_of(n_layer=3))
    with pytest.raises(CheckpointError, match=r"^model.pt: transformer.layers.2.* is no tensor of a Transformer-XL"):
        parameter_sources(state, config_of(n_layer=2), "model.pt")


def test_huggingface_settings():
    settings = {
        "vocab_size": 13,
        "cutoffs": [5, 8],
        "tie_projs": [False, True, True],
        "tie_weight": True,
        "untie_r": True,
        "d_model": 8,
        "sample_softmax": -1,
        "model_type": "transfo-xl",
    }
    assert config_from_settings(settings, 13, "file") == transformer_xl(13, cutoffs=(5, 8), d_model=8)
    changed = settings | {"tie_projs": [False, False, False], "tie_word_embeddings": False}
    del changed["tie_weight"]
    assert config_from_settings(changed, 13, "file") == transformer_xl(
        13, cutoffs=(5, 8), d_model=8, not_tied=True, proj_share_all_but_first=False
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_softmax": 100}, "^file: sample_softmax=100, which lmtools does not support"),
        ({"tie_projs": [True, True]}, "^file: tie_projs=.*expected false and then"),
        ({"tie_projs": [False, True, False]}, "^file: tie_projs=.*expected false and then"),
    ],
)
def test_settings_of_other_variants_are_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_settings(settings, 13, "file")


@pytest.mark.parametrize("root", ["", "module."])
def test_shapes_of_the_original_tell_its_options(root):
    config = config_of(untie_r=False, div_val=2)
    shapes = {root + name: tuple(tensor.shape) for name, tensor in original_state(config).items()}
    found = transformer_xl(**settings_from_shapes(shapes, "file"))
    assert found == config_of(untie_r=False, div_val=2, d_embed=8)
    narrow = config_of(untie_r=False, d_embed=4)
    shapes = {name: tuple(tensor.shape) for name, tensor in original_state(narrow).items()}
    assert transformer_xl(**settings_from_shapes(shapes, "file"), cutoffs=(5, 8)) == narrow


def test_shapes_of_another_model_are_refused():
    with pytest.raises(CheckpointError, match=r"^file: has no r_w_bias, expected the original's"):
        settings_from_shapes({"encoder.weight": (2, 2)}, "file")
