"""Cutting at newlines and nowhere else, plain copies of any input, parts joined in order."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lmtools.errors import DataError, LmtoolsError
from lmtools.preprocess import lines as lines_module
from lmtools.preprocess.lines import (
    cut_at_newlines,
    cut_every_lines,
    join_parts,
    plain_file,
    read_lines,
    read_text_lines,
    scratch_folder,
    write_part,
)
from tests.support.processes import wait_until

# Line feeds, and everything else that some tool takes for the end of a line.
texts = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r", b"\r\n", "\u2028".encode(), "\u0085".encode(), b"\x0c"]))
many_lines = st.lists(st.sampled_from([b"\n", b"a\n", b"abcdef", b"\r"]), min_size=10, max_size=40)


def lines_of(content: bytes) -> list[bytes]:
    """The lines by definition: what `\\n` ends, and what is left."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]] + [last for last in [content.split(b"\n")[-1]] if last]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    path = tmp_path_factory.mktemp("lines") / "text"

    def write(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return write


# --- cutting ---------------------------------------------------------------------------------------------------------


@given(texts.map(b"".join), st.integers(1, 9))
def test_ranges_cover_the_file_in_whole_lines(file: Callable[[bytes], Path], content: bytes, range_bytes: int) -> None:
    ranges = cut_at_newlines(file(content), range_bytes)

    assert [line for text in ranges for line in read_lines(text)] == lines_of(content)
    assert all(text.num_bytes >= range_bytes for text in ranges[:-1])
    assert all(content[text.end - 1 : text.end] == b"\n" for text in ranges[:-1])


@given(st.one_of(texts, many_lines).map(b"".join), st.integers(1, 4))
def test_ranges_of_equally_many_lines(file: Callable[[bytes], Path], content: bytes, lines_per_range: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_READ_BYTES", 5)
        ranges, num_lines = cut_every_lines(file(content), lines_per_range)

    lines = [list(read_lines(text)) for text in ranges]
    assert [line for of_range in lines for line in of_range] == lines_of(content)
    assert num_lines == len(lines_of(content))
    assert all(len(of_range) == lines_per_range for of_range in lines[:-1])


def test_a_file_of_many_gigabytes_is_cut_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    gigabyte = 1 << 30
    with open(path, "wb") as stream:
        stream.truncate(64 * gigabyte)
        for n in range(1, 64):
            os.pwrite(stream.fileno(), b"\n", n * gigabyte + 5)
    begin = time.process_time()

    ranges = cut_at_newlines(path, gigabyte)

    assert [text.start for text in ranges] == [0, *(n * gigabyte + 6 for n in range(1, 64))]
    assert time.process_time() - begin < 1


def test_an_empty_file_has_no_ranges(file: Callable[[bytes], Path]) -> None:
    assert cut_at_newlines(file(b""), 10) == []
    assert cut_every_lines(file(b""), 10) == ([], 0)


@pytest.mark.parametrize("bad", [b"\xff", "\ud800".encode("utf-8", "surrogatepass"), b"\xe2\x82"])
def test_what_is_not_utf8_is_named_by_line_of_the_whole_file(file: Callable[[bytes], Path], bad: bytes) -> None:
    path = file(b"one\ntwo\nthree\nab" + bad + b"\n")
    text = cut_at_newlines(path, 4, source="wiki.gz")[-1]
    assert text.start > 0

    with pytest.raises(DataError, match=rf"^wiki\.gz:4: not UTF-8 \(byte 0x{bad[0]:02x} at byte 3 of the line\)"):
        list(read_text_lines(text))


# --- plain copies ----------------------------------------------------------------------------------------------------

COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_is_copied_and_the_copy_goes(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"text{suffix}"
    source.write_bytes(COMPRESS[suffix](b"one\ntwo\n"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    with plain_file(source, scratch) as plain:
        assert plain.parent == scratch
        assert plain.read_bytes() == b"one\ntwo\n"
    assert list(scratch.iterdir()) == []


def test_a_plain_file_is_itself(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_bytes(b"one\n")
    with plain_file(source, tmp_path) as plain:
        assert plain == source
    assert source.exists()


def test_a_pipe_is_copied(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"one\n",))
    writer.start()
    with plain_file(pipe, tmp_path) as plain:
        assert plain.read_bytes() == b"one\n"
    writer.join()


def test_a_signal_does_not_wait_for_the_rest_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ended, in_time = threading.Event(), []

    def end(*_: object) -> None:
        ended.set()
        raise SystemExit

    def write() -> None:
        with open(pipe, "wb", buffering=0) as stream:
            time.sleep(0.05)  # by now the other thread is reading
            # Comes in this thread, so that it does not interrupt the other's reading: as if it came when that is over.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            stream.write(b"one\n")
            in_time.append(ended.wait(20))

    before = signal.signal(signal.SIGUSR1, end)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(SystemExit), plain_file(pipe, tmp_path):
            pass
    finally:
        writer.join()
        signal.signal(signal.SIGUSR1, before)
    assert in_time == [True]


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing: no such file"), plain_file(tmp_path / "nothing", tmp_path):
        pass


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_scratch_folder_goes_however_the_block_ends(tmp_path: Path, error: type[BaseException] | None) -> None:
    def block() -> None:
        with scratch_folder(tmp_path / "output") as scratch:
            (scratch / "part").write_bytes(b"text")
            assert scratch.parent == tmp_path
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(error):
            block()
    assert list(tmp_path.iterdir()) == []


def test_the_scratch_folder_goes_though_a_task_elsewhere_still_writes_into_it(tmp_path: Path) -> None:
    ended: list[type[OSError]] = []

    def write_on(folder: Path) -> None:
        for number in itertools.count():
            try:
                with write_part(folder / str(number)) as stream:
                    stream.write(b"a part")
            except OSError as error:
                ended.append(type(error))
                return

    with scratch_folder(tmp_path / "output") as scratch:
        writers = [threading.Thread(target=write_on, args=(scratch,)) for _ in range(4)]
        for writer in writers:
            writer.start()
        wait_until((scratch / "9").exists)
    for writer in writers:
        writer.join()
    assert ended == [FileNotFoundError] * 4
    assert list(tmp_path.iterdir()) == []


def test_the_scratch_folder_goes_though_a_file_is_made_in_it_while_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir = os.rmdir
    made: list[str] = []

    def make_a_file_first(path: str, *, dir_fd: int | None = None) -> None:
        # As by a task that had found the folder before it was renamed, and makes its file after the files were listed.
        if len(made) < 3:
            made.append(f"late-{len(made)}")
            (Path(path) / made[-1]).write_bytes(b"a part")
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", make_a_file_first)
    with scratch_folder(tmp_path / "output") as scratch:
        (scratch / "part").write_bytes(b"text")
    assert made == ["late-0", "late-1", "late-2"]
    assert list(tmp_path.iterdir()) == []


def fail_in_a_part(part: Path) -> None:
    with write_part(part) as stream:
        stream.write(b"half of it")
        raise DataError("a line")


def test_a_part_is_complete_or_absent(tmp_path: Path) -> None:
    part = tmp_path / "0"
    with pytest.raises(DataError):
        fail_in_a_part(part)
    assert not part.exists()


def test_a_part_that_two_workers_write_is_whole_at_any_time(tmp_path: Path) -> None:
    part = tmp_path / "0"
    with write_part(part) as slow:  # of a worker that is taken for lost
        slow.write(b"all ")
        slow.flush()
        with write_part(part) as fast:
            fast.write(b"all of it")
        assert part.read_bytes() == b"all of it"
        slow.write(b"of it")
    assert part.read_bytes() == b"all of it"


def test_a_missing_output_folder_is_named(tmp_path: Path) -> None:
    expected = pytest.raises(LmtoolsError, match=r"the folder .*nowhere does not exist")
    with expected, scratch_folder(tmp_path / "nowhere" / "output"):
        pass


# --- parts -----------------------------------------------------------------------------------------------------------


def parts(folder: Path) -> Iterator[Path]:
    for n, content in enumerate([b"one\n", b"", b"two\n" * 100_000]):
        (folder / f"{n}").write_bytes(content)
        yield folder / f"{n}"


def test_parts_are_joined_into_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "joined", "wb") as stream:
        stream.write(b"zero\n")
        join_parts(parts(tmp_path), stream)
        stream.write(b"end\n")
    assert (tmp_path / "joined").read_bytes() == b"zero\none\n" + b"two\n" * 100_000 + b"end\n"
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]


def test_parts_are_joined_into_a_pipe(tmp_path: Path) -> None:
    with subprocess.Popen(["wc", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        join_parts(parts(tmp_path), cast(BinaryIO, process.stdin))
        process.stdin.close()
        assert int(process.stdout.read()) == 400_004


def test_parts_are_joined_into_a_stream_in_memory(tmp_path: Path) -> None:
    stream = io.BytesIO()
    join_parts(parts(tmp_path), stream)
    assert stream.getvalue() == b"one\n" + b"two\n" * 100_000
