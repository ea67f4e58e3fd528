"""A split, opened for evaluation: its tokens, its windows, and a check of everything before any weight is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmtools.artifacts import OriginalText, read_fresh_manifest
from lmtools.data.blocks import BreakMode, Offsets, Tokens, eval_windows, require_whole_sentences
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset, bin_path, idx_path
from lmtools.errors import ConfigError, DataError
from lmtools.files import sha256_file

if TYPE_CHECKING:  # it knows torch, and this module is read by some that do not
    from lmtools.checkpoints.vocabulary import Vocabulary


@dataclass(frozen=True)
class EvalSplit:
    """What an evaluation scores.

    Attributes:
        name: the subset's name.
        prefix: path of its .bin and .idx, without the suffix.
        tokens: the whole stream, mapped from the disk.
        num_sentences: how many end-of-sentence symbols were put in.
        windows: int64 `(num_windows, 3)`: context_start, start, end of each, in stream order.
        tokens_in_split: length of the stream.
        tokens_skipped: tokens of blocks that are too long for a window and were left out on request.
        original: counts of the text before detokenisation and BPE, if the manifests carry them.
    """

    name: str
    prefix: Path
    tokens: Tokens
    num_sentences: int
    windows: Offsets
    tokens_in_split: int
    tokens_skipped: int
    original: OriginalText | None

    @property
    def files(self) -> list[Path]:
        """What the split was read from."""
        return [bin_path(self.prefix), idx_path(self.prefix), self.prefix.with_name("dict.txt")]

    @property
    def tokens_to_score(self) -> int:
        """How many tokens the windows score together."""
        return self.tokens_in_split - self.tokens_skipped

    def count_scored(self, token_type: int) -> int:
        """How many of the scored tokens are of one type."""
        places = np.flatnonzero(self.tokens == token_type)
        starts, ends = self.windows[:, 1], self.windows[:, 2]
        return int((np.searchsorted(places, ends) - np.searchsorted(places, starts)).sum())

    def identity(self) -> dict[str, Any]:
        """What the scores depend on here: the tokens, and which are scored with which context."""
        return {
            "tokens_sha256": sha256_file(bin_path(self.prefix)),
            "windows_sha256": hashlib.sha256(np.ascontiguousarray(self.windows, dtype="<i8").tobytes()).hexdigest(),
        }


def open_split(
    data: str | Path,
    name: str,
    dictionary: Dictionary,
    *,
    tokens_per_sample: int,
    context_window: int,
    break_mode: BreakMode,
    skip_too_long: bool,
) -> EvalSplit:
    """Open a split and lay out its windows.

    Args:
        data: the folder that `binarize` made.
        name: the subset, such as `test`.
        dictionary: the folder's dictionary.
        tokens_per_sample: the longest window.
        context_window: tokens of each window that are only seen.
        break_mode: how the stream is cut.
        skip_too_long: leave out sentences that do not fit a window (fairseq does so silently), instead of refusing.

    Raises:
        ConfigError: options that cannot work together, or a sentence that does not fit a window.
        DataError: the split is missing, broken, empty, or does not fit its dictionary.
    """
    prefix = Path(data) / name
    dataset = IndexedDataset(prefix)
    tokens, sizes = dataset.tokens, dataset.sizes
    if len(tokens) == 0:
        raise DataError(f"{prefix}: the split holds no tokens, nothing to evaluate")
    _require_known_types(tokens, dictionary, prefix)
    require_whole_sentences(tokens, sizes, dictionary.eos_index, str(prefix))
    windows = eval_windows(
        sizes, tokens_per_sample=tokens_per_sample, context_window=context_window, break_mode=break_mode
    )
    block_tokens = tokens_per_sample - context_window
    too_long = windows[:, 2] - windows[:, 1] > block_tokens
    if too_long.any() and not skip_too_long:
        first = windows[np.argmax(too_long)]
        raise ConfigError(
            f"{prefix}: {int(too_long.sum())} sentences are longer than the {block_tokens} tokens of a block (the "
            f"first, at token {first[1]}, has {first[2] - first[1]}); use --sample-break-mode none, or leave them out "
            "with --skip-invalid-size-inputs-valid-test"
        )
    if too_long.all():
        raise ConfigError(
            f"{prefix}: every sentence is longer than the {block_tokens} tokens of a block, nothing to score"
        )
    skipped = windows[too_long]
    manifest = read_fresh_manifest(prefix)
    return EvalSplit(
        name=name,
        prefix=prefix,
        tokens=tokens,
        num_sentences=len(sizes),
        windows=windows[~too_long],
        tokens_in_split=len(tokens),
        tokens_skipped=int((skipped[:, 2] - skipped[:, 1]).sum()),
        original=manifest.original if manifest is not None else None,
    )


def require_rows(split: EvalSplit, rows: npt.NDArray[np.int32], dictionary: Dictionary) -> None:
    """Refuse a split with a token that the model has no row for.

    Args:
        split: from `open_split`.
        rows: the model's row for each index of the dictionary, -1 where it has none.
        dictionary: the split's.

    Raises:
        DataError: names the first such token.
    """
    for start in range(0, len(split.tokens), 1 << 22):
        lacking = rows[split.tokens[start : start + (1 << 22)]] < 0
        if lacking.any():
            bad = start + int(np.argmax(lacking))
            raise DataError(
                f"{split.prefix}.bin: token {bad} is {dictionary.symbols[split.tokens[bad]]!r}, which the model does "
                "not know; for GPT-2, binarize text that was encoded with `lmtools bpe-encode`, with all its ids"
            )


def require_vocabulary(
    split: EvalSplit, vocabulary: Vocabulary, rows: npt.NDArray[np.int32], dictionary: Dictionary
) -> None:
    """Refuse a split that other words make than the model's: a perplexity of it would be of another text.

    Args:
        split: from `open_split`.
        vocabulary: the model's.
        rows: of the dictionary's indices, from `Vocabulary.rows_of`.
        dictionary: the split's.

    Raises:
        DataError: the split has words that the model has not, or an `<unk>` that may be a word that the model has.
    """
    remedy = (
        f"binarize the text again with the model's words: `lmtools export-dict {vocabulary.path} dict.txt`, then "
        "`lmtools binarize --srcdict dict.txt`"
    )
    seen = np.zeros(len(rows), dtype=np.int64)
    for start in range(0, len(split.tokens), 1 << 22):
        seen += np.bincount(split.tokens[start : start + (1 << 22)], minlength=len(rows))
    lacking = np.flatnonzero((rows < 0) & (seen > 0))
    if len(lacking):
        raise DataError(
            f"{split.prefix}.bin: {int(seen[lacking].sum()):,} tokens are of {len(lacking):,} types that the model's "
            f"{vocabulary.path.name} has not ({_a_few([dictionary.symbols[index] for index in lacking[:4]])}); {remedy}"
        )
    not_in_data = np.setdiff1d(np.arange(len(vocabulary)), rows)
    if len(not_in_data) and seen[dictionary.unk_index]:
        raise DataError(
            f"{split.prefix}.bin: {int(seen[dictionary.unk_index]):,} tokens are <unk>, some of which may be words "
            f"that the model has, since the split's dict.txt lacks {len(not_in_data):,} of these "
            f"({_a_few([vocabulary.words[row] for row in not_in_data[:4]])}); {remedy}"
        )


def _a_few(words: Sequence[str]) -> str:
    """Of at most four the first three, and whether there are more."""
    return ", ".join(map(repr, words[:3])) + (", ..." if len(words) > 3 else "")


def _require_known_types(tokens: Tokens, dictionary: Dictionary, prefix: Path) -> None:
    """Every token has an entry in the dictionary, and none is padding."""
    for start in range(0, len(tokens), 1 << 22):
        chunk = tokens[start : start + (1 << 22)]
        if int(chunk.max()) >= len(dictionary) or int(chunk.min()) < 0:
            bad = start + int(np.argmax((chunk >= len(dictionary)) | (chunk < 0)))
            raise DataError(
                f"{prefix}.bin: token {bad} is type {int(tokens[bad])}, but the dictionary has {len(dictionary)} "
                "types; the split was binarized with another dictionary"
            )
        if (chunk == dictionary.pad_index).any():
            bad = start + int(np.argmax(chunk == dictionary.pad_index))
            raise DataError(
                f"{prefix}.bin: token {bad} is <pad>, which a model neither reads nor predicts; "
                "replace the word <pad> in the text and binarize it again"
            )
