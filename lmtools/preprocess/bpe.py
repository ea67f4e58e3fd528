"""GPT-2 BPE of text files and back, byte for byte as fairseq's `multiprocessing_bpe_encoder` does it.

A line is stripped of white space at its ends and becomes its ids with a space between them. An empty line is dropped
unless it is to be kept; of several inputs, a line is dropped from all when it is empty in one. The encoding itself is
`bpe_encoder.py`'s; this module says what is read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lmtools.artifacts import carries_original
from lmtools.errors import DataError
from lmtools.files import disk_errors
from lmtools.preprocess.gpt2_vocabulary import VocabularyFiles, check_vocabulary, read_vocabulary
from lmtools.preprocess.lines import read_lines, read_text_lines, write_part
from lmtools.preprocess.transform import Piece, manifests_if_unchanged, transform, write_manifests

if TYPE_CHECKING:
    from lmtools.preprocess.bpe_encoder import Encoder

_ENCODE = "lmtools bpe-encode"
_DECODE = "lmtools bpe-decode"
_PIECE_BYTES = 2 << 20
_WRITE_BYTES = 128 << 10  # with Python's 8 KiB, writing takes twice as long
_DECODED_TO_THEMSELVES = (b"<unk>", b"<mask>")  # words of fairseq's dictionary that its decoder lets stand


@dataclass(frozen=True)
class BpeCounts:
    """What one file of ids holds.

    Attributes:
        lines: its lines.
        tokens: its ids.
        dropped_lines: lines of the text that are left out, being empty in one of the inputs.
        lost_lines: those of them that are not empty in this one.
    """

    lines: int = 0
    tokens: int = 0
    dropped_lines: int = 0
    lost_lines: int = 0

    def __add__(self, other: BpeCounts) -> BpeCounts:
        return BpeCounts(
            self.lines + other.lines,
            self.tokens + other.tokens,
            self.dropped_lines + other.dropped_lines,
            self.lost_lines + other.lost_lines,
        )

    @property
    def tokens_with_eos(self) -> int:
        """Ids, and an end of sentence for each line: what a language model of the file predicts."""
        return self.tokens + self.lines


def bpe_encode(
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    vocabulary: VocabularyFiles,
    keep_empty: bool = False,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[BpeCounts]:
    """Encode text files, and write a manifest beside each output.

    Args:
        inputs: names of plain or compressed files, or `-`; line n of each is encoded or dropped together.
        outputs: where the ids of each go, or `-`.
        vocabulary: the BPE files.
        keep_empty: write an empty line for an empty line.
        workers: how many tasks run at a time; the outputs do not depend on it.
        executor: where they run, if not in processes of this call's own; it must see the same files.
        progress: called with the number of bytes of text that were just encoded.

    Returns:
        The counts of each output.

    Raises:
        DataError: an input is missing, broken or not UTF-8; the inputs differ in their number of lines; the vocabulary
            is broken.
        LmtoolsError: the disk is full or may not be written. The outputs are as they were.
    """
    if not vocabulary.is_gpt2:
        _check(vocabulary)
    done = transform(
        partial(_encode_piece, vocabulary, keep_empty),
        inputs,
        outputs,
        piece_bytes=_PIECE_BYTES,
        workers=workers,
        executor=executor,
        preload=[__name__, "lmtools.preprocess.bpe_encoder"],
        progress=progress,
    )
    counts = [sum((of_piece[n] for of_piece in done.results), BpeCounts()) for n in range(len(outputs))]
    write_manifests(
        outputs,
        done,
        tool=_ENCODE,
        options=_encode_options(vocabulary, keep_empty),
        counts=[asdict(of_output) for of_output in counts],
        # Ids of a part of a text are not those of what was counted: a perplexity per original token would be too low.
        originals=[
            None if of_output.lost_lines else original
            for of_output, original in zip(counts, done.originals, strict=True)
        ],
    )
    return counts


def find_encoded(
    inputs: Sequence[str], outputs: Sequence[str], *, vocabulary: VocabularyFiles, keep_empty: bool = False
) -> list[BpeCounts] | None:
    """The counts of the outputs, if the same inputs, vocabulary and option made what is there; else None."""
    options = _encode_options(vocabulary, keep_empty)
    manifests = manifests_if_unchanged(outputs, tool=_ENCODE, options=options, inputs=inputs)
    if manifests is None:
        return None
    counts = [BpeCounts(**manifest.counts) for manifest in manifests]
    found = zip(inputs, manifests, counts, strict=True)
    return counts if all(of.lost_lines or carries_original(manifest, name) for name, manifest, of in found) else None


def _encode_options(vocabulary: VocabularyFiles, keep_empty: bool) -> dict[str, Any]:
    return {"keep_empty": keep_empty, **_record(vocabulary)}


def _record(vocabulary: VocabularyFiles) -> dict[str, str]:
    return {"encoder_json": vocabulary.encoder_json_sha256, "vocab_bpe": vocabulary.vocab_bpe_sha256}


def _check(files: VocabularyFiles) -> None:
    from lmtools.preprocess.bpe_reference import check_rebuilds

    vocabulary = read_vocabulary(files)
    check_vocabulary(vocabulary, files)
    check_rebuilds(vocabulary, files)


@functools.lru_cache(maxsize=1)  # one in a worker, for all its pieces
def _encoder(files: VocabularyFiles) -> Encoder:
    from lmtools.preprocess.bpe_encoder import Encoder

    return Encoder(read_vocabulary(files))


def _encode_piece(vocabulary: VocabularyFiles, keep_empty: bool, piece: Piece) -> list[BpeCounts]:
    """Encode the lines of a piece into its parts; returns the counts of each part."""
    encode = _encoder(vocabulary).encode_line
    num_lines = num_dropped = 0
    num_tokens, num_lost = [0] * len(piece.parts), [0] * len(piece.parts)
    with disk_errors(piece.output), ExitStack() as stack:
        parts = [stack.enter_context(write_part(part, buffering=_WRITE_BYTES)) for part in piece.parts]
        for lines in zip(*map(read_text_lines, piece.inputs), strict=True):
            texts = [line.strip() for line in lines]
            if not keep_empty and not all(texts):
                num_dropped += 1
                num_lost = [lost + (text != "") for lost, text in zip(num_lost, texts, strict=True)]
                continue
            num_lines += 1
            for n, text in enumerate(texts):
                ids = encode(text)
                parts[n].write(ids + b"\n")
                num_tokens[n] += ids.count(b" ") + (ids != b"")
    return [BpeCounts(num_lines, tokens, num_dropped, lost) for tokens, lost in zip(num_tokens, num_lost, strict=True)]


def bpe_decode(
    source: str,
    output: str,
    *,
    vocabulary: VocabularyFiles,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> BpeCounts:
    """Decode a file of ids, line by line: the inverse of `bpe_encode`; see there for the arguments.

    Bytes that are no UTF-8 (of a character whose tokens are not all there) become U+FFFD, as in fairseq.

    Returns:
        The counts of the ids.

    Raises:
        DataError: the input is missing or broken, or has something that is no id; the vocabulary is broken.
        LmtoolsError: the disk is full or may not be written. The output is as it was.
    """
    done = transform(
        partial(_decode_piece, vocabulary),
        [source],
        [output],
        piece_bytes=_PIECE_BYTES,
        workers=workers,
        executor=executor,
        preload=[__name__],
        progress=progress,
    )
    counts = sum(done.results, BpeCounts())
    write_manifests(
        [output],
        done,
        tool=_DECODE,
        options=_record(vocabulary),
        counts=[asdict(counts)],
        originals=done.originals,
    )
    return counts


def find_decoded(source: str, output: str, *, vocabulary: VocabularyFiles) -> BpeCounts | None:
    """The counts of the ids, if the same ids and vocabulary made what is there; else None."""
    manifests = manifests_if_unchanged([output], tool=_DECODE, options=_record(vocabulary), inputs=[source])
    return None if manifests is None else BpeCounts(**manifests[0].counts)


@functools.lru_cache(maxsize=1)
def _decoder(files: VocabularyFiles) -> dict[bytes, bytes]:
    """The bytes of every word that a file of ids may have."""
    token_of_id = {b"%d" % id_: token for token, id_ in read_vocabulary(files).ids.items()}
    return {**token_of_id, **{word: word for word in _DECODED_TO_THEMSELVES}}


def _decode_piece(vocabulary: VocabularyFiles, piece: Piece) -> BpeCounts:
    """Decode the lines of a piece into its part; returns the counts of the ids."""
    [source], [part] = piece.inputs, piece.parts
    bytes_of = _decoder(vocabulary).__getitem__
    num_lines = num_tokens = 0
    with disk_errors(piece.output), write_part(part, buffering=_WRITE_BYTES) as stream:
        for line in read_lines(source):
            ids = line.split()
            try:
                text = b"".join(map(bytes_of, ids))
            except KeyError as error:
                raise DataError(
                    f"{source.source}:{source.first_line_number() + num_lines}: found "
                    f"{error.args[0].decode(errors='replace')[:40]!r}, expected ids of {vocabulary.encoder_json.name}"
                ) from error
            stream.write(text.decode("utf-8", "replace").encode("utf-8") + b"\n")
            num_lines += 1
            num_tokens += len(ids)
    return BpeCounts(num_lines, num_tokens)
