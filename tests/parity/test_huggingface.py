"""transformers loads what lmtools exports, with no code of lmtools, and sees the same model and the same tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmtools.checkpoints.load import load_model, open_checkpoint
from lmtools.checkpoints.reshard import reshard
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset
from lmtools.generate.decode import Limits, continue_prompts
from lmtools.generate.sampling import Sampling
from lmtools.parallel.mesh import Mesh
from lmtools.preprocess.codec import BpeCodec
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary
from lmtools.preprocess.huggingface_tokenizer import tokenizer_files
from tests.support.ranks import run_ranks
from tests.support.training import train_a_leg

GOLDEN = Path(__file__).parents[1] / "golden"
ALONE = Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=torch.device("cpu"), device_mesh=None)
GPT2 = read_vocabulary(find_vocabulary(None, None))
WORDS = Dictionary.load(GOLDEN / "bin" / "dict.txt")


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def tokenizer_of(folder: Path, dictionary: Dictionary, *, bpe: bool) -> Any:
    """As transformers finds it in an exported folder."""
    if not folder.exists():
        files = tokenizer_files(dictionary, GPT2 if bpe else None, max_length=32)
        reshard(GOLDEN / "mp4", folder, num_parts=1, format="hf", more_files=files)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["mp4", "mp2_2020"])
def test_logits_are_those_of_lmtools(name, tmp_path, monkeypatch):
    """Golden models of genuine fairseq's, whose own scores lmtools reproduces."""
    checkpoint = open_checkpoint(GOLDEN / name)
    monkeypatch.setattr("lmtools.checkpoints.huggingface.SHARD_BYTES", 20_000)
    reshard(GOLDEN / name, tmp_path / "hf", num_parts=1, format="hf")
    tokens = torch.from_numpy(IndexedDataset(GOLDEN / "bin" / "test").tokens[: 8 * 32].astype("int64")).view(8, 32)
    ours = load_model(checkpoint, ALONE, torch.float32)(tokens)
    torch.testing.assert_close(loaded(tmp_path / "hf")(tokens).logits, ours, rtol=0, atol=1e-5)


VARIANTS = {
    "untied, not scaled": {"share_decoder_input_output_embed": False, "no_scale_embedding": True},
    "relu": {"activation_fn": "relu"},
    "gelu by tanh": {"activation_fn": "gelu_accurate"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_what_lmtools_trained(variant, tmp_path):
    flags = {"save_dir": str(tmp_path / "run"), "max_update": 5, "decoder_normalize_before": True} | VARIANTS[variant]
    run_ranks(1, train_a_leg, flags)
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoint_last")
    reshard(tmp_path / "run" / "checkpoint_last", tmp_path / "hf", num_parts=1, format="hf")
    tokens = torch.randint(4, 144, (4, 16), generator=torch.Generator().manual_seed(1))
    ours = load_model(checkpoint, ALONE, torch.float32)(tokens)
    torch.testing.assert_close(loaded(tmp_path / "hf")(tokens).logits, ours, rtol=0, atol=1e-5)


def test_greedy_text_is_that_of_lmtools(tmp_path):
    checkpoint = open_checkpoint(GOLDEN / "mp4")
    reshard(GOLDEN / "mp4", tmp_path / "hf", num_parts=1, format="hf")
    theirs, ours = loaded(tmp_path / "hf"), load_model(checkpoint, ALONE, torch.float32)
    generator = torch.Generator().manual_seed(2)
    prompts = [[2, *torch.randint(4, 144, (length,), generator=generator).tolist()] for length in range(12)]
    found = continue_prompts(ours, prompts, ALONE, Limits(range(2, 144), 2, 12, 32), Sampling())
    lengths = set()
    for prompt, continuation in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        generated = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert generated[0, len(prompt) :].tolist() == continuation.tokens
        lengths.add(len(continuation.tokens))
    assert len(lengths) > 3, "some end by themselves"


# --- the tokenizer ---


@pytest.mark.slow
@pytest.mark.shared
def test_the_real_test_text_has_the_indices_of_bpe_encode_and_binarize(shared_golden, tmp_path):
    dictionary = Dictionary.load(shared_golden / "bin" / "gpt2_dict.txt")
    tokenizer = tokenizer_of(tmp_path / "hf", dictionary, bpe=True)
    text = (shared_golden / "detok" / "wiki.test.detok").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
    found = [index for line in ids for index in (*line, dictionary.eos_index)]
    assert found == IndexedDataset(shared_golden / "bin" / "gpt2_test" / "test").tokens.tolist()
    assert len(found) == 270_847


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, BpeCodec]:
    dictionary = Dictionary([str(id_) for id_ in reversed(range(50257))] + ["madeupword0000"], [1] * 50258)
    return tokenizer_of(tmp_path_factory.mktemp("bpe") / "hf", dictionary, bpe=True), BpeCodec(dictionary, GPT2)


def test_golden_text(bpe):
    tokenizer, codec = bpe
    for line in (GOLDEN / "train.txt").read_text("utf-8").split("\n"):
        if text := line.strip():
            assert tokenizer(text)["input_ids"] == [2, *codec.encode(text)]
            assert tokenizer.decode(codec.encode(text)) == text


@settings(max_examples=50)
@given(st.text(st.characters(max_codepoint=0x2FFF, categories=["L", "N", "P", "Zs"]), min_size=1))
def test_any_text(bpe, text):
    tokenizer, codec = bpe
    if text := text.strip():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == codec.encode(text)


def test_special_symbols_in_a_text_are_text(bpe):
    tokenizer, codec = bpe
    text = "a</s> <unk> <pad>b <s>"
    assert tokenizer(text)["input_ids"] == [2, *codec.encode(text)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 3)


def test_a_dictionary_of_words(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "hf", WORDS, bpe=False)
    assert tokenizer("= and  zebra </s> <unk>")["input_ids"] == [2, 5, 4, 3, 2, 3]
    assert tokenizer.decode([2, 5, 4, 2], skip_special_tokens=True) == "= and"
    texts = [" ".join(line.split()) for line in (GOLDEN / "test.txt").read_text("utf-8").split("\n")[:-1]]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = [index for line in ids for index in (*line, 2)]
    assert found == IndexedDataset(GOLDEN / "bin" / "test").tokens.tolist()
