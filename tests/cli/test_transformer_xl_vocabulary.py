"""`eval` and `generate` with a Transformer-XL of transformers that has words of its own, as a user types it."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed_writer import write_dataset
from lmtools.models.transformer_xl import TransformerXL
from lmtools.parallel.mesh import Mesh
from tests.cli.conftest import Lmtools
from tests.support.transformer_xl_states import config_of, original_state, vocabulary_fields, write_huggingface_folder

ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=torch.device("cpu"), device_mesh=None)
WORDS = ["<eos>", "the", "of", "<unk>", "life", "game", ",", "=", "cell", "glider", "gun", "still", "1970"]
"""By falling frequency, as the original orders them; clusters of rarer types begin at 5 and 8."""

LINES = [
    "= game of life =",
    "",
    "the glider gun of 1970 , the <unk> still life",
    "the game , the glider",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_huggingface_folder(tmp_path / "wt103", config_of(div_val=2, mem_len=6))
    (tmp_path / "wt103" / "vocab.pkl").write_bytes(pickle.dumps(vocabulary_fields(WORDS)))
    return tmp_path / "wt103"


def binarized(folder: Path, words: list[str], lines: list[str]) -> Path:
    """Data with a dict.txt of these words; the others become <unk>, as `binarize` does."""
    folder.mkdir()
    dictionary = Dictionary(words, [1] * len(words))
    dictionary.save(folder / "dict.txt")
    tokens = [[*map(dictionary.index, line.split()), dictionary.eos_index] for line in lines]
    write_dataset(folder / "test", tokens, vocab_size=len(dictionary))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """In the alphabet's order, and with fairseq's padding."""
    words = sorted(word for word in WORDS if word not in ("<eos>", "<unk>"))
    return binarized(tmp_path / "data", [*words, "madeupword0000"], LINES)


def evaluation(data: Path, model: Path) -> list[object]:
    return ["eval", data, "--path", model, "--task", "truncated_bptt_lm", "--device", "cpu"]


def test_a_file_that_does_not_say_how_long_its_memory_was(lmtools, model, data):
    """The original's state dict has no options: it is not scored as if it remembered nothing."""
    config = config_of(div_val=2, untie_r=False, mem_len=6)
    state = {name: torch.sin(tensor) for name, tensor in original_state(config).items()}
    torch.save(state, model / "original.pt")
    command = [*evaluation(data, model / "original.pt"), "--tokens-per-sample", 4, "--json"]
    ran = lmtools(*command)
    assert ran.code == 2
    assert ran.err.startswith(f"lmtools: {model}/original.pt: does not say how long its memory was; give --mem-len")
    ran = lmtools(*command, "--mem-len", 6)
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["mem_len"] == 6


def scores_of(model: Path, rows: list[int]) -> list[float]:
    """The log-probability of each row after the first, one read after the other."""
    loaded = load_model(open_checkpoint(model), ALONE, torch.float64)
    assert isinstance(loaded, TransformerXL)
    scores, memories = [], None
    for row, following in itertools.pairwise(rows):
        nll, memories = loaded(torch.tensor([[row]]), torch.tensor([[following]]), memories)
        scores.append(-float(nll))
    return scores


def test_a_split_is_scored_by_the_rows_of_its_words(lmtools, model, data, tmp_path):
    """With the cutoffs of the model's own order, and <eos> before the first word; the result says whose words."""
    rows = [WORDS.index(word) for line in LINES for word in [*line.split(), "<eos>"]]
    expected = scores_of(model, [0, *rows])
    ran = lmtools(*evaluation(data, model), "--tokens-per-sample", 1, "--json")
    assert (ran.code, ran.err) == (0, "")
    result = json.loads(ran.out)
    assert result["total_nats"] == pytest.approx(-sum(expected), rel=1e-5)
    assert (result["tokens_scored"], result["tokens_unk"], result["vocabulary"]) == (len(rows), 1, "vocab.pkl")
    assert result["checkpoint_sha256"]["vocab.pkl"] == hashlib.sha256((model / "vocab.pkl").read_bytes()).hexdigest()
    assert "words are the model's own, of its vocab.pkl" in lmtools(*evaluation(data, model)).out


def test_the_order_of_the_data_makes_no_difference(lmtools, model, data, tmp_path):
    words = [word for word in reversed(WORDS) if word not in ("<eos>", "<unk>")]
    other = binarized(tmp_path / "other", ["unseen", *words], LINES)
    results = [json.loads(lmtools(*evaluation(where, model), "--json").out) for where in (data, other)]
    assert results[0]["total_nats"] == results[1]["total_nats"]


@pytest.mark.slow
def test_on_two_ranks(start_lmtools, lmtools, model, data):
    commands: list[list[object]] = [
        [*evaluation(data, model), "--json"],
        ["generate", "--path", model, "--prompt", "the game", "--ignore-eos", "--json"],
    ]
    for command in commands:
        expected = json.loads(lmtools(*command).out)
        out, err = start_lmtools(*command, "--mp", 2).communicate(timeout=120)
        found = json.loads(out)
        assert err == b""
        assert found["vocabulary"] == expected["vocabulary"]
        if command[0] == "eval":
            assert found["total_nats"] == pytest.approx(expected["total_nats"], rel=1e-5)
        else:
            assert found["ids"] == expected["ids"]
            assert found["log_probs"] == pytest.approx(expected["log_probs"], abs=1e-4)


def test_words_that_the_model_lacks_are_refused_and_the_remedy_works(lmtools, model, tmp_path):
    """They would be another text's perplexity."""
    text = tmp_path / "text"
    text.write_text("the zebra of the yak\nthe xerus , a walrus\n")
    ran = lmtools("binarize", "--trainpref", text, "--testpref", text, "--destdir", tmp_path / "own", "--json")
    ran = lmtools(*evaluation(tmp_path / "own", model))
    dictionary = f"lmtools export-dict {model}/vocab.pkl dict.txt"
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"lmtools: {tmp_path}/own/test.bin: 5 tokens are of 5 types that the model's vocab.pkl has not ('a', 'walrus', "
        f"'xerus', ...); binarize the text again with the model's words: `{dictionary}`, then "
        "`lmtools binarize --srcdict dict.txt`\n"
    )
    ran = lmtools("export-dict", model / "vocab.pkl", tmp_path / "dict.txt")
    assert ran.out == f"{tmp_path}/dict.txt: 15 types, of the 13 of {model}/vocab.pkl and <s> and <pad>\n"
    lmtools("binarize", "--srcdict", tmp_path / "dict.txt", "--testpref", text, "--destdir", tmp_path / "new")
    result = json.loads(lmtools(*evaluation(tmp_path / "new", model), "--json").out)
    assert (result["tokens_scored"], result["tokens_unk"]) == (12, 5)


def test_an_unk_that_may_be_a_word_of_the_model_is_refused(lmtools, model, tmp_path):
    """A dictionary that lacks words makes <unk> of them, which is easy to predict; without one there is no harm."""
    words = ["the", "of", "life"]
    ran = lmtools(*evaluation(binarized(tmp_path / "few", words, ["the game of life"]), model))
    assert ran.code == 1
    assert (
        "few/test.bin: 1 tokens are <unk>, some of which may be words that the model has, since the split's " in ran.err
    )
    assert "dict.txt lacks 8 of these ('game', ',', '=', ...); binarize the text again" in ran.err
    ran = lmtools(*evaluation(binarized(tmp_path / "known", words, ["the life of life"]), model))
    assert (ran.code, ran.err) == (0, "")


def lines_of(lmtools: Lmtools, *arguments: object) -> list[dict[str, Any]]:
    ran = lmtools("generate", *arguments, "--max-new-tokens", 9, "--json")
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


@pytest.mark.parametrize("options", [[], ["--beam", 3], ["--temperature", 1]], ids=str)
def test_text_is_the_models_own_words(lmtools, model, options):
    """A dict.txt beside it is another's. <eos> and </s> both end a line."""
    (model / "dict.txt").write_text("".join(f"word{index} 1\n" for index in range(9)))
    prompts = ["--prompt", "= life = <eos> the glider", "--prompt", "= life = </s> the glider"]
    first, second = lines_of(lmtools, "--path", model, *prompts, *options)
    assert first["prompt_ids"] == second["prompt_ids"] == [0, 7, 4, 7, 0, 1, 9]
    assert first["vocabulary"] == f"{model}/vocab.pkl"
    assert first["tokens"] == [WORDS[row].replace("<eos>", "</s>") for row in first["ids"]]
    words = [WORDS[row] for row in first["ids"] if row != 0]
    assert first["text"] == " ".join(["= life = the glider", *words])
    scores = scores_of(model, first["prompt_ids"] + first["ids"])
    assert first["log_probs"] == pytest.approx(scores[-len(first["ids"]) :], abs=1e-4)


def test_other_words_are_said_to_be_unknown(lmtools, model):
    ran = lmtools("generate", "--path", model, "--prompt", "the zebra", "--json")
    assert ran.err == "prompt 1: not in the dictionary, and read as <unk>: 'zebra'\n"
    assert json.loads(ran.out)["prompt_ids"] == [0, 1, 3]


def test_it_is_refused_in_a_line(lmtools, model, data):
    """Another dictionary for text, training in another order, and a folder that lost its words."""
    ran = lmtools("generate", "--path", model, "--prompt", "the", "--dict", data)
    assert ran.err == f"lmtools: --dict and --bpe: the model has words of its own, {model}/vocab.pkl; leave them out\n"
    train = ["train", data, "--task", "truncated_bptt_lm", "--arch", "transformer_xl", "--train-subset", "test"]
    train += [
        "--valid-subset",
        "test",
        "--tokens-per-sample",
        4,
        "--batch-size",
        2,
        "--max-update",
        1,
        "--device",
        "cpu",
    ]
    ran = lmtools(*train, "--save-dir", data / "run", "--finetune-from", model)
    assert f"{model}: its rows are the words of vocab.pkl, in another order than that of {data}/dict.txt" in ran.err
    (model / "vocab.pkl").unlink()
    ran = lmtools(*evaluation(data, model))
    assert "the embedding of pytorch_model.bin has 13 rows" in ran.err
    assert ran.err.endswith(
        "this is not the dictionary of the checkpoint; put the vocab.pkl that came with it beside it\n"
    )


def test_inspect_names_the_vocabulary(lmtools, model):
    assert json.loads(lmtools("inspect", model, "--json").out)["vocabulary"] == "vocab.pkl"
