"""One file from a server that breaks the rules: what arrives is the right file, or nothing takes its name."""

from __future__ import annotations

import email.utils
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtools.errors import ConfigError, DownloadError, LmtoolsError
from lmtools.preprocess import transfer
from lmtools.preprocess.partfile import PartFile
from lmtools.preprocess.sources import RemoteFile
from lmtools.preprocess.transfer import RetryPolicy, fetch
from tests.support.http_server import (
    FileServer,
    chunked,
    claiming,
    correct,
    drop,
    etag,
    hang,
    ignoring_if_range,
    ignoring_range,
    serving,
    status,
    unavailable,
    until_closed,
    with_headers,
    with_validators,
)

CONTENT = bytes(range(256)) * 40
OTHER = CONTENT[::-1]
SHA256 = hashlib.sha256(CONTENT).hexdigest()
IMPATIENT = RetryPolicy(attempts=3, timeout_s=5.0, sleep=lambda _: None)


class Download:
    """Downloads `text` into a folder, and remembers what was reported and shown."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "text"
        self.part = PartFile(self.target)
        self.reports: list[str] = []
        self.shown: list[tuple[int | None, int]] = []

    def __call__(self, *urls: str, policy: RetryPolicy = IMPATIENT, sha256: str | None = SHA256, **known: int) -> str:
        file = RemoteFile("text", urls, sha256=sha256, num_bytes=known.get("num_bytes"))
        url = fetch(file, self.part, policy=policy, bar=self.bar, report=self.reports.append)
        self.part.finish()
        return url

    @contextmanager
    def bar(self, description: str, *, total: int | None) -> Iterator[Callable[[int], None]]:
        counts: list[int] = []
        try:
            yield counts.append
        finally:
            self.shown.append((total, sum(counts)))

    def left_over(self, num_bytes: int, *, of: bytes = CONTENT, url: str, **origin: object) -> None:
        """What an earlier run left when it was killed."""
        self.part.path.write_bytes(of[:num_bytes])
        self.target.with_name("text.part.json").write_text(json.dumps({"url": url, **origin}))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FileServer() as running:
        yield running


@pytest.fixture
def download(tmp_path: Path) -> Download:
    return Download(tmp_path)


def test_brings_the_file_and_leaves_nothing_else(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT)
    assert download(url) == url
    assert download.target.read_bytes() == CONTENT
    assert download.files() == ["text"]
    assert download.shown == [(len(CONTENT), len(CONTENT))]


def test_says_who_it_is_and_wants_the_bytes_as_they_are(server: FileServer, download: Download) -> None:
    download(server.serve("text", CONTENT))
    assert server.asked("Accept-Encoding") == ["identity"]
    assert "lmtools/" in str(server.asked("User-Agent"))  # some hosts refuse the names of Python's clients


@pytest.mark.parametrize("reset", [False, True])
def test_goes_on_where_the_connection_broke(server: FileServer, download: Download, reset: bool) -> None:
    download(server.serve("text", CONTENT, drop(1000, reset=reset), drop(2000), correct))
    assert download.target.read_bytes() == CONTENT
    starts = [int(str(asked).removeprefix("bytes=").removesuffix("-")) for asked in server.asked("Range")[1:]]
    # A reset may throw away what the client had not read yet.
    assert starts == [1000, 3000] if not reset else starts[0] <= 1000
    assert server.asked("If-Range") == [None, etag(CONTENT), etag(CONTENT)]
    assert download.shown[-1] == (len(CONTENT), len(CONTENT))


def test_a_later_run_goes_on_too(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT, drop(1000), status(404), correct)
    with pytest.raises(DownloadError):
        download(url)
    assert download.files() == ["text.part", "text.part.json"]
    download(url)
    assert server.asked("Range") == [None, "bytes=1000-", "bytes=1000-"]
    assert download.target.read_bytes() == CONTENT


@given(breaks=st.lists(st.integers(0, 4000), max_size=6), ranges=st.booleans(), known=st.booleans())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_series_of_breaks_ends_in_the_same_bytes(
    server: FileServer, tmp_path_factory: pytest.TempPathFactory, breaks: list[int], ranges: bool, known: bool
) -> None:
    download = Download(tmp_path_factory.mktemp("breaks"))
    then = correct if ranges else ignoring_range
    url = server.serve("text", CONTENT, *(drop(after, then) for after in breaks), then)
    download(url, policy=replace(IMPATIENT, attempts=7), sha256=SHA256 if known else None)
    assert download.target.read_bytes() == CONTENT
    assert download.files() == ["text"]


def test_a_server_that_ignores_range_is_started_over_never_appended_to(server: FileServer, download: Download) -> None:
    download(server.serve("text", CONTENT, drop(1000), ignoring_range), sha256=None)
    assert server.asked("Range") == [None, "bytes=1000-"]
    assert download.target.read_bytes() == CONTENT


def test_a_file_that_changed_between_attempts_is_started_over(server: FileServer, download: Download) -> None:
    download(server.serve("text", CONTENT, drop(1000, serving(OTHER)), correct), sha256=None)
    assert server.asked("If-Range") == [None, etag(OTHER)]
    assert download.target.read_bytes() == CONTENT


def test_a_change_is_noticed_on_a_server_that_ignores_the_condition_too(server: FileServer, download: Download) -> None:
    download(server.serve("text", CONTENT, drop(1000, serving(OTHER)), ignoring_if_range, correct), sha256=None)
    assert "has changed" in download.reports[-1]
    assert server.asked("Range") == [None, "bytes=1000-", None]
    assert download.target.read_bytes() == CONTENT


def test_a_change_is_noticed_by_the_size_alone(server: FileServer, download: Download) -> None:
    silent = with_validators(tag=None)
    url = server.serve("text", CONTENT, silent)
    download.left_over(1000, of=OTHER, url=url, total=len(CONTENT) + 1)
    download(url)
    assert "has changed" in download.reports[0]
    assert server.asked("Range") == ["bytes=1000-", None]
    assert download.target.read_bytes() == CONTENT


def test_two_versions_glued_together_are_noticed_and_fetched_again(server: FileServer, download: Download) -> None:
    silent = with_validators(tag=None)
    download(server.serve("text", CONTENT, drop(1000, serving(OTHER, silent)), silent))
    assert server.asked("Range") == [None, "bytes=1000-", None]
    assert "wrong content" in download.reports[-1]
    assert download.target.read_bytes() == CONTENT


def test_without_validator_and_hash_nothing_is_resumed(server: FileServer, download: Download) -> None:
    silent = with_validators(tag=None)
    download(server.serve("text", CONTENT, drop(1000, silent), silent), sha256=None)
    assert server.asked("Range") == [None, None]
    assert download.target.read_bytes() == CONTENT


def test_a_weak_etag_is_no_validator_but_a_date_is(server: FileServer, download: Download) -> None:
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    weak = with_validators(tag="weak", modified=date)
    download(server.serve("text", CONTENT, drop(1000, weak), weak), sha256=None)
    assert server.asked("If-Range") == [None, date]


def test_an_etag_that_no_header_may_carry_is_left_out(server: FileServer, download: Download) -> None:
    odd = with_headers(ETag='"café"')
    download(server.serve("text", CONTENT, drop(1000, odd), with_validators(tag=None)))
    assert server.asked("Range") == [None, "bytes=1000-"]
    assert server.asked("If-Range") == [None, None]
    assert download.target.read_bytes() == CONTENT


def test_a_part_of_another_address_is_not_gone_on_with(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT)
    download.left_over(1000, of=OTHER, url=server.url("elsewhere"), etag=etag(OTHER))
    download(url)
    assert server.asked("Range") == [None]
    assert download.target.read_bytes() == CONTENT


def test_the_mirror_that_a_part_came_from_is_asked_first(server: FileServer, download: Download) -> None:
    first, second = server.serve("first", CONTENT), server.serve("second", CONTENT)
    download.left_over(1000, url=second, etag=etag(CONTENT))
    assert download(first, second) == second
    assert server.asked("Range") == ["bytes=1000-"]


def test_a_dead_mirror_does_not_cost_the_part_of_another(server: FileServer, download: Download) -> None:
    first, second = server.serve("first", CONTENT, status(500)), server.serve("second", CONTENT, status(404))
    download.left_over(1000, url=first, etag=etag(CONTENT))
    with pytest.raises(DownloadError):
        download(first, second)
    assert download.part.num_bytes() == 1000


@pytest.mark.parametrize("broken", ["", "[1]", '{"url": 3}', '{"url": "x", "color": 1}', '{"url": "x", "etag": 5}'])
def test_an_unreadable_record_of_a_part_means_starting_over(
    server: FileServer, download: Download, broken: str
) -> None:
    url = server.serve("text", CONTENT)
    download.left_over(1000, of=OTHER, url=url)
    (download.target.parent / "text.part.json").write_text(broken)
    download(url)
    assert download.target.read_bytes() == CONTENT


def test_a_part_that_is_whole_already_needs_no_byte_more(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT)
    download.left_over(len(CONTENT), url=url, etag=etag(CONTENT))
    download(url, sha256=None)  # 416: there is nothing after the last byte
    assert server.asked("Range") == [f"bytes={len(CONTENT)}-"]
    assert download.target.read_bytes() == CONTENT


def test_a_part_of_the_known_size_and_hash_needs_no_request(server: FileServer, download: Download) -> None:
    download.left_over(len(CONTENT), url=server.url("text"))
    download(server.url("text"), num_bytes=len(CONTENT))
    assert server.requests == []


def test_a_part_longer_than_the_file_is_started_over(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT)
    download.left_over(len(CONTENT) + 5, of=CONTENT + b"12345", url=url, etag=etag(CONTENT))
    download(url, sha256=None)
    assert server.asked("Range") == [f"bytes={len(CONTENT) + 5}-", None]
    assert download.target.read_bytes() == CONTENT


def test_a_range_that_was_not_asked_for_is_not_appended(server: FileServer, download: Download) -> None:
    shifted = status(206, {"Content-Range": f"bytes 900-{len(CONTENT) - 1}/{len(CONTENT)}"}, CONTENT[900:])
    download(server.serve("text", CONTENT, drop(1000), shifted, correct))
    assert "another range" in download.reports[-1]
    assert download.target.read_bytes() == CONTENT


def test_a_part_that_nobody_asked_for_is_refused(server: FileServer, download: Download) -> None:
    part = status(206, {"Content-Range": f"bytes 900-{len(CONTENT) - 1}/{len(CONTENT)}"}, CONTENT[900:])
    with pytest.raises(DownloadError, match="although the whole of it was asked for"):
        download(server.serve("text", CONTENT, part))


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_passing_trouble_is_waited_for(server: FileServer, download: Download, code: int) -> None:
    delays: list[float] = []
    policy = replace(IMPATIENT, first_delay_s=8.0, sleep=delays.append)
    download(server.serve("text", CONTENT, status(code), status(code), correct), policy=policy)
    assert download.target.read_bytes() == CONTENT
    assert 4.0 <= delays[0] <= 8.0  # doubled each time, and shortened by up to half at random
    assert 8.0 <= delays[1] <= 16.0
    assert f"text: {code}" in download.reports[0]


def test_waits_as_long_as_the_server_asks(server: FileServer, download: Download) -> None:
    delays: list[float] = []
    in_90_s = email.utils.formatdate(time.time() + 90, usegmt=True)
    url = server.serve("text", CONTENT, unavailable("70"), unavailable(in_90_s), unavailable("soon"), correct)
    download(url, policy=replace(IMPATIENT, attempts=4, sleep=delays.append))
    assert delays[0] == 70.0
    assert 85.0 < delays[1] <= 90.0
    assert delays[2] <= 4.0


def test_a_server_that_asks_for_an_hour_is_left_for_the_next(server: FileServer, download: Download) -> None:
    first, second = server.serve("first", CONTENT, unavailable("3600")), server.serve("second", CONTENT)
    assert download(first, second) == second
    assert len(server.requests) == 2


def test_a_lasting_trouble_is_given_up(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT, status(503))
    with pytest.raises(DownloadError, match="503 Service Unavailable; 3 attempts"):
        download(url)
    assert len(server.requests) == 3
    assert download.files() == []


def test_a_connection_that_brings_much_starts_the_count_again(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT, *[drop(1000)] * 9, correct)
    download(url, policy=replace(IMPATIENT, attempts=2, fresh_num_bytes=1000))
    assert download.target.read_bytes() == CONTENT


def test_a_silent_connection_is_given_up_and_taken_up_again(server: FileServer, download: Download) -> None:
    release = threading.Event()
    url = server.serve("text", CONTENT, hang(1000, release=release), correct)
    download(url, policy=replace(IMPATIENT, timeout_s=0.2))
    release.set()
    assert "timed out" in download.reports[0]
    assert server.asked("Range") == [None, "bytes=1000-"]
    assert download.target.read_bytes() == CONTENT


def test_the_next_mirror_is_tried_when_one_fails(server: FileServer, download: Download) -> None:
    wrong, right = server.serve("wrong", OTHER), server.serve("right", CONTENT)
    gone = server.url("gone")
    assert download(gone, wrong, right) == right
    assert [line.split(": ", 1)[1] for line in download.reports] == [
        f"{gone}: 404 Not Found",
        f"{wrong}: wrong content: {len(OTHER):,} bytes with sha256 {hashlib.sha256(OTHER).hexdigest()}, "
        f"expected sha256 {SHA256}; removed",
    ]


def test_every_mirror_and_its_failure_is_in_the_error(server: FileServer, download: Download) -> None:
    gone, busy = server.url("gone"), server.serve("busy", CONTENT, status(500))
    with pytest.raises(DownloadError) as caught:
        download(gone, busy)
    assert str(caught.value) == (
        f"text: could not be downloaded from {gone} (404 Not Found) or {busy} (500 Internal Server Error; 3 attempts)"
    )


def test_right_size_but_wrong_hash_is_an_error_and_the_file_goes(server: FileServer, download: Download) -> None:
    url = server.serve("text", OTHER)
    with pytest.raises(DownloadError, match="wrong content"):
        download(url, num_bytes=len(CONTENT))
    assert len(server.requests) == 1
    assert download.files() == []


@pytest.mark.parametrize("claimed", [len(CONTENT) - 1, len(CONTENT) + 1, 10 * len(CONTENT)])
def test_a_size_other_than_the_published_one_is_refused_before_a_byte(
    server: FileServer, download: Download, claimed: int
) -> None:
    url = server.serve("text", CONTENT, claiming(claimed))
    with pytest.raises(DownloadError, match=f"has {claimed:,} bytes, expected {len(CONTENT):,}"):
        download(url, num_bytes=len(CONTENT))
    assert download.files() == []


def test_more_than_the_published_size_is_cut_off(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT + b"more", chunked)
    with pytest.raises(DownloadError, match="sends more than"):
        download(url, num_bytes=len(CONTENT))
    assert download.files() == []


def test_a_claim_that_is_too_long_is_no_complete_file(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT, claiming(len(CONTENT) + 1000))
    with pytest.raises(DownloadError, match="3 attempts"):
        download(url, sha256=None)
    assert "text" not in download.files()


def test_a_claim_that_is_too_short_is_caught_by_the_hash(server: FileServer, download: Download) -> None:
    with pytest.raises(DownloadError, match="wrong content: 1,000 bytes"):
        download(server.serve("text", CONTENT, claiming(1000)))
    assert download.files() == []


@pytest.mark.parametrize("answer", [chunked, until_closed])
def test_a_size_that_is_not_said_is_no_trouble_when_a_hash_is_known(
    server: FileServer, download: Download, answer: Callable[..., None]
) -> None:
    download(server.serve("text", CONTENT, answer))
    assert download.target.read_bytes() == CONTENT
    assert download.shown == [(None, len(CONTENT))]


def test_neither_size_nor_hash_is_refused(server: FileServer, download: Download) -> None:
    with pytest.raises(DownloadError, match="does not say how long the file is"):
        download(server.serve("text", CONTENT, until_closed), sha256=None)


def test_an_encoding_that_was_not_asked_for_is_refused(server: FileServer, download: Download) -> None:
    with pytest.raises(DownloadError, match="encoded as br"):
        download(server.serve("text", CONTENT, with_headers(Content_Encoding="br")))


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip"])
def test_a_gz_file_that_a_server_calls_an_encoding_arrives_as_it_is(
    server: FileServer, download: Download, encoding: str
) -> None:
    url = server.serve("text.gz", CONTENT, with_headers(Content_Encoding=encoding))
    file = RemoteFile("text.gz", (url,), sha256=SHA256)
    fetch(file, download.part, policy=IMPATIENT, bar=download.bar, report=download.reports.append)
    assert download.part.path.read_bytes() == CONTENT


def test_follows_redirects_but_not_in_circles(server: FileServer, download: Download) -> None:
    url = server.serve("text", CONTENT)
    download(server.serve("moved", b"", status(302, {"Location": url})))
    assert download.target.read_bytes() == CONTENT
    circle = server.serve("circle", b"", status(302, {"Location": server.url("circle")}))
    with pytest.raises(DownloadError, match="redirects"):
        download(circle)


def test_an_encrypted_address_may_not_lead_to_an_open_one() -> None:
    """There anybody on the way could put in another file, and not every file has a published hash."""
    answer = httpx.Response(200, request=httpx.Request("GET", "http://mirror/text"))
    with pytest.raises(transfer._MirrorError, match="leads to http://mirror/text, which is not encrypted"):
        transfer._refuse_bad_answer(answer, "https://mirror/text", RemoteFile("text", ()))


def test_nobody_listening_is_a_passing_trouble(download: Download) -> None:
    with FileServer() as server:
        url = server.url("text")
    with pytest.raises(DownloadError, match="3 attempts"):
        download(url)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "https://exa mple/x", "http://host:port/"])
def test_an_address_that_is_none_is_one_line(download: Download, url: str) -> None:
    with pytest.raises(DownloadError):
        download(url)


def test_a_full_disk_is_told_beforehand(
    server: FileServer, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def full(folder: Path, num_bytes: int, purpose: str) -> None:
        asked.append(num_bytes)
        raise LmtoolsError(f"{purpose}: no room")

    url = server.serve("text", CONTENT)
    download.left_over(1000, url=url, etag=etag(CONTENT))
    monkeypatch.setattr(transfer, "require_free_space", full)
    with pytest.raises(LmtoolsError, match="downloading text: no room"):
        download(url)
    assert asked == [len(CONTENT) - 1000]
    assert download.part.num_bytes() == 1000


@given(failures=st.integers(1, 2000))
def test_pauses_grow_but_have_an_end(failures: int) -> None:
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=60.0)
    longest = min(2.0 ** min(failures - 1, 10), 60.0)
    assert longest / 2 <= policy.delay_s(failures) <= longest


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080", r"cannot be used \(.*httpx\[socks\]`\); change or unset it$"),
        ("HTTP_PROXY", "nonsense://x", r"cannot be used \(Unknown scheme .*\); change or unset it$"),
        ("HTTP_PROXY", "http://x:port", r"cannot be used \(Invalid port: 'port'\); change or unset it$"),
        ("SSL_CERT_FILE", "/nowhere", r"no certificates can be read there \(.*No such file.*\); change or unset them$"),
        ("SSL_CERT_FILE", __file__, r"no certificates can be read there \(.*\); change or unset them$"),
    ],
)
def test_an_environment_that_cannot_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setitem(sys.modules, "socksio", None)
    transfer._tls.cache_clear()
    with pytest.raises(ConfigError, match=rf"{variable}.*{message}"):
        Download(tmp_path)("http://127.0.0.1:1/x")
    transfer._tls.cache_clear()
