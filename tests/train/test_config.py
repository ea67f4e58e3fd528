"""A run's configuration: defaults < preset < file < flags, every mistake one line, what it prints is the run."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtools.cli.fairseq_train import FOREIGN
from lmtools.errors import ConfigError
from lmtools.models.architectures import ARCHITECTURES, TransformerLMConfig
from lmtools.train import config_toml
from lmtools.train.config import MODEL_FIELDS, TRAIN_FIELDS, Run, TrainConfig, resolve, to_toml

ENOUGH: dict[str, Any] = {"batch_size": 4, "max_update": 100}
"""What no run can do without."""


def resolved(tmp_path: Path, toml: str, **flags: Any) -> Run:
    file = tmp_path / "run.toml"
    file.write_text(toml, encoding="utf-8")
    return resolve(file, flags)


def test_flags_go_over_the_file_which_goes_over_the_preset_which_goes_over_the_defaults(tmp_path):
    toml = "batch_size = 4\nmax_update = 100\nlr = 0.5\ndecoder_layers = 3\ndropout = 0.2\n"
    run = resolved(tmp_path, f'arch = "transformer_lm_megatron"\n{toml}', lr=0.25, dropout=0.3)
    assert run.train.batch_size == 4, "file"
    assert run.train.lr == 0.25, "flag over file"
    assert run.train.adam_betas == (0.9, 0.999), "default"
    assert run.model["dropout"] == 0.3, "flag over file over preset"
    assert run.model["decoder_layers"] == 3, "file over preset"
    assert run.model["decoder_embed_dim"] == 3072, "preset over default"
    assert run.model["activation_dropout"] == 0.0, "default of the model"


def test_a_preset_can_be_named_by_a_flag_over_the_file(tmp_path):
    run = resolved(tmp_path, 'arch = "transformer_lm"\nbatch_size = 1\nmax_epoch = 1\n', arch="transformer_lm_big")
    assert run.model["decoder_embed_dim"] == 1024


def test_the_model_is_made_for_the_runs_blocks_unless_it_says_otherwise(tmp_path):
    assert resolve(None, ENOUGH | {"tokens_per_sample": 64}).model["max_target_positions"] == 64
    assert resolve(None, ENOUGH | {"max_target_positions": 2048}).model["max_target_positions"] == 2048


def test_the_vocabulary_is_the_datas_business():
    assert "vocab_size" not in resolve(None, ENOUGH).model
    with pytest.raises(ConfigError, match="--vocab-size: unknown"):
        resolve(None, ENOUGH | {"vocab_size": 100})


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("batch_sise = 4", "run.toml: batch_sise: unknown, did you mean batch_size?"),
        ("decoder_layer = 4", "run.toml: decoder_layer: unknown, did you mean decoder_layers?"),
        ("zzz = 1", "run.toml: zzz: unknown$"),
        ("[model]\ndecoder_layers = 4", "run.toml: model: unknown"),
        ('batch_size = "4"', "run.toml: batch_size: input should be a valid integer, found '4'"),
        ("batch_size = 4.0", "run.toml: batch_size: input should be a valid integer, found 4.0"),
        ("batch_size = true", "run.toml: batch_size: input should be a valid integer, found True"),
        ("batch_size = 0", "run.toml: batch_size: expected 1 or more, found 0"),
        ("batch_size = [4, 8]", "run.toml: batch_size: input should be a valid integer"),
        ("fp16 = 1", "run.toml: fp16: input should be a valid boolean, found 1"),
        ("lr = '0.1'", "run.toml: lr: input should be a valid number, found '0.1'"),
        ("lr = nan", "run.toml: lr: expected a finite number, found nan"),
        ("lr = [0.1, 0.05]", "run.toml: lr: one for each epoch is not supported, found 2; give one"),
        ("lr = []", "run.toml: lr: one for each epoch is not supported, found 0; give one"),
        ("adam_betas = [0.9]", "run.toml: adam_betas: "),
        ("adam_betas = 0.9", "run.toml: adam_betas: input should be a valid tuple, found 0.9"),
        ("adam_betas = [0.9, inf]", "run.toml: adam_betas: expected a finite number, found inf"),
        ("adam_betas = [0.9, 1.0]", "--adam-betas .* expected two numbers from 0 to below 1"),
        ("zero = 1", "run.toml: zero: input should be 0, 2 or 3, found 1"),
        ("optimizer = 'nag'", "run.toml: optimizer: input should be 'adam', 'sgd' or 'adafactor', found 'nag'"),
        ("arch = 'fconv_lm'", "--arch fconv_lm: expected one of transformer_lm, "),
        ("decoder_attention_heads = 0", "run.toml: decoder_attention_heads: expected 1 or more, found 0"),
        ("decoder_attention_heads = 7", "--decoder-attention-heads 7: does not divide --decoder-embed-dim 512"),
        (
            "mp = 3",
            "--mp 3: does not divide the model's 8 attention heads and 2048 feed-forward units; use one of 1, 2,",
        ),
        (
            "mp = 4\ndecoder_ffn_embed_dim = 2050",
            "--mp 4: does not divide .* and 2050 feed-forward units; use one of 1, 2$",
        ),
        ("device = 'tpu'", "device: input should be 'cpu' or 'cuda', found 'tpu'"),
        ("dropout = -0.1", "run.toml: dropout: expected 0 or more, found -0.1"),
        ("init_std = -0.1", "run.toml: init_std: expected 0 or more, found -0.1"),
        ("dropout = 1.0", "--dropout 1.0: expected less than 1"),
        ("tokens_per_sample = 64\nmax_target_positions = 32", "--tokens-per-sample 64: longer than"),
        (
            "decoder_learned_pos = true\nsequence_parallel = true\nmp = 2\ntokens_per_sample = 33",
            "--mp 2 pads --tokens-per-sample 33 to 34, more than --max-target-positions 33; choose one that",
        ),
        ("fp16 = true\nmemory_efficient_bf16 = true", "--fp16 and --bf16"),
        ("restore_file = 'a'\nfinetune_from = 'b'", "--restore-file and --finetune-from: give one"),
        ("finetune_from = ''", "--finetune-from: is empty, expected a checkpoint; leave it out to start anew"),
        ("restore_file = ''", "--restore-file: is empty"),
        ("save_dir = ''", "--save-dir: is empty"),
        (
            "patience = 3\nvalid_subset = ''",
            "--patience: counts validations, and without --valid-subset there are none",
        ),
        ("reset_dataloader = true", "--reset-dataloader: says what is not taken from the checkpoint of --restore-file"),
        ("max_update = ", "run.toml: not TOML: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_says_where(tmp_path, toml, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(tmp_path, toml, **{name: value for name, value in ENOUGH.items() if name not in toml})
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_flag_names_the_flag_even_where_there_is_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"^--decoder-layers: expected 1 or more, found 0"):
        resolved(tmp_path, "decoder_layers = 2", decoder_layers=0, **ENOUGH)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file or directory"):
        resolve(tmp_path / "none.toml", ENOUGH)
    with pytest.raises(ConfigError, match="is a directory"):
        resolve(tmp_path, ENOUGH)
    (tmp_path / "latin1.toml").write_bytes(b"data = 'caf\xe9'\n")
    with pytest.raises(ConfigError, match=r"latin1\.toml: not UTF-8, as TOML is \(byte 11\)"):
        resolve(tmp_path / "latin1.toml", ENOUGH)


@pytest.mark.parametrize("missing", ENOUGH)
def test_a_run_needs_a_batch_and_an_end(missing):
    with pytest.raises(ConfigError, match=f"--{missing.replace('_', '-')}.*give at least one"):
        resolve(None, {name: value for name, value in ENOUGH.items() if name != missing})


def test_a_warm_up_that_is_not_given_is_fairseqs():
    assert resolve(None, ENOUGH | {"lr_scheduler": "inverse_sqrt"}).train.warmup_updates == 4000
    assert resolve(None, ENOUGH | {"lr_scheduler": "inverse_sqrt", "warmup_updates": 0}).train.warmup_updates == 0
    for schedule in ("cosine", "polynomial_decay", "fixed"):
        assert resolve(None, ENOUGH | {"lr_scheduler": schedule}).train.warmup_updates == 0


def test_fairseqs_lists_of_one_are_the_one(tmp_path):
    run = resolved(tmp_path, "lr = [0.00015]\nupdate_freq = [16]", **ENOUGH)
    assert (run.train.lr, run.train.update_freq) == (0.00015, 16)
    assert resolve(None, ENOUGH | {"lr": (1,)}).train.lr == 1.0


@pytest.mark.parametrize("value", [0, -1])
def test_limits_that_fairseq_writes_as_0_or_minus_1_are_none(value):
    names = ["keep_interval_updates", "keep_last_epochs", "keep_best_checkpoints", "patience", "max_epoch"]
    train = resolve(None, ENOUGH | dict.fromkeys(names, value)).train
    assert [getattr(train, name) for name in names] == [None] * 5
    with pytest.raises(ConfigError, match="or the run never ends"):
        resolve(None, {"batch_size": 1, "max_update": value, "max_epoch": value, "stop_time_hours": value})


def test_memory_efficient_implies_the_precision_and_may_stand_beside_it():
    train = resolve(None, ENOUGH | {"fp16": True, "memory_efficient_fp16": True}).train
    assert train.memory_efficient_fp16


def test_offloaded_activations_are_checkpointed_ones_as_in_fairseq():
    run = resolve(None, ENOUGH | {"offload_activations": True})
    assert run.train.checkpoint_activations
    assert "offload_activations = true" in to_toml(run)
    assert not resolve(None, ENOUGH).train.checkpoint_activations
    with pytest.raises(ConfigError, match="--offload-activations without --checkpoint-activations: it moves what"):
        resolve(None, ENOUGH | {"offload_activations": True, "checkpoint_activations": False})


# What --print-config prints, --config takes.


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    match typing.get_origin(hint), hint:
        case ((types.UnionType | typing.Union), _):
            return values_of(next(kind for kind in typing.get_args(hint) if kind is not types.NoneType))
        case origin, _ if origin is Literal:
            return st.sampled_from(typing.get_args(hint))
        case origin, _ if origin is tuple:
            return st.tuples(*map(values_of, typing.get_args(hint)))
        case _, kind if kind is bool:
            return st.booleans()
        case _, kind if kind is int:
            return st.integers(1, 10**15)
        case _, kind if kind is float:
            return st.floats(0, 1, exclude_max=True, allow_nan=False)
    assert hint is str
    return st.text()


HINTS = typing.get_type_hints(TransformerLMConfig) | typing.get_type_hints(TrainConfig)
SENSIBLE = {
    "arch": st.sampled_from(sorted(ARCHITECTURES.keys() - {"transformer_xl"})),
    "task": st.just("language_modeling"),
    "fairseq_compat": st.just(False),
    "mp": st.just(1),
    "tokens_per_sample": st.integers(1, 1024),
    "max_target_positions": st.integers(1024, 10**6),
    "decoder_attention_heads": st.sampled_from([1, 2, 4]),
    "decoder_embed_dim": st.integers(1, 1000).map(lambda width: 4 * width),
    "checkpoint_activations": st.just(True),
    "fp16": st.just(False),
    "memory_efficient_fp16": st.just(False),
    "restore_file": st.none(),
    "save_dir": st.text(min_size=1),
    "valid_subset": st.text().map("valid{}".format),
}
"""Fields whose values may contradict others'."""
FLAGS = st.fixed_dictionaries(
    {"decoder_attention_heads": SENSIBLE["decoder_attention_heads"], "batch_size": st.integers(1, 9)}
    | {"max_update": st.integers(1, 10**6), "decoder_embed_dim": SENSIBLE["decoder_embed_dim"]}
    | {"finetune_from": st.text(min_size=1)},  # without it nothing may be reset
    optional={
        name: SENSIBLE.get(name, values_of(HINTS[name]))
        for name in HINTS.keys() - {"vocab_size"}
        if name not in ("decoder_attention_heads", "decoder_embed_dim", "batch_size", "max_update", "finetune_from")
    },
)


@given(flags=FLAGS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_run_is_the_file_that_it_prints(tmp_path, flags):
    run = resolve(None, flags)
    (tmp_path / "printed.toml").write_text(to_toml(run), encoding="utf-8", newline="")
    again = resolve(tmp_path / "printed.toml", {})
    assert again == run
    assert to_toml(again) == to_toml(run)


def test_what_toml_cannot_say_is_refused():
    run = resolve(None, ENOUGH | {"save_dir": "caf\udce9"})
    with pytest.raises(ConfigError, match=r"save_dir = 'caf\\udce9': not UTF-8"):
        to_toml(run)


def test_python_3_10_reads_toml_with_tomli(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0, "final", 0))
    monkeypatch.setitem(sys.modules, "tomli", config_toml.tomllib)  # which is the same code
    monkeypatch.setitem(sys.modules, "tomllib", None)
    spec = importlib.util.spec_from_file_location("config_toml_of_3_10", config_toml.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "run.toml").write_text("lr = 0.1\n")
    assert module.read_toml(tmp_path / "run.toml") == {"lr": 0.1}


def test_every_field_says_what_it_is():
    for name, field in TRAIN_FIELDS.items():
        assert field.metadata["help"].endswith("."), name


def test_every_option_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    options = {f"--{name.replace('_', '-')}" for name in (*TRAIN_FIELDS, *MODEL_FIELDS, *FOREIGN)} - {"--data"}
    assert {option for option in options if f"`{option}" not in page} == set()
    assert {
        name for name in ARCHITECTURES if f"`{name}`" not in page and f"`_{name.split('_', 3)[-1]}`" not in page
    } == set()


def test_defaults_are_finite():
    for name, field in TRAIN_FIELDS.items():
        assert not isinstance(field.default, float) or math.isfinite(field.default), name
