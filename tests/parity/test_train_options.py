"""What an option or a preset is when nothing is said: fairseq's own parser is asked."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from lmtools.models.architectures import ARCHITECTURES
from lmtools.train.config import MODEL_FIELDS, resolve

ASK = """
import json, sys
from argparse import Namespace
from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

presets, commands = {}, {}
for name in json.loads(sys.argv[1]):
    if name in ARCH_CONFIG_REGISTRY and name != "transformer_lm":
        presets[name] = Namespace()
        ARCH_CONFIG_REGISTRY[name](presets[name])
        presets[name] = vars(presets[name])
presets["transformer_lm"] = vars(TransformerLanguageModelConfig())
for command in json.loads(sys.argv[2]):
    parser = options.get_training_parser()
    commands[command] = vars(options.parse_args_and_arch(parser, ["data", *command.split()]))
print(json.dumps([presets, commands], default=repr))
"""

OWN_PRESETS = {"transformer_lm_megatron_small", "transformer_lm_megatron_tiny"}

COMMANDS = [
    "--task language_modeling --arch transformer_lm --optimizer adam --lr-scheduler inverse_sqrt",
    "--task language_modeling --arch transformer_lm --optimizer sgd --lr-scheduler cosine",
    "--task language_modeling --arch transformer_lm --optimizer adafactor --lr-scheduler polynomial_decay",
    "--task language_modeling --arch transformer_lm --optimizer adam --lr-scheduler fixed",
]

REPORTS = {"log_format", "log_interval"}
"""What is shown is lmtools' own."""

NOT_GIVEN = {"restore_file", "batch_size", "max_update", "total_num_update", "data", "max_target_positions"}
"""What fairseq fills with a name or another option, and what a run cannot do without."""


@pytest.fixture(scope="module")
def asked(fairseq_python: str) -> tuple[dict[str, Any], dict[str, Any]]:
    command = [
        fairseq_python,
        "-c",
        ASK,
        json.dumps(sorted(ARCHITECTURES.keys() - {"transformer_xl"})),
        json.dumps(COMMANDS),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    presets, commands = json.loads(ran.stdout.splitlines()[-1])
    return presets, commands


def test_presets_are_fairseqs(asked):
    presets, _ = asked
    assert presets.keys() == ARCHITECTURES.keys() - OWN_PRESETS - {"transformer_xl"}
    for name, theirs in presets.items():
        ours = ARCHITECTURES[name](vocab_size=1)
        fields = vars(ours).keys() - {"vocab_size", "max_target_positions"}  # which follows --tokens-per-sample
        assert {field: getattr(ours, field) for field in fields} == {
            field: theirs.get(field, MODEL_FIELDS[field].default) for field in fields
        }, name


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_fairseqs(asked, command):
    _, commands = asked
    theirs = commands[command]
    words = command.split()
    flags = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    run = resolve(None, flags | {"batch_size": 1, "max_update": 1})
    compared = 0
    for name, ours in vars(run.train).items():
        if name in theirs and name not in REPORTS | NOT_GIVEN:
            expected = theirs[name]
            if isinstance(expected, str) and expected.startswith("("):
                expected = json.loads(f"[{expected[1:-1]}]")
            if isinstance(ours, tuple):
                ours = list(ours)
            if name in ("lr", "update_freq"):
                ours = [ours]
            if ours is None:
                assert expected in (None, 0, -1), name
            else:
                assert ours == expected, name
            compared += 1
    assert compared > 45
