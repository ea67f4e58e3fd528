"""A command line of fairseq-train means here what it meant there. The commands are those of fairseq's READMEs."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import pytest

from lmtools.cli import main
from lmtools.train import config_toml


def resolved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    """What `lmtools train ARGUMENTS` would run."""
    monkeypatch.setattr(sys, "argv", ["lmtools", "train", *shlex.split(arguments), "--print-config"])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 0, printed.err
    return dict(config_toml.tomllib.loads(printed.out))


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lmtools", "train", *shlex.split(arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return capsys.readouterr().err


MEGATRON_11B = """wikitext103-bin --distributed-world-size 8 --memory-efficient-fp16 --num-workers 2
--model-parallel-size 8 --criterion vocab_parallel_cross_entropy --task language_modeling --sample-break-mode none
--tokens-per-sample 1024 --arch transformer_lm_megatron_11b --share-decoder-input-output-embed --optimizer adam
--adam-betas "(0.9, 0.98)" --adam-eps 1e-08 --clip-norm 0.0 --lr-scheduler inverse_sqrt --lr 0.00015
--warmup-updates 3000 --weight-decay 0.01 --dropout 0.1 --attention-dropout 0.1 --batch-size 2 --max-update 300000"""

MEGATRON_11B_RUN = {
    "data": "wikitext103-bin",
    "mp": 8,
    "dp": 1,
    "memory_efficient_fp16": True,
    "num_workers": 2,
    "criterion": "vocab_parallel_cross_entropy",
    "tokens_per_sample": 1024,
    "sample_break_mode": "none",
    "optimizer": "adam",
    "adam_betas": [0.9, 0.98],
    "adam_eps": 1e-8,
    "clip_norm": 0.0,
    "lr_scheduler": "inverse_sqrt",
    "lr": 0.00015,
    "warmup_updates": 3000,
    "weight_decay": 0.01,
    "batch_size": 2,
    "max_update": 300000,
    "decoder_layers": 72,
    "decoder_embed_dim": 3072,
    "decoder_ffn_embed_dim": 18432,
    "decoder_attention_heads": 32,
    "max_target_positions": 1024,
    "activation_fn": "gelu",
    "decoder_normalize_before": True,
    "share_decoder_input_output_embed": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}

COMMANDS = {
    "megatron_11b": (MEGATRON_11B, MEGATRON_11B_RUN),
    "megatron_11b, as lmtools spells it": (
        MEGATRON_11B.replace("--distributed-world-size 8", "")
        .replace("--model-parallel-size 8", "--mp 8")
        .replace('"(0.9, 0.98)"', "0.9,0.98"),
        MEGATRON_11B_RUN,
    ),
    "language_model": (
        """--task language_modeling data-bin/wikitext-103 --save-dir checkpoints/transformer_wikitext-103
        --arch transformer_lm --share-decoder-input-output-embed --dropout 0.1
        --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0
        --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07
        --tokens-per-sample 512 --sample-break-mode none --max-tokens 2048 --update-freq 16 --fp16
        --max-update 50000""",
        {
            "data": "data-bin/wikitext-103",
            "save_dir": "checkpoints/transformer_wikitext-103",
            "decoder_layers": 6,
            "decoder_normalize_before": False,
            "max_target_positions": 512,
            "max_tokens": 2048,
            "update_freq": 16,
            "warmup_init_lr": 1e-7,
            "fp16": True,
            "fp16_init_scale": 128,
        },
    ),
    "textless_nlp/gslm/ulm": (
        """data-bin/ --task=language_modeling --arch=transformer_lm_big --share-decoder-input-output-embed
        --dropout=0.1 --attention-dropout=0.1 --optimizer=adam --adam-betas='(0.9, 0.98)' --clip-norm=1.0 --lr=0.0005
        --lr-scheduler=inverse_sqrt --warmup-updates=4000 --warmup-init-lr=1e-07 --tokens-per-sample=3072
        --update-freq=16 --max-tokens=4096 --num-workers=4 --skip-invalid-size-inputs-valid-test --max-update=500000
        --log-interval=10 --seed=100501 --fp16 --sample-break-mode=eos""",
        {
            "decoder_layers": 12,
            "decoder_embed_dim": 1024,
            "decoder_normalize_before": True,
            "attention_dropout": 0.1,
            "clip_norm": 1.0,
            "sample_break_mode": "eos",
            "seed": 100501,
        },
    ),
    "fully_sharded_data_parallel, on a GPU": (
        """data-bin/wikitext-103-roberta-bpe-bin --ddp-backend fully_sharded --fp16 --fp16-init-scale 4
        --checkpoint-activations --task language_modeling --tokens-per-sample 2048 --batch-size 8
        --arch transformer_lm_gpt3_13 --optimizer adam --adam-betas "(0.9,0.98)" --lr 0.0001
        --lr-scheduler polynomial_decay --warmup-updates 5 --total-num-update 10 --max-update 10 --no-save
        --log-format json --log-interval 1""",
        {
            "zero": 3,
            "checkpoint_activations": True,
            "decoder_layers": 40,
            "decoder_embed_dim": 5120,
            "decoder_ffn_embed_dim": 20480,
            "decoder_learned_pos": True,
            "share_decoder_input_output_embed": True,
            "dropout": 0.0,
            "total_num_update": 10,
            "no_save": True,
            "log_format": "json",
        },
    ),
    "options of many published lines": (
        """data-bin -a transformer_lm_gpt --max-sentences 4 --max-epoch 10 --keep-last-epochs -1 --no-epoch-checkpoints
        --no-progress-bar --ddp-backend=legacy_ddp --distributed-port 12345 --find-unused-parameters --bucket-cap-mb 25
        --required-batch-size-multiple 1 --relu-dropout 0.1 --wd 0.1 --threshold-loss-scale 1 --fp16-scale-window 128
        --memory-efficient-fp16 --fp16 --lr [0.1] --update-freq [2] --optimizer adafactor
        --adafactor-eps "(1e-30, 1e-3)"
        --clip-threshold 2 --decay-rate -0.7 --beta1 0.9 --scale-parameter --dataset-impl mmap --cpu
        --decoder-input-dim 768 --decoder-output-dim 768
        --disable-validation --tensorboard-logdir logs --finetune-from-model other --reset-dataloader""",
        {
            "batch_size": 4,
            "no_epoch_checkpoints": True,
            "log_format": "simple",
            "zero": 0,
            "required_batch_size_multiple": 1,
            "activation_dropout": 0.1,
            "weight_decay": 0.1,
            "threshold_loss_scale": 1.0,
            "fp16_scale_window": 128,
            "lr": 0.1,
            "update_freq": 2,
            "adafactor_eps": [1e-30, 1e-3],
            "clip_threshold": 2.0,
            "decay_rate": -0.7,
            "beta1": 0.9,
            "scale_parameter": True,
            "device": "cpu",
            "valid_subset": "",
            "tensorboard_logdir": "logs",
            "finetune_from": "other",
            "reset_dataloader": True,
        },
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_published_command_means_what_it_meant(monkeypatch, capsys, name):
    arguments, expected = COMMANDS[name]
    run = resolved(monkeypatch, capsys, arguments)
    assert {field: run.get(field) for field in expected} == expected


def test_limits_of_minus_1_are_left_out(monkeypatch, capsys):
    run = resolved(
        monkeypatch, capsys, "d --batch-size 1 --max-epoch 1 --max-update 0 --keep-last-epochs -1 --patience -1"
    )
    assert not run.keys() & {"max_update", "keep_last_epochs", "patience"}


def test_printed_configuration_is_the_run_again(monkeypatch, capsys, tmp_path):
    run = resolved(monkeypatch, capsys, MEGATRON_11B)
    monkeypatch.setattr(sys, "argv", ["lmtools", "train", *shlex.split(MEGATRON_11B), "--print-config"])
    with pytest.raises(SystemExit):
        main()
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert resolved(monkeypatch, capsys, f"--config {tmp_path}/run.toml") == run


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--distributed-world-size 8 --mp 2", {"mp": 2, "dp": 4}),
        ("--distributed-world-size 8 --mp 2 --dp 4", {"mp": 2, "dp": 4}),
        ("--distributed-world-size 2", {"mp": 1, "dp": 2}),
        ("--ddp-backend fully_sharded --zero 2", {"zero": 2}),
        ("--no-progress-bar --log-format json", {"log_format": "json"}),
        ("--cpu --device cuda", {"device": "cuda"}),
        ("--arch transformer_lm_gpt --dropout 0 --lr 0", {"dropout": 0.0, "lr": 0.0}),
    ],
)
def test_what_lmtools_calls_otherwise_is_translated(monkeypatch, capsys, options, expected):
    run = resolved(monkeypatch, capsys, f"d --batch-size 1 --max-update 1 {options}")
    assert {field: run[field] for field in expected} == expected


def test_a_world_is_dealt_out_to_the_files_models_too(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.toml").write_text("mp = 4\nbatch_size = 1\nmax_update = 1\n")
    run = resolved(monkeypatch, capsys, f"d --config {tmp_path}/run.toml --distributed-world-size 8")
    assert (run["mp"], run["dp"]) == (4, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--distributed-world-size 8 --mp 3 --decoder-attention-heads 3 --decoder-embed-dim 6 "
            "--decoder-ffn-embed-dim 6",
            "not a multiple of --mp 3",
        ),
        ("--distributed-world-size 8 --mp 2 --dp 2", "--distributed-world-size 8: is not --mp 2 x --dp 2"),
        ("--distributed-init-method tcp://host:1", "start a run on several machines with torchrun"),
        ("--distributed-rank 1", "start a run on several machines with torchrun"),
        ("--lr 0.1,0.05", "--lr: one for each epoch is not supported, found 2; give one"),
        ("--lr fast", "--lr fast: expected <float>"),
        ("--decoder-output-dim 256", "--decoder-output-dim 256: is supported only if it is --decoder-embed-dim 512"),
        ("--update-freq 2,1", "--update-freq: one for each epoch is not supported"),
        ("--adam-betas 0.9", "--adam-betas: "),
        ("--adam-betas __import__('os')", "expected <float,float>"),
        ("--optimizer nag", "--optimizer: input should be 'adam', 'sgd' or 'adafactor'"),
        ("--stop-min-lr 1e-9", "No such option: --stop-min-lr"),
    ],
)
def test_what_would_be_another_run_is_refused(monkeypatch, capsys, options, message):
    refused = refusal(monkeypatch, capsys, f"d --batch-size 1 --max-update 1 {options}")
    assert message in refused
    assert "Traceback" not in refused


def test_options_that_change_nothing_are_named(monkeypatch, capsys, golden, tmp_path):
    """On stderr, each with the reason; and the run is made."""
    options = "--batch-size 8 --tokens-per-sample 32 --max-update 1 --decoder-layers 1 --decoder-embed-dim 8 --no-save"
    foreign = "--ddp-backend no_c10d --distributed-port 1 --skip-invalid-size-inputs-valid-test --no-progress-bar --cpu"
    arguments = shlex.split(f"{golden}/bin {options} --disable-validation {foreign} --save-dir {tmp_path}/run")
    monkeypatch.setattr(sys, "argv", ["lmtools", "train", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    err = capsys.readouterr().err
    assert caught.value.code == 0, err
    assert "train: --distributed-port: ignored, workers find each other\n" in err
    assert "train: --skip-invalid-size-inputs-valid-test: ignored, sentences that do not fit" in err
    assert "--cpu" not in err
