"""What lmtools trained and wrote out in one part, stock fairseq evaluates: to the loss that lmtools validated."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lmtools.checkpoints.reshard import reshard
from tests.support.ranks import run_ranks
from tests.support.training import GOLDEN, metrics, train_a_leg

EVALUATE = """
import json, sys
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm

parser = options.get_eval_lm_parser()
result = eval_lm.main(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, sys.argv[1:])))
print(json.dumps({key: float(value) for key, value in result.items()}))
"""

MODELS = {
    "Megatron": {"arch": "transformer_lm_megatron", "mp": 2},
    "post-norm, untied": {"arch": "transformer_lm", "share_decoder_input_output_embed": False},
    "GPT-3, learned positions": {"arch": "transformer_lm_gpt3_small", "share_decoder_input_output_embed": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_fairseq_evaluates_what_was_exported(fairseq_python: str, tmp_path: Path, model: str) -> None:
    flags = MODELS[model] | {"save_dir": str(tmp_path / "run"), "max_update": 20, "valid_subset": "test"}
    run_ranks(flags.get("mp", 1), train_a_leg, flags)
    [validation] = [line for line in metrics(tmp_path / "run") if line["kind"] == "valid"]
    reshard(tmp_path / "run" / "checkpoint_best", tmp_path / "fairseq", num_parts=1, format="fairseq")
    path = tmp_path / "fairseq" / "model.pt"

    options = ["--path", str(path), "--gen-subset", "test", "--tokens-per-sample", "16", "--batch-size", "8", "--cpu"]
    ran = subprocess.run(
        [fairseq_python, "-c", EVALUATE, str(GOLDEN / "bin"), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert f"Evaluated {validation['num_tokens']:,} tokens" in ran.stderr + ran.stdout
    # fairseq adds its scores in float32. Measured: 2e-7 to 4e-7.
    assert result["loss"] == pytest.approx(validation["loss_base2"], rel=2e-6)
