"""One split through one model, by `lmtools eval` and by `fairseq-eval-lm`, token by token.

fairseq gets the model as one plain `transformer_lm`, whatever parts it is in, since its sharded evaluation hangs or
gives wrong scores (docs/numerics.md). Both compute in float32 on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lmtools.checkpoints.fairseq_write import write_fairseq_parts
from lmtools.checkpoints.load import open_checkpoint, require_dictionary_fits
from lmtools.crosscheck.compare import ScoreComparison, compare_scores
from lmtools.crosscheck.known_faults import faults_of_counts, faults_of_parts, faults_of_sum
from lmtools.crosscheck.programs import Fairseq, run_lmtools
from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset, bin_path, idx_path
from lmtools.data.indexed_writer import write_dataset
from lmtools.errors import ConfigError, DataError
from lmtools.models.architectures import TransformerLMConfig

_SUBSET = "test"
_SCRIPT = str(Path(__file__).with_name("score_with_fairseq.py"))


@dataclass(frozen=True)
class Evaluation:
    """Two evaluations of the same tokens.

    Attributes:
        tokens: the split's tokens, as far as they were scored.
        ours: lmtools' natural-log probabilities.
        theirs: fairseq's; as many, unless it left tokens out.
        comparison: of the two; None if fairseq scored other tokens.
        printed_base2: the loss that fairseq prints.
        faults: fairseq's known faults that show.
    """

    tokens: npt.NDArray[np.int64]
    ours: npt.NDArray[np.float32]
    theirs: npt.NDArray[np.float32]
    comparison: ScoreComparison | None
    printed_base2: float
    faults: tuple[str, ...]

    @property
    def explained(self) -> bool:
        """Whether the scores are the same but for rounding, or a known fault leaves tokens out."""
        if self.comparison is not None:
            return self.comparison.same
        return bool(faults_of_counts(len(self.ours), len(self.theirs)))


def evaluate_twice(
    data: Path,
    path: str,
    fairseq: Fairseq,
    folder: Path,
    *,
    subset: str,
    num_sentences: int,
    tokens_per_sample: int | None,
    context_window: int,
    batch_size: int,
) -> Evaluation:
    """Score the first sentences of a split with both programs.

    Args:
        data: the folder that `binarize` made.
        path: the checkpoint, as `open_checkpoint` takes it.
        fairseq: where fairseq is.
        folder: an empty folder on a disk that holds the model once more, in float32.
        subset: the split.
        num_sentences: how many of its sentences; 0 is all.
        tokens_per_sample: the longest window; None is the checkpoint's maximum.
        context_window: tokens of each window that are only seen.
        batch_size: windows at a time.

    Raises:
        CheckpointError: the checkpoint is not one that lmtools reads, or has another dictionary.
        ConfigError: the model is none of fairseq's language models.
        DataError: the split is missing, broken or empty.
        LmtoolsError: a program failed, or the disk is full.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if not isinstance(config, TransformerLMConfig):
        raise ConfigError(f"{path}: crosscheck compares transformer_lm models, and this is none")
    dictionary = Dictionary.load(data / "dict.txt")
    require_dictionary_fits(checkpoint, len(dictionary), data / "dict.txt")
    for part in range(checkpoint.num_parts):
        checkpoint.verify_part(part)

    ours, theirs = folder / "ours", folder / "theirs"
    tokens = _cut_split(data / subset, ours, num_sentences, vocab_size=len(dictionary))
    dictionary.save(ours / "dict.txt")
    theirs.mkdir()
    for name in (bin_path(_SUBSET), idx_path(_SUBSET)):
        (theirs / name).symlink_to(ours / name)
    # fairseq makes one row for each type; the rows that model parallelism had added belong to the model all the same.
    dictionary.padded(config.vocab_size).save(theirs / "dict.txt")
    [plain] = write_fairseq_parts(folder / "plain", config, checkpoint.read, num_parts=1, dtype=torch.float32)

    window = tokens_per_sample or config.max_target_positions
    options = ["--gen-subset", _SUBSET, "--tokens-per-sample", str(window), "--context-window", str(context_window)]
    options += ["--batch-size", str(batch_size)]
    our_scores = folder / "ours.npy"
    run_lmtools(
        ["eval", str(ours), "--path", os.path.abspath(path), *options, "--device", "cpu", "--scores", str(our_scores)]
    )
    found = folder / "theirs.npz"
    command = [_SCRIPT, str(found), str(theirs), "--path", str(plain), *options, "--cpu", "--num-workers", "0"]
    fairseq.run("eval-lm", command)
    evaluation = compare_evaluations(tokens, np.load(our_scores), found)
    return replace(evaluation, faults=(*faults_of_parts(checkpoint.num_parts), *evaluation.faults))


def compare_evaluations(tokens: npt.NDArray[np.int64], ours: npt.NDArray[np.float32], theirs_npz: Path) -> Evaluation:
    """Put lmtools' scores of a stream beside what `score_with_fairseq.py` wrote."""
    with np.load(theirs_npz) as archive:
        their_tokens, theirs, printed = archive["tokens"], archive["scores"], float(archive["loss"])
    if not np.array_equal(tokens, their_tokens):
        return Evaluation(tokens, ours, theirs, None, printed, tuple(faults_of_counts(len(tokens), len(their_tokens))))
    faults = faults_of_sum(theirs, printed)
    return Evaluation(tokens, ours, theirs, compare_scores(ours, theirs), printed, tuple(faults))


def _cut_split(source: Path, folder: Path, num_sentences: int, *, vocab_size: int) -> npt.NDArray[np.int64]:
    """Write the first sentences of a split as a split of its own; returns their tokens."""
    dataset = IndexedDataset(source)
    count = min(num_sentences or len(dataset), len(dataset))
    if count == 0:
        raise DataError(f"{source}: the split holds no tokens, nothing to compare")
    folder.mkdir()
    write_dataset(folder / _SUBSET, (dataset[index].tolist() for index in range(count)), vocab_size=vocab_size)
    return np.asarray(dataset.tokens[: int(dataset.sizes[:count].sum())], dtype=np.int64)
