"""Each stage twice, by lmtools' program and by fairseq's on the same input, and what differs.

A stage's input is what lmtools made in the stage before, so that a difference in one does not show in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lmtools.crosscheck.compare import Difference, first_difference
from lmtools.crosscheck.known_faults import faults_of_text
from lmtools.crosscheck.programs import Fairseq, run_lmtools
from lmtools.errors import DataError
from lmtools.files import open_binary
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary


@dataclass(frozen=True)
class FileStage:
    """A stage whose outputs are files.

    Attributes:
        name: of the stage.
        num_bytes: what lmtools wrote.
        file: the first file that differs; empty if all are equal.
        difference: where it does.
        faults: fairseq's known faults that the input brings out.
    """

    name: str
    num_bytes: int
    file: str
    difference: Difference | None
    faults: tuple[str, ...]

    @property
    def explained(self) -> bool:
        """Whether the outputs are equal, or a known fault of fairseq's makes them differ."""
        return self.difference is None or bool(self.faults)


def text_stages(raw: str, dictionary: Path, fairseq: Fairseq, folder: Path, *, num_lines: int) -> Iterator[FileStage]:
    """Detokenise, encode and binarize the first lines of a raw text.

    Args:
        raw: the text; may be compressed.
        dictionary: the dict.txt to binarize with.
        fairseq: where fairseq is.
        folder: an empty folder for everything.
        num_lines: how many lines; 0 is all.

    Raises:
        DataError: the text is missing, broken or empty.
        LmtoolsError: a program failed.
    """
    text, detok, bpe = folder / "text.raw", folder / "text.detok", folder / "text.bpe"
    with open_binary(raw) as stream:
        text.write_bytes(b"".join(islice(stream, num_lines or None)))
    if text.stat().st_size == 0:
        raise DataError(f"{raw}: is empty, nothing to compare")

    run_lmtools(["detok", str(text), str(detok)])
    theirs = folder / "fairseq.detok"
    fairseq.run("detok", ["-m", "fairseq.examples.megatron_11b.detok", str(text)], stdout=theirs)
    faults = faults_of_text(text, sacremoses=fairseq.versions.get("sacremoses"))
    yield _compared("detok", [(detok, theirs)], faults)

    vocabulary = find_vocabulary(None, None)
    theirs = folder / "fairseq.bpe"
    run_lmtools(["bpe-encode", "--inputs", str(detok), "--outputs", str(bpe)])
    files = ["--encoder-json", str(vocabulary.encoder_json), "--vocab-bpe", str(vocabulary.vocab_bpe)]
    files += ["--inputs", str(detok), "--outputs", str(theirs), "--workers", "1"]
    fairseq.run("BPE encoder", ["-m", "fairseq.examples.roberta.multiprocessing_bpe_encoder", *files])
    yield _compared("bpe-encode", [(bpe, theirs)], faults_of_text(detok))

    options = ["--only-source", "--testpref", str(bpe), "--srcdict", str(dictionary), "--destdir"]
    run_lmtools(["binarize", *options, str(folder / "ours")])
    fairseq.run("preprocess", ["-m", "fairseq_cli.preprocess", *options, str(folder / "theirs")])
    names = ("test.bin", "test.idx")
    yield _compared("binarize", [(folder / "ours" / name, folder / "theirs" / name) for name in names], [])


def _compared(name: str, pairs: Sequence[tuple[Path, Path]], faults: Sequence[str]) -> FileStage:
    num_bytes = sum(ours.stat().st_size for ours, _ in pairs)
    for ours, theirs in pairs:
        difference = first_difference(ours, theirs)
        if difference is not None:
            return FileStage(name, num_bytes, ours.name, difference, tuple(faults))
    return FileStage(name, num_bytes, "", None, ())
