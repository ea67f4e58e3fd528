"""`lmtools generate` from Transformer-XLs, as a user types it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmtools.checkpoints.load import as_transformer_xl, load_model, open_checkpoint
from lmtools.data.dictionary import Dictionary
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import Mesh
from tests.cli.conftest import Lmtools
from tests.support.ranks import run_ranks
from tests.support.training import train_a_leg
from tests.support.transformer_xl_states import config_of, huggingface_state, original_state

ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=torch.device("cpu"), device_mesh=None)
LONG = "and = @ 's – end " * 6
"""36 words, of which a memory of 16 holds less than half."""


@pytest.fixture
def txl(golden: Path) -> list[object]:
    path = golden / "txl" / "checkpoint_last.pt"
    return ["generate", "--path", path, "--dict", golden / "bin", "--max-new-tokens", 12]


def objects(lmtools: Lmtools, *arguments: object) -> list[dict[str, Any]]:
    ran = lmtools(*arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return [json.loads(line) for line in ran.out.splitlines()]


@pytest.mark.parametrize("options", [{}, {"mem_len": 3, "clamp_len": 2}, {"mem_len": 8, "same_length": True}], ids=str)
def test_words_and_their_probabilities(lmtools, txl, golden, options):
    """Of prompts that are longer than the memory and shorter, as the model gives them token by token."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
    flags += ["--same-length"] if "same_length" in options else []
    lines = objects(lmtools, *txl, *flags, "--prompt", LONG, "--prompt", "= and", "--temperature", 1.2)
    checkpoint = as_transformer_xl(open_checkpoint(golden / "txl" / "checkpoint_last.pt"))
    assert checkpoint is not None
    checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, **options))
    model = load_model(checkpoint, ALONE, torch.float64)
    assert isinstance(model, TransformerXL)
    symbols = Dictionary.load(golden / "bin" / "dict.txt").symbols
    for line, prompt in zip(lines, (LONG, "= and"), strict=True):
        assert line["prompt_ids"][0] == 2, "a sentence begins where another has ended"
        words = [symbols[index] for index in line["ids"] if index != 2]
        assert line["text"].split() == [*prompt.split(), *words]
        tokens, memories, scores = line["prompt_ids"] + line["ids"], None, []
        for token, following in itertools.pairwise(tokens):
            nll, memories = model(torch.tensor([[token]]), torch.tensor([[following]]), memories)
            scores.append(-float(nll))
        assert line["log_probs"] == pytest.approx(scores[-len(line["ids"]) :], abs=1e-4)


def test_no_text_depends_on_the_batch_and_draws_depend_on_the_seed(lmtools, txl):
    prompts = ["--prompt", "and", "--prompt", LONG, "--prompt", "= and", "--prompt", LONG + "="]
    texts = [lmtools(*txl, *prompts, "--top-p", 0.95, *more).out for more in ([], ["--batch-size", 1], ["--seed", 2])]
    assert texts[0] == texts[1] != texts[2]


def test_beam_search(lmtools, txl):
    """The model is sure of its ends: greedily as with a beam, unless long texts are favoured."""
    lines = [
        objects(lmtools, *txl, "--prompt", "and", *more)[0]
        for more in ([], ["--beam", 5], ["--beam", 5, "--lenpen", 3])
    ]
    assert [" ".join(line["tokens"]) for line in lines] == [
        "nel end </s>",
        "nel end </s>",
        "nel end C++ C# .NET 's 't 're </s>",
    ]


@pytest.mark.parametrize("options", [[], ["--beam", 2], ["--top-k", 9]], ids=str)
def test_past_the_end_of_a_line(lmtools, txl, options):
    """Each </s> is a newline, also those of the prompt, but not the one before it."""
    prompt = ["--prompt", "and </s> = end"]
    [line] = objects(lmtools, *txl, *prompt, *options, "--ignore-eos")
    assert "</s>" in line["tokens"][:-1]
    assert (len(line["ids"]), line["stopped_by"]) == (12, "max new tokens")
    lines = " ".join(["and </s> = end", *line["tokens"]]).split("</s>")
    assert line["text"] == "\n".join(words.strip() for words in lines)
    assert lmtools(*txl, *prompt, *options, "--ignore-eos").out == line["text"] + "\n"


@pytest.mark.slow
def test_workers_say_what_one_process_says(lmtools, start_lmtools, txl):
    """And say once what is not in the dictionary."""
    options = [*txl, "--top-k", 20, "--json", "--prompt", LONG, "--prompt", "= zebra"]
    alone = lmtools(*options)
    out, err = start_lmtools(*options, "--mp", 2).communicate(timeout=120)
    assert (err.decode(), err) == (alone.err, b"prompt 2: not in the dictionary, and read as <unk>: 'zebra'\n")
    for line, expected in zip(out.splitlines(), alone.out.splitlines(), strict=True):
        found, wanted = json.loads(line), json.loads(expected)
        assert found.pop("log_probs") == pytest.approx(wanted.pop("log_probs"), abs=1e-4)
        assert found == wanted


def test_a_training_runs_checkpoint_has_its_dictionary(lmtools, tmp_path):
    run_ranks(1, train_a_leg, {"arch": "transformer_xl", "save_dir": str(tmp_path), "max_update": 1})
    [line] = objects(
        lmtools, "generate", "--path", tmp_path / "checkpoint_last", "--prompt", "and", "--max-new-tokens", 3
    )
    assert line["text"].startswith("and ")


def test_checkpoints_of_other_programs(lmtools, tmp_path):
    """The same model as transformers and as the original save it; the latter does not say how long its memory was."""
    config = config_of(div_val=2, untie_r=False, mem_len=6)
    settings = {
        "model_type": "transfo-xl",
        "vocab_size": 13,
        "cutoffs": [5, 8],
        "n_layer": 2,
        "d_model": 8,
        "n_head": 2,
    }
    settings |= {"d_head": 3, "d_inner": 12, "d_embed": 8, "mem_len": 6, "div_val": 2, "untie_r": False}
    settings |= {"clamp_len": -1, "same_length": False}
    state = {name: tensor / 1000 for name, tensor in huggingface_state(config).items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "original").mkdir()
    torch.save({name: tensor / 1000 for name, tensor in original_state(config).items()}, tmp_path / "original" / "m.pt")
    for folder in (tmp_path, tmp_path / "original"):
        (folder / "dict.txt").write_text("".join(f"word{index} 1\n" for index in range(9)))
    options = ["--prompt", "word1 word2 word0", "--max-new-tokens", 5, "--temperature", 1]
    [found] = objects(lmtools, "generate", "--path", tmp_path, *options)
    path = tmp_path / "original" / "m.pt"
    [same] = objects(lmtools, "generate", "--path", path, *options, "--mem-len", 6)
    assert (found.pop("vocabulary"), same.pop("vocabulary")) == (
        f"{tmp_path}/dict.txt",
        f"{tmp_path}/original/dict.txt",
    )
    assert same == found
    (tmp_path / "pytorch_model.bin").unlink()
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    [again] = objects(lmtools, "generate", "--path", tmp_path, *options)
    assert again == found | {"vocabulary": f"{tmp_path}/dict.txt"}
    ran = lmtools("generate", "--path", path, *options)
    assert ran.code == 2
    assert ran.err.startswith(f"lmtools: {path}: remembers nothing (mem_len 0)")


REFUSED = {
    "no memory": (["--mem-len", 0], "remembers nothing (mem_len 0), so that each token would follow from the one"),
    "a length of none": (["--mem-len", 0, "--same-length"], "--same-length: attends to the last --mem-len positions"),
    "offloading": (["--offload"], "holds a Transformer-XL; its layers cannot be left in the file"),
    "ranks": (["--mp", 4], "--mp 4: does not divide the model's 2 attention heads"),
    "BPE": (["--bpe", "gpt2"], "prompt 1: the BPE token 392 is not in the dictionary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_a_line(lmtools, txl, case):
    arguments, message = REFUSED[case]
    ran = lmtools(*txl, "--prompt", "and", *arguments)
    assert ran.code in (1, 2)
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.count("\n") == 1
