"""The vocabulary that lies beside a Transformer-XL of transformers or of the original: which word is which row.

Its words are in an order of their own (`<eos>`, then by falling frequency, `<unk>` among them), which no dict.txt can
have, since every dict.txt begins with `<s> <pad> </s> <unk>`. So a word of the data is the model's row of the same
spelling. Three files hold such a vocabulary, as fields of the class that made it, of which two say all:

    idx2sym    list, the word of each row
    sym2idx    dict, the row of each word
    counter    how often each was seen, where it is kept; a Counter

- `vocab.pkl`, a pickle, or a file of torch.save under the same name: transformers' `TransfoXLTokenizer`;
- `vocab.bin`, a file of torch.save: the same of earlier versions (pytorch-transformers);
- `cache.pt`, a file of torch.save: the original's `Corpus`, whose `vocab` it is.

They are read as data, and nothing in them is run.
Source: transformers 4.30, tokenization_transfo_xl.py (`save_vocabulary`, `__init__`); kimiyoung/transformer-xl,
pytorch/data_utils.py (`get_lm_corpus`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmtools.checkpoints.inert_pickle import read_pickle
from lmtools.checkpoints.unpickle import LEGACY_MAGIC, ForeignRecord, read_torch_file
from lmtools.data.dictionary import Dictionary
from lmtools.errors import CheckpointError

EOS, UNK = "<eos>", "<unk>"

_FILES = ("vocab.pkl", "vocab.bin", "cache.pt")


@dataclass(frozen=True)
class Vocabulary:
    """The words of a model's rows.

    Attributes:
        path: the file that says so.
        words: of each row.
        counts: how often each was seen; 1 of each where the file does not say.
        rows: of each word.
    """

    path: Path
    words: Sequence[str]
    counts: Sequence[int]
    rows: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.words)

    @property
    def eos_row(self) -> int:
        """The row that ends a line."""
        return self.rows[EOS]

    def dictionary(self) -> Dictionary:
        """The words in the order of rows as a dict.txt has them: what is binarized with it lacks no type."""
        own = [row for row, word in enumerate(self.words) if word not in (EOS, UNK)]
        return Dictionary([self.words[row] for row in own], [self.counts[row] for row in own])

    def rows_of(self, dictionary: Dictionary) -> npt.NDArray[np.int32]:
        """The row of each index of a dictionary, by the word's spelling; -1 where there is none.

        `</s>` is the row of `<eos>`; `<s>` and `<pad>` have none, unless the vocabulary has words of that spelling.
        """
        rows = np.array([self.rows.get(word, -1) for word in dictionary.symbols], dtype=np.int32)
        rows[[dictionary.eos_index, dictionary.unk_index]] = self.rows[EOS], self.rows[UNK]
        return rows


def find_vocabulary_file(folder: Path) -> Path | None:
    """The file in a folder that holds a vocabulary; transformers prefers vocab.pkl too."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def read_vocabulary(path: Path, *, num_rows: int | None = None) -> Vocabulary:
    """Read a vocabulary's file.

    Args:
        path: the file.
        num_rows: of the model; None if there is no model to compare with.

    Raises:
        CheckpointError: it is broken, asks for something that data never needs, holds no vocabulary of words with
            `<eos>` and `<unk>`, or one of another size.
    """
    fields = _fields(_content(path))
    words, rows = fields.get("idx2sym"), fields.get("sym2idx")
    if not (isinstance(words, list) and isinstance(rows, Mapping) and words):
        raise CheckpointError(f"{path}: holds no vocabulary, expected the fields idx2sym and sym2idx")
    by_word: dict[str, int] = {}
    for row, word in enumerate(words):
        if type(word) is not str or word.split() != [word]:
            raise CheckpointError(f"{path}: row {row} is {str(word)[:80]!r}, expected a word without white space")
        if word in by_word or rows.get(word) != row:
            raise CheckpointError(f"{path}: {word!r} is row {row} by idx2sym and {rows.get(word)} by sym2idx")
        by_word[word] = row
    for word in (EOS, UNK):
        if word not in by_word:
            raise CheckpointError(
                f"{path}: has no {word}; expected a vocabulary of words, whose lines end with {EOS} and whose unknown "
                f"words are {UNK}"
            )
    if num_rows is not None and len(words) != num_rows:
        raise CheckpointError(
            f"{path}: has {len(words)} types, the model beside it has {num_rows} rows; this is not its vocabulary"
        )
    seen = fields.get("counter")
    seen = seen if isinstance(seen, Mapping) else {}
    counts = [count if type(count) is int and count >= 0 else 1 for count in (seen.get(word, 1) for word in words)]
    return Vocabulary(path, words, counts, by_word)


def _content(path: Path) -> Any:
    """What the file holds, whichever way it was saved."""
    try:
        with open(path, "rb") as stream:
            is_zip = stream.read(4) == b"PK\x03\x04"
            stream.seek(0)
            content = None if is_zip else read_pickle(stream)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{path}: broken, or not a pickle ({reason[:200]})") from error
    # Before it was an archive, what torch.save wrote began with a pickle of its own.
    return read_torch_file(path).content if is_zip or content == LEGACY_MAGIC else content


def _fields(content: Any) -> Mapping[str, Any]:
    """The fields of the class that made the vocabulary, or of the `Corpus` that has one."""
    fields = content.state if isinstance(content, ForeignRecord) else content
    inner = fields.get("vocab") if isinstance(fields, Mapping) else None
    if isinstance(inner, ForeignRecord):
        fields = inner.state
    return fields if isinstance(fields, Mapping) else {}
