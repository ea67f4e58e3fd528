"""`eval` and `generate` on the folders of transformers' GPT-2 and XGLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmtools.checkpoints.reshard import reshard
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed_writer import write_dataset
from lmtools.preprocess.huggingface_tokenizer import tokenizer_files
from tests.support.transformers_models import GPT2, MODELS, GPT2Config, save

GOLDEN = Path(__file__).parents[1] / "golden"

# --- evaluation ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve tokens; GPT-2's ids are the words of the dictionary, in another order."""
    (tmp_path / "data").mkdir()
    Dictionary([str(id_) for id_ in reversed(range(60))] + ["madeupword0000"], [1] * 61).save(
        tmp_path / "data" / "dict.txt"
    )
    write_dataset(tmp_path / "data" / "test", [[7, 30, 9, 2], [63, 4, 5, 50, 11, 12, 30, 2]], vocab_size=65)
    return tmp_path / "data"


@pytest.mark.parametrize("more", [[], ["--add-bos-token"]], ids=["", "bos"])
def test_gpt2_is_evaluated_on_the_dictionarys_tokens(lmtools, data, tmp_path, more):
    model = save(tmp_path / "gpt2", MODELS["gpt2"])
    ran = lmtools("eval", data, "--path", tmp_path / "gpt2", "--tokens-per-sample", 12, *more, "--json")
    assert (ran.code, ran.err) == (0, "")
    result = json.loads(ran.out)
    # Index i stands for the id 63 - i; the end of a sentence is GPT-2's end of text, and so is what begins a text.
    stream = [56, 33, 54, 60, 0, 59, 58, 13, 52, 51, 33, 60]
    begin = [60, 60] if more else [60]
    log_probs = model(torch.tensor([begin + stream[:-1]])).logits[0].log_softmax(-1)[len(begin) - 1 :]
    expected = -float(log_probs[torch.arange(12), torch.tensor(stream)].sum())
    assert result["tokens_scored"] == 12
    assert result["total_nats"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("index", "word"), [(3, "<unk>"), (64, "madeupword0000")])
def test_what_gpt2_does_not_know_is_refused(lmtools, data, tmp_path, index, word):
    save(tmp_path / "gpt2", MODELS["gpt2"])
    write_dataset(data / "test", [[7, 30, 2], [8, index, 2]], vocab_size=65)
    ran = lmtools("eval", data, "--path", tmp_path / "gpt2", "--tokens-per-sample", 12)
    assert ran.code == 1
    assert ran.err.startswith(f"lmtools: {data}/test.bin: token 4 is '{word}', which the model does not know; ")


def test_an_xglm_has_the_dictionarys_own_indices(lmtools, tmp_path):
    reshard(GOLDEN / "mp4", tmp_path / "hf", num_parts=1, format="hf")
    results = [
        json.loads(lmtools("eval", GOLDEN / "bin", "--path", path, "--batch-size", 100, "--json").out)
        for path in (GOLDEN / "mp4", tmp_path / "hf")
    ]
    assert results[0]["total_nats"] == results[1]["total_nats"]


# --- text ---


def test_gpt2s_greedy_text_by_its_own_tokenizer(lmtools, tmp_path):
    """Here a tokenizer of words, whose </s> ends a text. A random model would say <pad>, as lmtools never does."""
    words = Dictionary.load(GOLDEN / "bin" / "dict.txt")
    model = save(tmp_path, GPT2Config(**GPT2 | {"vocab_size": 160, "eos_token_id": 2, "bos_token_id": 2}))
    files = tokenizer_files(words, None, max_length=20)
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"])
    ran = lmtools(
        "generate", "--path", tmp_path, "--prompt", "= and", "--prompt", "and", "--json", "--max-new-tokens", 9
    )
    assert (ran.code, ran.err) == (0, "")
    for line in map(json.loads, ran.out.splitlines()):
        ids = torch.tensor([line["prompt_ids"]])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=9,
            do_sample=False,
            pad_token_id=1,
            suppress_tokens=[0, 1, 3, *range(144, 160)],  # what stands for no text
        )
        assert line["ids"] == generated[0, ids.shape[1] :].tolist()
        assert line["prompt_ids"] == [2, *(words.index(word) for word in line["prompt"].split())]
        assert line["text"].startswith(line["prompt"])
    ran = lmtools("generate", "--path", tmp_path, "--prompt", "and", "--dict", GOLDEN / "bin")
    assert (ran.code, ran.err.count("\n")) == (2, 1)


def test_an_exported_folder_needs_no_dict(lmtools, tmp_path):
    words = Dictionary.load(GOLDEN / "bin" / "dict.txt")
    files = tokenizer_files(words, None, max_length=32)
    reshard(GOLDEN / "mp4", tmp_path / "hf", num_parts=1, format="hf", more_files=files)
    options = ["--prompt", "– and @ 's = =", "--max-new-tokens", 9]
    expected = lmtools("generate", "--path", GOLDEN / "mp4", "--dict", GOLDEN / "bin", *options)
    found = lmtools("generate", "--path", tmp_path / "hf", *options)
    assert found == expected
    assert found.code == 0
    (tmp_path / "hf" / "dict.txt").unlink()  # then there is the tokenizer.json
    assert lmtools("generate", "--path", tmp_path / "hf", *options) == expected


# --- reshard --format hf ---


def test_reshard_writes_a_folder_with_its_tokenizer(lmtools, tmp_path):
    source, options = GOLDEN / "mp4", ["--format", "hf", "--verify"]
    ran = lmtools("reshard", source, tmp_path / "hf", *options, "--dict", GOLDEN / "bin")
    assert (ran.code, ran.err) == (0, "")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("= and zebra")["input_ids"] == [2, 5, 4, 3]
    assert tokenizer.model_max_length == 32
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_without_a_dictionary_it_says_what_is_missing(lmtools, tmp_path):
    ran = lmtools("reshard", GOLDEN / "mp4", tmp_path / "hf", "--format", "hf")
    assert ran.code == 0
    assert ran.err == (
        f"{GOLDEN}/mp4: has no dict.txt beside it, so {tmp_path}/hf gets no tokenizer; --dict names one\n"
    )
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_other_formats_have_no_tokenizer(lmtools, tmp_path):
    ran = lmtools("reshard", GOLDEN / "mp4", tmp_path / "x", "--format", "fairseq", "--bpe", "gpt2")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "--format fairseq has no tokenizer" in ran.err
