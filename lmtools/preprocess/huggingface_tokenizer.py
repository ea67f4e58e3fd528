"""A dictionary as the files of a Hugging Face tokenizer, which gives the dictionary's indices with no code of ours.

With GPT-2's BPE, each token gets the index of its id in dict.txt. A text's special symbols are not special: `</s>`
written in a text is five characters, as it is to `bpe-encode` (for a dictionary of words it is that word, as it is to
`binarize`). Before a text stands one `</s>`, as before the first sentence that a model was trained on; without it
(`add_special_tokens=False`) a line has the indices that `bpe-encode` and `binarize` give it before its end of sentence.
"""

from __future__ import annotations

import json
from typing import Any

from lmtools.data.dictionary import SPECIAL_SYMBOLS, Dictionary
from lmtools.errors import DataError
from lmtools.preprocess.gpt2_vocabulary import Vocabulary, spell


def tokenizer_files(dictionary: Dictionary, vocabulary: Vocabulary | None, *, max_length: int) -> dict[str, str]:
    """Name and content of each file, dict.txt among them, so that lmtools can read the folder too.

    Args:
        dictionary: gives the indices.
        vocabulary: the BPE whose ids are the dictionary's words; None for words between spaces.
        max_length: the most tokens that the model was made for.

    Raises:
        DataError: the dictionary lacks tokens of the BPE. In a tokenizer.json each has an index of its own, so none can
            stand for all that is unknown.
    """
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": dictionary.indices[symbol],
                "content": symbol,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for symbol in SPECIAL_SYMBOLS
        ],
        "normalizer": None,
        **(_words(dictionary) if vocabulary is None else _bpe(dictionary, vocabulary)),
        "post_processor": _after_eos(dictionary.eos_index),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": max_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "dict.txt": dictionary.to_bytes().decode("utf-8"),
    }


def _bpe(dictionary: Dictionary, vocabulary: Vocabulary) -> dict[str, Any]:
    merged = {left + right for left, right in vocabulary.merges} | {bytes([byte]) for byte in range(256)}
    lacking = sorted(vocabulary.ids[token] for token in merged if str(vocabulary.ids[token]) not in dictionary)
    if lacking:
        raise DataError(
            f"the dictionary lacks {len(lacking):,} of the BPE's {len(merged):,} tokens (the first has id "
            f"{lacking[0]}), and a tokenizer.json cannot map them to <unk>; use --bpe none for a tokenizer of ids"
        )
    token_of_word = {str(id_): spell(token) for token, id_ in vocabulary.ids.items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token_of_word.get(word, word): index for word, index in dictionary.indices.items()},
            "merges": [f"{spell(left)} {spell(right)}" for left, right in vocabulary.merges],
        },
    }


def _words(dictionary: Dictionary) -> dict[str, Any]:
    return {
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": None,  # words with a space between them
        "model": {"type": "WordLevel", "vocab": dict(dictionary.indices), "unk_token": "<unk>"},
    }


def _after_eos(eos_index: int) -> dict[str, Any]:
    eos = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [eos, first],
        "pair": [eos, first, eos, second],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [eos_index], "tokens": ["</s>"]}},
    }
