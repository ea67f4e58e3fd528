"""Which dictionary belongs to a checkpoint, and how text becomes its indices."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lmtools.errors import ConfigError

if TYPE_CHECKING:
    from lmtools.checkpoints.load import Checkpoint
    from lmtools.preprocess.codec import Codec


class Bpe(str, Enum):
    """How text becomes the dictionary's words."""

    gpt2 = "gpt2"
    none = "none"


class OpenCodec(NamedTuple):
    """How text becomes a model's tokens.

    Attributes:
        codec: between text and tokens.
        eos_index: the token that ends a sentence.
        vocabulary: the file that says which words there are.
    """

    codec: Codec
    eos_index: int
    vocabulary: Path


def open_codec(
    checkpoint: Checkpoint,
    dictionary: Path | None,
    bpe: Bpe | None,
    encoder_json: str | None,
    vocab_bpe: str | None,
    *,
    on_unknown: Callable[[str], None] | None = None,
) -> OpenCodec:
    """How text becomes the model's tokens.

    Args:
        checkpoint: the model's.
        dictionary: as --dict; None for the one that belongs to the checkpoint.
        bpe: as --bpe.
        encoder_json: as --encoder-json.
        vocab_bpe: as --vocab-bpe.
        on_unknown: called with each word that a dictionary of words has not, which is then read as `<unk>`; without it
            such a word is refused.
    """
    from lmtools.checkpoints.huggingface_read import HuggingFaceCheckpoint
    from lmtools.checkpoints.load import own_vocabulary, require_dictionary_fits
    from lmtools.checkpoints.vocabulary import EOS
    from lmtools.data.dictionary import Dictionary
    from lmtools.preprocess.codec import BpeCodec, RowsCodec, TokenizerCodec, WordCodec, is_bpe
    from lmtools.preprocess.gpt2_vocabulary import check_vocabulary, find_vocabulary, read_vocabulary

    own = own_vocabulary(checkpoint)
    if own is not None:
        if dictionary or bpe is Bpe.gpt2:
            raise ConfigError(f"--dict and --bpe: the model has words of its own, {own.path}; leave them out")
        words = own.dictionary()
        by_spelling = WordCodec(words, on_unknown=on_unknown, spellings={EOS: words.symbols[words.eos_index]})
        return OpenCodec(RowsCodec(by_spelling, own.rows_of(words).tolist()), own.eos_row, own.path)
    place = dictionary or find_dictionary(checkpoint)
    if isinstance(checkpoint, HuggingFaceCheckpoint) and (place is None or checkpoint.settings["model_type"] == "gpt2"):
        if dictionary or bpe:
            raise ConfigError("--dict and --bpe: a GPT-2 folder has a tokenizer.json, which is used; leave them out")
        tokenizer = checkpoint.paths[0].parent / "tokenizer.json"
        codec = TokenizerCodec(tokenizer, vocab_size=checkpoint.config.vocab_size)
        return OpenCodec(codec, checkpoint.eos_index, tokenizer)
    if place is None:
        raise ConfigError(
            f"{checkpoint.paths[0].parent}: has no dict.txt; give the one that the model was trained with by --dict"
        )
    place = place / "dict.txt" if place.is_dir() else place
    words = Dictionary.load(place)
    require_dictionary_fits(checkpoint, len(words), place)
    if bpe is Bpe.none or (bpe is None and not is_bpe(words)):
        return OpenCodec(WordCodec(words, on_unknown=on_unknown), words.eos_index, place)
    files = find_vocabulary(encoder_json, vocab_bpe)
    vocabulary = read_vocabulary(files)
    check_vocabulary(vocabulary, files)
    return OpenCodec(BpeCodec(words, vocabulary), words.eos_index, place)


def find_dictionary(checkpoint: Checkpoint) -> Path | None:
    """The dict.txt beside a checkpoint, or in the folder of data that a training run read."""
    from lmtools.checkpoints.training_read import TrainingCheckpoint

    folder = checkpoint.paths[0].parent
    places = [folder / "dict.txt"]
    if isinstance(checkpoint, TrainingCheckpoint):
        data = str(checkpoint.record["train"]["data"])
        places += [Path(data.split(":")[0]) / "dict.txt"]
    return next((place for place in places if place.is_file()), None)


def tokenizer_of(checkpoint: Checkpoint, dictionary: Path | None, bpe: Bpe | None) -> dict[str, str] | None:
    """The files of a Hugging Face tokenizer, or None if there is no dictionary to make them of."""
    from lmtools.checkpoints.load import require_dictionary_fits, require_transformer_lm
    from lmtools.data.dictionary import Dictionary
    from lmtools.preprocess.codec import is_bpe
    from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary
    from lmtools.preprocess.huggingface_tokenizer import tokenizer_files

    place = dictionary or find_dictionary(checkpoint)
    if place is None:
        return None
    place = place / "dict.txt" if place.is_dir() else place
    words = Dictionary.load(place)
    require_dictionary_fits(checkpoint, len(words), place)
    as_words = bpe is Bpe.none or (bpe is None and not is_bpe(words))
    vocabulary = None if as_words else read_vocabulary(find_vocabulary(None, None))
    config = require_transformer_lm(checkpoint, "transformers no longer has this model")
    return tokenizer_files(words, vocabulary, max_length=config.max_target_positions)


def padded_dictionary(checkpoint: Checkpoint, dictionary: Path | None) -> dict[str, str] | None:
    """A dict.txt with a row for each row of the embedding, as fairseq wants it; None if there is no dictionary."""
    from lmtools.checkpoints.load import require_dictionary_fits
    from lmtools.data.dictionary import Dictionary

    place = dictionary or find_dictionary(checkpoint)
    if place is None:
        return None
    place = place / "dict.txt" if place.is_dir() else place
    words = Dictionary.load(place)
    require_dictionary_fits(checkpoint, len(words), place)
    return {"dict.txt": words.padded(checkpoint.config.vocab_size).to_bytes().decode("utf-8")}
