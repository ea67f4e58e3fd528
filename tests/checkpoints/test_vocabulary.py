"""The vocabulary of a Transformer-XL of another program: read as data, and found by spelling.

`transformers_vocab.pkl` is what transformers 4.30.2 wrote: a `TransfoXLTokenizer(special=["<eos>"])` that had counted
three lines, then `build_vocab()` and `save_pretrained()`. It holds patterns and objects of sacremoses too.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmtools.checkpoints.vocabulary import find_vocabulary_file, read_vocabulary
from lmtools.data.dictionary import Dictionary
from lmtools.errors import CheckpointError
from tests.support.transformer_xl_states import vocabulary_fields

WORDS = ["<eos>", "the", "<unk>", ",", "Café", "madeup"]
GENUINE = Path(__file__).with_name("transformers_vocab.pkl")


def save_pickle(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content))


def test_a_genuine_file_of_transformers():
    vocabulary = read_vocabulary(GENUINE)
    assert list(vocabulary.words[:6]) == ["<eos>", "of", "the", "=", "Game", "Life"]
    assert list(vocabulary.counts[:6]) == [4, 3, 3, 2, 2, 2]
    assert (len(vocabulary), vocabulary.eos_row, vocabulary.rows["<unk>"], vocabulary.rows["970"]) == (19, 0, 13, 18)


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab.bin"])
@pytest.mark.parametrize("writer", ["pickle", "legacy torch file", "zip torch file"])
def test_whichever_way_it_was_saved(tmp_path, writer, name):
    path = tmp_path / name
    if writer == "pickle":
        save_pickle(path, vocabulary_fields(WORDS))
    else:
        torch.save(vocabulary_fields(WORDS), path, _use_new_zipfile_serialization=writer == "zip torch file")
    assert find_vocabulary_file(tmp_path) == path
    vocabulary = read_vocabulary(path, num_rows=6)
    assert (list(vocabulary.words), list(vocabulary.counts)) == (WORDS, [100, 99, 98, 97, 96, 95])


def test_the_originals_corpus(tmp_path, monkeypatch):
    """`cache.pt`: an object of classes that are not here, tensors and all."""
    for module, name in (("data_utils", "Corpus"), ("utils", ""), ("utils.vocabulary", "Vocab")):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        if name:
            setattr(sys.modules[module], name, type(name, (), {"__module__": module}))
    vocab = sys.modules["utils.vocabulary"].Vocab()
    vars(vocab).update(vocabulary_fields(WORDS))
    corpus = sys.modules["data_utils"].Corpus()
    vars(corpus).update(dataset="wt103", vocab=vocab, test=torch.arange(9))
    torch.save(corpus, tmp_path / "cache.pt")
    monkeypatch.undo()
    assert list(read_vocabulary(tmp_path / "cache.pt").words) == WORDS


def test_a_file_without_counts_has_one_of_each(tmp_path):
    fields = vocabulary_fields(WORDS) | {"counter": Counter()}
    save_pickle(tmp_path / "vocab.pkl", fields)
    assert set(read_vocabulary(tmp_path / "vocab.pkl").counts) == {1}


@given(st.permutations(range(4, 9)))
def test_rows_are_found_by_spelling(order):
    """Whatever the order of dict.txt; special symbols and padding have none, but `</s>` is `<eos>`."""
    vocabulary = read_vocabulary(GENUINE)
    symbols = ["of", "the", "zebra", "madeupword0000", "970"]
    rows = {"of": 1, "the": 2, "zebra": -1, "madeupword0000": -1, "970": 18}
    words = [symbols[index - 4] for index in order]
    found = vocabulary.rows_of(Dictionary(words, [1] * 5))
    assert found.tolist() == [-1, -1, 0, 13, *(rows[word] for word in words)]


def test_its_dictionary_has_each_word_once(tmp_path):
    """Read back from dict.txt, its indices are all rows, in one order or another."""
    vocabulary = read_vocabulary(GENUINE)
    vocabulary.dictionary().save(tmp_path / "dict.txt")
    rows = vocabulary.rows_of(Dictionary.load(tmp_path / "dict.txt"))
    assert rows[:4].tolist() == [-1, -1, 0, 13]
    assert np.sort(rows[2:]).tolist() == list(range(19))
    assert (tmp_path / "dict.txt").read_text().startswith("of 3\nthe 3\n= 2\n")


class Call:
    """Pickles as a call of `exec`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('was run')",)


REFUSED: dict[str, tuple[Any, str]] = {
    "a program": (vocabulary_fields(WORDS) | {"never_split": Call()}, "names 'builtins.exec', which is no data"),
    "something else": ({"a": 1}, "holds no vocabulary, expected the fields idx2sym and sym2idx"),
    "no table": ([1, 2], "holds no vocabulary"),
    "no rows": (vocabulary_fields([]), "holds no vocabulary"),
    "two tables that differ": (
        vocabulary_fields(WORDS) | {"sym2idx": {"<eos>": 1}},
        "'<eos>' is row 0 by idx2sym and 1 by sym2idx",
    ),
    "a word twice": (vocabulary_fields([*WORDS, "the"]), "'the' is row 1 by idx2sym and 6 by sym2idx"),
    "characters": (vocabulary_fields(["<eos>", " "]), "row 1 is ' ', expected a word without white space"),
    "no word": (vocabulary_fields(WORDS) | {"idx2sym": [3]}, "row 0 is '3', expected a word"),
    "no end of line": (vocabulary_fields(["<S>", "<unk>"]), "has no <eos>; expected a vocabulary of words"),
    "no unknown word": (vocabulary_fields(["<eos>", "a"]), "has no <unk>; expected a vocabulary of words"),
    "another model's": (vocabulary_fields(WORDS[:5]), "has 5 types, the model beside it has 6 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_a_line(tmp_path, case):
    content, message = REFUSED[case]
    save_pickle(tmp_path / "vocab.pkl", content)
    with pytest.raises(CheckpointError) as caught:
        read_vocabulary(tmp_path / "vocab.pkl", num_rows=6)
    assert str(caught.value).startswith(f"{tmp_path}/vocab.pkl: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 3000])
def test_one_that_is_cut_short_is_refused(tmp_path, num_bytes):
    (tmp_path / "vocab.pkl").write_bytes(GENUINE.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match="broken, or not a pickle"):
        read_vocabulary(tmp_path / "vocab.pkl")
