"""`lmtools generate` as a user types it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.data.dictionary import Dictionary
from lmtools.parallel.mesh import Mesh
from tests.support.ranks import run_ranks
from tests.support.training import train_a_leg

ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=torch.device("cpu"), device_mesh=None)


@pytest.fixture
def mp4(golden: Path) -> list[object]:
    return ["generate", "--path", golden / "mp4", "--dict", golden / "bin", "--max-new-tokens", 12]


# --- what it says ---


def test_a_line_for_each_prompt(lmtools, mp4):
    """The first ends by itself."""
    ran = lmtools(*mp4, "--prompt", "= and", "--prompt", "– and @ 's = =")
    assert (ran.code, ran.err) == (0, "")
    first, second = ran.out.splitlines()
    assert first == "= and trailing"
    assert second.startswith("– and @ 's = = ")
    assert len(second.split()) == 6 + 12


def test_json_lines_have_the_models_own_probabilities(lmtools, mp4, golden):
    ran = lmtools(*mp4, "--prompt", "= and", "--prompt", "and", "--json", "--temperature", 1.3, "--seed", 8)
    assert (ran.code, ran.err) == (0, "")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["= and", "and"]
    model = load_model(open_checkpoint(golden / "mp4"), ALONE, torch.float64)
    symbols = Dictionary.load(golden / "bin" / "dict.txt").symbols
    for line in lines:
        assert line["prompt_ids"][0] == 2, "a sentence begins where another has ended"
        assert line["tokens"] == [symbols[index] for index in line["ids"]]
        words = [token for token in line["tokens"] if token != "</s>"]
        assert line["text"] == " ".join([line["prompt"], *words])
        read = torch.tensor([line["prompt_ids"] + line["ids"]])
        log_probs = model(read[:, :-1])[0].log_softmax(dim=-1).gather(-1, read[0, 1:, None])[:, 0]
        assert line["log_probs"] == pytest.approx(log_probs[-len(line["ids"]) :].tolist(), abs=1e-4)
        assert line["stopped_by"] == ("end of sentence" if line["ids"][-1] == 2 else "max new tokens")


def test_what_is_drawn_depends_on_the_seed_alone(lmtools, mp4):
    options = [*mp4, "--prompt", "and", "--prompt", "=", "--prompt", "@ and =", "--top-p", 0.95]
    texts = [lmtools(*options, *more).out for more in ([], ["--batch-size", 1], ["--seed", 1], ["--seed", 2])]
    assert texts[0] == texts[1] == texts[2] != texts[3]


@pytest.mark.slow
def test_workers_say_what_one_process_says(lmtools, start_lmtools, mp4, tmp_path):
    """Also where the prompts come from standard input, which they share."""
    options = ["--top-k", 20, "--json"]
    alone = lmtools(*mp4, *options, "--prompt", "and =", "--prompt", "=")
    process = start_lmtools(*mp4, *options, "--prompts", "-", "--mp", 2, stdin=subprocess.PIPE)
    out, err = process.communicate(b"and =\n=\n", timeout=120)
    assert (process.returncode, err) == (0, b"")
    for line, expected in zip(out.splitlines(), alone.out.splitlines(), strict=True):
        found, wanted = json.loads(line), json.loads(expected)
        assert found.pop("log_probs") == pytest.approx(wanted.pop("log_probs"), abs=1e-4)
        assert found == wanted


def test_beam_search(lmtools, mp4):
    options = [*mp4, "--prompt", "=", "--json"]
    greedy, found = (json.loads(lmtools(*options, *more).out) for more in ([], ["--beam", 5, "--lenpen", 0]))
    assert sum(found["log_probs"]) > sum(greedy["log_probs"])
    longer = json.loads(lmtools(*options, "--beam", 5, "--lenpen", 3).out)
    assert len(longer["ids"]) > len(found["ids"])


def test_prompts_of_a_file(lmtools, mp4, tmp_path):
    (tmp_path / "prompts").write_text("and\n= and\n")
    ran = lmtools(*mp4, "--prompts", tmp_path / "prompts")
    assert ran.out == lmtools(*mp4, "--prompt", "and", "--prompt", "= and").out


def test_words_that_the_dictionary_has_not(lmtools, mp4):
    ran = lmtools(*mp4, "--prompt", "= and", "--prompt", "= zebra and gnu zebra")
    assert ran.code == 0
    assert ran.err == "prompt 2: not in the dictionary, and read as <unk>: 'zebra', 'gnu'\n"
    assert ran.out == lmtools(*mp4, "--prompt", "= and", "--prompt", "= <unk> and <unk> <unk>").out


def test_at_the_models_maximum_it_says_so(lmtools, mp4):
    """The model was made for 32 tokens: </s> and 31 of the prompt. The new one is not read."""
    ran = lmtools(*mp4, "--prompt", "= and " * 15 + "@", "--json")
    line = json.loads(ran.out)
    assert (len(line["ids"]), line["stopped_by"]) == (1, "model maximum")
    assert ran.err == "prompt 1: ends after 1 new tokens, since the model was made for 32, prompt included\n"


@pytest.mark.slow
def test_a_terminal_sees_the_text_as_it_comes(mp4):
    """What it saw in the end is what a file would have got."""
    command = [sys.executable, "-m", "lmtools", *map(str, mp4), "--prompt", "= and", "--top-k", "9"]
    controller, terminal = pty.openpty()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        seen = b""
        try:
            while piece := os.read(controller, 1000):
                seen += piece
        except OSError:  # Linux's way to say that nobody has the terminal open any more
            pass
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(controller)
    piped = subprocess.run(command, capture_output=True, check=True)
    assert seen.replace(b"\r\n", b"\n") == piped.stdout


# --- a model larger than memory ---


@pytest.mark.parametrize(
    "options", [["--top-p", 0.95], ["--beam", 3], ["--batch-size", 1]], ids=["drawn", "beam", "one at a time"]
)
def test_a_model_that_stays_in_its_files_says_the_same(lmtools, mp4, options):
    command = [*mp4, "--prompt", "and", "--prompt", "=", "--prompt", "@ and =", "--json", *options]
    ran = lmtools(*command, "--offload")
    assert (ran.code, ran.err) == (0, "")
    lines, expected = ([json.loads(line) for line in out.splitlines()] for out in (ran.out, lmtools(*command).out))
    for line, wanted in zip(lines, expected, strict=True):
        assert line.pop("log_probs") == pytest.approx(wanted.pop("log_probs"), abs=1e-5)
        assert line == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mp", 2], "--offload: is for one process, found --mp 2"),
        (["--offload-memory", 0.5], "--offload-memory 0.5: this model needs at least 1.00 GiB for 1 x 13 tokens; "),
        (
            ["--offload-memory", 1.001, "--beam", 200],
            "--offload-memory 1: this model needs at least 1.00 GiB for 200 x ",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused_before_a_weight_is_read(lmtools, mp4, options, message):
    ran = lmtools(*mp4, "--prompt", "and", "--offload", *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"lmtools: {message}")
    assert ran.err.count("\n") == 1


def count_batches(monkeypatch, module, function: str) -> list[int]:
    """How many prompts went together in each batch."""
    batches: list[int] = []
    of_module = getattr(module, function)

    def counted(model, prompts, *arguments, **options):
        batches.append(len(prompts))
        return of_module(model, prompts, *arguments, **options)

    monkeypatch.setattr(module, function, counted)
    return batches


def test_as_many_prompts_as_fit_go_together(lmtools, mp4, monkeypatch):
    from lmtools.generate import decode

    batches = count_batches(monkeypatch, decode, "continue_prompts")
    prompts = ["--prompt", "and"] * 20
    assert lmtools(*mp4, *prompts, "--offload").code == 0
    assert lmtools(*mp4, *prompts, "--offload", "--batch-size", 12).code == 0
    assert lmtools(*mp4, *prompts).code == 0
    assert batches == [20, 12, 8, 8, 8, 4]


def test_as_many_beams_as_fit_go_together(lmtools, mp4, monkeypatch):
    from lmtools.generate import beam

    batches = count_batches(monkeypatch, beam, "beam_search")
    prompts = [*["--prompt", "and"] * 5, "--max-new-tokens", 2, "--beam", 3]
    assert lmtools(*mp4, *prompts, "--offload").code == 0
    assert lmtools(*mp4, *prompts, "--offload", "--batch-size", 4).code == 0
    assert lmtools(*mp4, *prompts).code == 0
    assert batches == [5, 4, 1, 2, 2, 1]


# --- where the dictionary is ---


def test_the_dictionary_beside_the_checkpoint(lmtools, golden, tmp_path):
    for name in ("model-model_part-0.pt", "model-model_part-1.pt"):
        shutil.copy(golden / "mp2_2020" / name, tmp_path)
    ran = lmtools("generate", "--path", tmp_path, "--prompt", "and")
    assert ran.code == 2
    assert ran.err == (
        f"lmtools: {tmp_path}: has no dict.txt; give the one that the model was trained with by --dict\n"
    )
    shutil.copy(golden / "bin" / "dict.txt", tmp_path)
    assert lmtools("generate", "--path", tmp_path, "--prompt", "and").code == 0


def test_the_dictionary_of_a_training_run(lmtools, tmp_path):
    run_ranks(1, train_a_leg, {"arch": "transformer_lm_megatron", "save_dir": str(tmp_path), "max_update": 1})
    ran = lmtools("generate", "--path", tmp_path / "checkpoint_last", "--prompt", "and", "--max-new-tokens", 2)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("and ")


# --- what it refuses ---


REFUSED = {
    "no prompt": ([], 2, "give --prompt TEXT or --prompts FILE, one of them"),
    "both": (["--prompt", "and", "--prompts", "x"], 2, "give --prompt TEXT or --prompts FILE, one of them"),
    "an empty one": (["--prompt", "and", "--prompt", " "], 1, "prompt 2: is empty; a prompt has at least one word"),
    "a long one": (["--prompt", "and " * 32], 2, "prompt 1: has 33 tokens, expected 1 to 32, which the model was made"),
    "a memory": (["--prompt", "and", "--mem-len", 9], 2, "--mem-len: is of a Transformer-XL, and the checkpoint holds"),
    "a missing file": (["--prompts", "nowhere"], 1, "nowhere: no such file"),
    "no token": (["--prompt", "and", "--top-p", "0"], 2, "--top-p 0: leaves no token"),
    "greedy top-k": (["--prompt", "and", "--top-k", "3", "--temperature", "0"], 2, "--temperature 0 with --top-k"),
    "a drawn beam": (["--prompt", "and", "--beam", "3", "--temperature", "1"], 2, "--beam with --temperature"),
    "no temperature": (["--prompt", "and", "--temperature", "inf"], 2, "--temperature inf: expected a finite number"),
    "no text": (["--prompt", "and", "--prompt", "and \udcff"], 1, "prompt 2: not UTF-8 (byte 0xff)"),
    "ranks": (["--prompt", "and", "--mp", "3"], 2, "--mp 3: does not divide the model's 4 attention heads"),
    "BPE": (["--prompt", "and", "--bpe", "gpt2"], 1, "prompt 1: the BPE token 392 is not in the dictionary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_a_line(lmtools, mp4, case):
    arguments, code, message = REFUSED[case]
    ran = lmtools(*mp4, *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(f"lmtools: {message}")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("option", [["--lenpen", "1000"], ["--lenpen", "nan"], ["--offload-memory", "inf"]])
def test_numbers_that_nothing_can_be_reckoned_with_are_refused(lmtools, mp4, option):
    ran = lmtools(*mp4, "--prompt", "and", "--beam", 2, *option)
    assert (ran.code, ran.out) == (2, "")
    assert f"Invalid value for '{option[0]}'" in ran.err


def test_workers_get_the_prompts_of_a_pipe_in_a_file(lmtools, mp4, monkeypatch):
    """It can be read only once."""
    from lmtools.parallel import launch

    started: list[str] = []

    def start(arguments, *, num_workers):
        started.append(Path(arguments[-1]).read_text())  # the last --prompts is the one that counts

    monkeypatch.setattr(launch, "run_workers", start)
    reading, writing = os.pipe()
    os.write(writing, b"and =\n=\n")
    os.close(writing)
    assert lmtools(*mp4, "--prompts", f"/dev/fd/{reading}", "--mp", 2).code == 0
    os.close(reading)
    assert started == ["and =\n=\n"]


def test_prompts_that_are_no_text(lmtools, mp4, tmp_path):
    (tmp_path / "prompts").write_bytes(b"and\n\xff\n")
    ran = lmtools(*mp4, "--prompts", tmp_path / "prompts")
    assert (ran.code, ran.err) == (1, f"lmtools: {tmp_path}/prompts:2: not UTF-8 (byte 0xff)\n")
    (tmp_path / "prompts").write_bytes(b"")
    ran = lmtools(*mp4, "--prompts", tmp_path / "prompts")
    assert (ran.code, ran.err) == (1, f"lmtools: {tmp_path}/prompts: is empty, expected a prompt a line\n")
