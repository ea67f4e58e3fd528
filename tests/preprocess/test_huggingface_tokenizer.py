"""Which files there are, and what has no tokenizer.json; tests/parity/test_huggingface.py loads them."""

from __future__ import annotations

import json

import pytest

from lmtools.data.dictionary import Dictionary
from lmtools.errors import DataError
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary, spell
from lmtools.preprocess.huggingface_tokenizer import tokenizer_files
from tests.support.tiny_bpe import write_vocabulary

GPT2 = read_vocabulary(find_vocabulary(None, None))


def test_tokens_are_spelled_as_openai_does():
    assert (spell(b" the"), spell(b"\n"), spell("é".encode())) == ("Ġthe", "Ċ", "Ã©")


def test_each_token_has_the_index_of_its_id(tmp_path):
    vocabulary = read_vocabulary(write_vocabulary(tmp_path, merges=[(b"a", b"b")], first_id=7))
    dictionary = Dictionary([str(id_) for id_ in range(263, 6, -1)] + ["madeupword0000"], [1] * 258)
    files = tokenizer_files(dictionary, vocabulary, max_length=99)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "dict.txt"}
    assert files["dict.txt"].encode() == dictionary.to_bytes()
    assert json.loads(files["tokenizer_config.json"])["model_max_length"] == 99
    model = json.loads(files["tokenizer.json"])["model"]
    assert model["merges"] == ["a b"]
    for token, index in (("ab", vocabulary.ids[b"ab"]), ("a", vocabulary.ids[b"a"])):
        assert dictionary.symbols[model["vocab"][token]] == str(index)
    assert (model["vocab"]["</s>"], model["vocab"]["madeupword0000"]) == (2, 4 + 257)


def test_a_dictionary_that_lacks_tokens_is_refused():
    words = [str(id_) for id_ in range(50257) if id_ not in (262, 5000)]
    with pytest.raises(DataError, match=r"lacks 2 of the BPE's 50,256 tokens \(the first has id 262\).*--bpe none"):
        tokenizer_files(Dictionary(words, [1] * len(words)), GPT2, max_length=1024)
