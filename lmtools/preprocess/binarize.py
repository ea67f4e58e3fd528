"""Text to a folder of binarized splits, byte for byte as `fairseq-preprocess --only-source` writes it.

    text -> ranges of lines -> counts of words -> dict.txt                  (unless a dictionary is given)
    text -> ranges of lines -> parts of tokens -> SPLIT.bin and SPLIT.idx

Everything is made in a hidden folder inside the target and moved into place at the very end, under a lock: a run that
is killed leaves what was there before, and of two runs at once the later one wins as a whole. What reads or writes
text is done by workers (`encode.py`); this process only says what is to be done.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lmtools.artifacts import (
    FileRecord,
    Manifest,
    carries_original,
    is_unchanged,
    manifest_path,
    read_manifest,
    write_manifest,
)
from lmtools.data.indexed_writer import bin_path, idx_path, replace_dataset
from lmtools.errors import ConfigError
from lmtools.files import disk_errors, fsync_directory, fsync_file, is_device_or_pipe, made_folder
from lmtools.preprocess import encode
from lmtools.preprocess.encode import SplitCounts
from lmtools.preprocess.lines import ByteRange, Unchanged, cut_at_newlines, plain_file, scratch_folder
from lmtools.preprocess.workers import run_ordered, worker_pool

TOOL = "lmtools binarize"
DICTIONARY = "dict.txt"

_MIN_RANGE_BYTES = 1 << 20
_MAX_ENCODE_BYTES = 8 << 20  # a worker holds the tokens of one range
_MAX_COUNT_BYTES = 64 << 20  # a worker holds the different words of one range, which are soon the same

T = TypeVar("T")


@dataclass(frozen=True)
class DictionaryRules:
    """How a dictionary is built; see `Dictionary.from_counts`."""

    threshold: int = 0
    nwords: int = -1
    padding_factor: int = 8


@dataclass(frozen=True)
class BinarizeJob:
    """What is to be binarized into which folder.

    Attributes:
        splits: the text of each split, by the split's name.
        destdir: the folder that gets dict.txt and the splits.
        dictionary_source: the dict.txt to use or, with `rules`, the text whose words make one.
        rules: how to build the dictionary; None takes `dictionary_source` as it is.
    """

    splits: Mapping[str, str]
    destdir: Path
    dictionary_source: str
    rules: DictionaryRules | None

    def inputs_of(self, output: str) -> list[str]:
        """The files that an output is made from, each once."""
        return list(dict.fromkeys([self.splits.get(output, self.dictionary_source), self.dictionary_source]))

    def texts(self) -> list[str]:
        """The texts that are read: one twice if it makes the dictionary too."""
        return [*([self.dictionary_source] if self.rules is not None else []), *self.splits.values()]

    def options(self) -> dict[str, Any]:
        """What a manifest records beside the inputs."""
        return {"dictionary": "given"} if self.rules is None else {"dictionary": "built", **asdict(self.rules)}

    def documented(self) -> list[str]:
        """The outputs that get a manifest: every split, and the dictionary if it is built here."""
        return [*self.splits, *([DICTIONARY] if self.rules is not None else [])]


@dataclass(frozen=True)
class Binarized:
    """What a run made, or found made already.

    Attributes:
        num_types: size of the dictionary, special symbols and padding included.
        splits: counts by name of split.
    """

    num_types: int
    splits: Mapping[str, SplitCounts]


def name_splits(trainpref: str | None, validpref: str | None, testpref: str | None) -> dict[str, str]:
    """The texts by fairseq's names: `train`, then `valid`, `valid1` ... and `test`, `test1` ... of comma lists."""
    splits = {"train": trainpref} if trainpref else {}
    for name, texts in (("valid", validpref), ("test", testpref)):
        for number, text in enumerate(texts.split(",") if texts else []):
            splits[f"{name}{number or ''}"] = text
    return splits


def find_unchanged(job: BinarizeJob) -> Binarized | None:
    """What is in the folder already, if the same inputs and options made all of it."""
    outputs = job.documented()
    for output in outputs:
        if not is_unchanged(job.destdir / output, tool=TOOL, options=job.options(), inputs=job.inputs_of(output)):
            return None
    manifests = {
        output: manifest for output in outputs if (manifest := read_manifest(job.destdir / output)) is not None
    }
    if not all(carries_original(manifests[name], text) for name, text in job.splits.items()):
        return None
    counts = {output: dict(manifest.counts) for output, manifest in manifests.items()}
    num_types = {of_output.pop("num_types") for of_output in counts.values()}
    if len(num_types) != 1:
        return None
    return Binarized(num_types.pop(), {name: SplitCounts(**counts[name]) for name in job.splits})


def binarize(
    job: BinarizeJob,
    *,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Binarized:
    """Build or copy the dictionary, binarize every split, and write a manifest for each.

    Args:
        job: what to do.
        workers: how many tasks run at a time; the bytes written do not depend on it.
        executor: where they run, if not in processes of this call's own; it must see the same files.
        progress: called with the number of bytes of text of `job.texts()` that were just read.

    Raises:
        ConfigError: the folder is a file, or holds other splits of another dictionary.
        DataError: an input is missing, broken, not UTF-8 or changed meanwhile; a dictionary is refused, or has no
            words to be built from.
        LmtoolsError: the disk is full or may not be written. The folder is as it was, or absent.
    """
    _require_usable_folder(job)
    with disk_errors(job.destdir), made_folder(job.destdir), ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(job.destdir / "binarize"))
        plain = {text: stack.enter_context(plain_file(text, scratch)) for text in dict.fromkeys(job.texts())}
        unchanged = Unchanged(plain.items())
        made_from = {text: read_manifest(text) for text in plain}
        pool = executor or stack.enter_context(worker_pool(workers, preload=[encode.__name__]))
        own = pool if executor is None else stack.enter_context(worker_pool(1))
        shop = _Workshop(job, plain, scratch, workers, pool, own, progress)

        num_types = _make_dictionary(shop)
        _require_one_dictionary(job, scratch)
        counts = _encode_splits(shop, num_types)
        _write_manifests(shop, num_types, counts, made_from)
        unchanged.require()
        with _lock(job.destdir):
            _require_one_dictionary(job, scratch)
            _publish(job, scratch)
    return Binarized(num_types, counts)


@dataclass(frozen=True)
class _Workshop:
    """What the steps of one run share: the job, its texts as plain files, where parts go, and the workers.

    Tasks that use parts up are for `own`: they cannot run again, as a cluster may have them do.
    """

    job: BinarizeJob
    plain: Mapping[str, Path]
    scratch: Path
    workers: int
    pool: Executor
    own: Executor
    progress: Callable[[int], None]

    def cut(self, text: str, max_bytes: int) -> list[ByteRange]:
        """Ranges of a text that are few, but enough to keep every worker busy to the end."""
        share = self.plain[text].stat().st_size // (4 * self.workers)
        return cut_at_newlines(self.plain[text], min(max(share, _MIN_RANGE_BYTES), max_bytes), source=text)

    def run(self, tasks: Sequence[Callable[[], T]], *, once: bool = False) -> Iterator[T]:
        """Run tasks in the workers, or in those of this machine that run each `once`; their results in order."""
        executor = self.own if once else self.pool
        return run_ordered(partial(_call, self.job.destdir), tasks, workers=self.workers, executor=executor)


def _call(destdir: Path, task: Callable[[], T]) -> T:
    with disk_errors(destdir):
        return task()


def _require_usable_folder(job: BinarizeJob) -> None:
    if job.destdir.exists() and not job.destdir.is_dir():
        raise ConfigError(f"{job.destdir}: is a file, expected a folder; choose another --destdir")
    for name, text in job.splits.items():
        if Path(text).absolute() == (job.destdir / name).absolute():
            raise ConfigError(
                f"{text}: the manifest of the split {name} would take the place of this text's own; "
                "choose another --destdir"
            )


def _make_dictionary(shop: _Workshop) -> int:
    """Write dict.txt to the scratch folder; returns its number of types."""
    source, rules, dictionary = shop.job.dictionary_source, shop.job.rules, shop.scratch / DICTIONARY
    if rules is None:
        [num_types] = shop.run([partial(encode.copy_dictionary, source, dictionary)])
        return num_types
    ranges = shop.cut(source, _MAX_COUNT_BYTES)
    parts = [shop.scratch / f"counts.{number}" for number in range(len(ranges))]
    counted = shop.run([partial(encode.count_words, text, part) for text, part in zip(ranges, parts, strict=True)])
    for text, _ in zip(ranges, counted, strict=True):
        shop.progress(text.num_bytes)
    [num_types] = shop.run([partial(encode.build_dictionary, parts, dictionary, source, **asdict(rules))], once=True)
    return num_types


def _encode_splits(shop: _Workshop, num_types: int) -> dict[str, SplitCounts]:
    """Write every split's .bin and .idx to the scratch folder."""
    splits, dictionary = shop.job.splits, shop.scratch / DICTIONARY
    ranges = {name: shop.cut(text, _MAX_ENCODE_BYTES) for name, text in splits.items()}
    parts = {name: [shop.scratch / f"{name}.{number}" for number in range(len(ranges[name]))] for name in splits}
    pieces = [(name, *piece) for name in splits for piece in zip(ranges[name], parts[name], strict=True)]
    counts = dict.fromkeys(splits, SplitCounts())
    encoded = shop.run([partial(encode.encode, text, dictionary, num_types, part) for _, text, part in pieces])
    for (name, text, _), of_piece in zip(pieces, encoded, strict=True):
        counts[name] += of_piece
        shop.progress(text.num_bytes)
    assembling = [partial(encode.assemble, parts[name], shop.scratch / name, num_types) for name in splits]
    list(shop.run(assembling, once=True))
    return counts


def _write_manifests(
    shop: _Workshop, num_types: int, counts: Mapping[str, SplitCounts], made_from: Mapping[str, Manifest | None]
) -> None:
    """Write the manifest of every output beside it in the scratch folder; the text's own counts travel on."""
    job, scratch = shop.job, shop.scratch
    inputs = {
        name: [Path(text) for text in job.inputs_of(name) if not is_device_or_pipe(text)] for name in job.documented()
    }
    outputs = {name: [bin_path(scratch / name), idx_path(scratch / name), scratch / DICTIONARY] for name in job.splits}
    outputs[DICTIONARY] = [scratch / DICTIONARY]
    files = list(dict.fromkeys(path for paths in (*inputs.values(), *outputs.values()) for path in paths))
    records = dict(zip(files, shop.run([partial(FileRecord.of, path) for path in files]), strict=True))
    for name in job.documented():
        text = job.splits.get(name, job.dictionary_source)
        before = made_from[text]
        is_of_this_text = before is not None and records.get(Path(text)) in before.outputs  # else it was edited since
        manifest = Manifest(
            tool=TOOL,
            options=job.options(),
            inputs=[records[path] for path in inputs[name]],
            outputs=[records[path] for path in outputs[name]],
            counts={**(asdict(counts[name]) if name in counts else {}), "num_types": num_types},
            original=before.original if before is not None and is_of_this_text else None,
        )
        write_manifest(scratch / name, manifest)


def _require_one_dictionary(job: BinarizeJob, scratch: Path) -> None:
    """The splits that stay in the folder must have been made with the dictionary that comes.

    Raises:
        ConfigError: they were not.
    """
    there = job.destdir / DICTIONARY
    others = sorted(path.stem for path in job.destdir.glob("*.idx") if path.stem not in job.splits)
    if others and there.exists() and there.read_bytes() != (scratch / DICTIONARY).read_bytes():
        raise ConfigError(
            f"{there}: its splits ({', '.join(others)}) were made with another dictionary than that of "
            f"{job.dictionary_source}; choose another --destdir, or binarize all of them together"
        )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time change a folder; the lock goes with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP):  # some network file systems cannot
                raise
        yield
    finally:
        os.close(descriptor)


def _publish(job: BinarizeJob, scratch: Path) -> None:
    """Move everything into the folder; at no moment is there an index whose tokens or dictionary are not there."""
    fsync_file(scratch / DICTIONARY)
    for name in job.splits:
        idx_path(job.destdir / name).unlink(missing_ok=True)
    os.replace(scratch / DICTIONARY, job.destdir / DICTIONARY)
    for name in job.splits:
        replace_dataset(scratch / name, job.destdir / name)
    for name in job.documented():
        os.replace(manifest_path(scratch / name), manifest_path(job.destdir / name))
    fsync_directory(job.destdir)
