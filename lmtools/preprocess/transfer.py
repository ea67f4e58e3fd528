"""Bring one file from the first mirror that gives it, over connections that break.

Bytes go to `NAME.part`; `NAME.part.json` beside it says where they come from (URL, ETag, Last-Modified, size), so
that a later attempt or a later run goes on from there with `Range` and `If-Range` (RFC 9110, section 13.1.5). The
server answers one of

    206  the rest of the same file: append it, after checking that it begins where ours ends
    200  the whole file, because it changed or because ranges are not known here: start over
    416  there is nothing after our last byte: the part is whole, or is of no use

and what has arrived counts only when its size and sha256 are those that were expected. Then `NAME.part` becomes `NAME`.
"""

from __future__ import annotations

import email.utils
import random
import re
import ssl
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import httpx

from lmtools import __version__
from lmtools.errors import ConfigError, DownloadError
from lmtools.files import disk_errors, require_free_space, sha256_file
from lmtools.preprocess.partfile import Origin, PartFile
from lmtools.preprocess.sources import RemoteFile

_TEMPORARY_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_CONTENT_RANGE = re.compile(r"bytes (?:(?P<first>\d+)-\d+|\*)/(?P<total>\d+|\*)")


class ProgressBar(Protocol):
    """Opens a progress bar; its context gives a function that advances it (by a negative number when starting over)."""

    def __call__(self, description: str, *, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """Open a bar for `total` bytes, or for an unknown number of them."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long to insist on one mirror.

    Attributes:
        attempts: failures in a row before the next mirror is tried.
        first_delay_s: pause after the first failure; doubled after each further one, then shortened by up to half at
            random, so that many clients of a server that comes back do not come back together.
        max_delay_s: the longest pause; a server that asks for a longer one (Retry-After) is left for the next mirror.
        timeout_s: how long to wait for a connection, and for the next bytes on it.
        fresh_num_bytes: a connection that brought so many new bytes starts the count of failures again.
        sleep: waits for a number of seconds.
    """

    attempts: int = 5
    first_delay_s: float = 1.0
    max_delay_s: float = 120.0
    timeout_s: float = 30.0
    fresh_num_bytes: int = 1 << 20
    sleep: Callable[[float], None] = time.sleep

    def delay_s(self, failures: int) -> float:
        """The pause after `failures` failures in a row."""
        delay = min(self.first_delay_s * 2.0 ** min(failures - 1, 64), self.max_delay_s)
        return delay * random.uniform(0.5, 1.0)


def fetch(
    file: RemoteFile,
    part: PartFile,
    *,
    policy: RetryPolicy,
    bar: ProgressBar,
    report: Callable[[str], None],
) -> str:
    """Fill a part until it is the whole file, checked against what is known of it. The caller holds the file's lock.

    Args:
        file: what to fetch, from which mirrors, and how to recognise it.
        part: what has arrived so far; its folder exists.
        policy: how long to insist.
        bar: opens a progress bar.
        report: told, a line at a time, about failures that are not final.

    Returns:
        The URL that gave the file.

    Raises:
        ConfigError: the environment names a proxy or certificates that cannot be used.
        DownloadError: no mirror gave it. The part stays for the next time, unless its content was wrong.
        LmtoolsError: the disk is full or not writable.
    """
    failures: list[str] = []
    # Going on with the mirror that a part came from saves what is there already.
    started = part.origin().url
    with _client(policy) as client:
        for url in sorted(file.urls, key=lambda url: url != started):
            try:
                _fetch_from(url, client, part, file, policy, bar, report)
                return url
            except _MirrorError as failure:
                failures.append(f"{url} ({failure})")
                report(f"{file.name}: {url}: {failure}")
    raise DownloadError(f"{file.name}: could not be downloaded from " + " or ".join(failures))


def _client(policy: RetryPolicy) -> httpx.Client:
    tls = _tls()
    try:
        return httpx.Client(
            verify=tls,
            follow_redirects=True,
            timeout=policy.timeout_s,
            # Some hosts refuse the default names of Python's clients.
            headers={"User-Agent": f"lmtools/{__version__}", "Accept-Encoding": "identity"},
        )
    except (ValueError, httpx.InvalidURL, ImportError) as error:  # the last for a SOCKS proxy, which needs a package
        raise ConfigError(
            "the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names cannot be used "
            f"({str(error).rstrip('.')}); change or unset it"
        ) from error


@cache
def _tls() -> ssl.SSLContext:
    """Made once: reading all certificates takes longer than fetching a small file."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise ConfigError(
            f"SSL_CERT_FILE, SSL_CERT_DIR: no certificates can be read there ({error}); change or unset them"
        ) from error


class _MirrorError(Exception):
    """This mirror will not give the file."""


class _TransientError(Exception):
    """This attempt failed, the next one may not."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def _fetch_from(
    url: str,
    client: httpx.Client,
    part: PartFile,
    file: RemoteFile,
    policy: RetryPolicy,
    bar: ProgressBar,
    report: Callable[[str], None],
) -> None:
    """Fill the part from one mirror until it is whole and right."""
    failures = 0
    most_bytes = part.num_bytes()
    while True:
        try:
            whole_in_one = _attempt(url, client, part, file, bar)
            _check(part, file, whole_in_one)
            return
        except _TransientError as failure:
            if part.num_bytes() >= most_bytes + policy.fresh_num_bytes:
                failures = 0
            most_bytes = max(most_bytes, part.num_bytes())
            failures += 1
            if failures >= policy.attempts:
                raise _MirrorError(f"{failure}; {failures} attempts") from failure
            if failure.retry_after_s > policy.max_delay_s:
                raise _MirrorError(f"{failure}; asks to wait for {failure.retry_after_s:,.0f} s") from failure
            delay_s = max(policy.delay_s(failures), failure.retry_after_s)
            report(f"{file.name}: {failure}; next attempt in {delay_s:.1f} s")
            policy.sleep(delay_s)


def _attempt(url: str, client: httpx.Client, part: PartFile, file: RemoteFile, bar: ProgressBar) -> bool:
    """One request. Returns when the part should be whole: True if all of it came with this request."""
    num_bytes, origin = _usable_part(url, part, file)
    if file.num_bytes is not None and num_bytes == file.num_bytes:
        return False
    headers = {}
    if num_bytes:
        headers["Range"] = f"bytes={num_bytes}-"
        if origin.validator is not None:
            headers["If-Range"] = origin.validator
    try:
        with client.stream("GET", url, headers=headers) as response:
            if response.status_code == 416 and num_bytes:
                _accept_nothing_more(response, part, num_bytes)
                return False
            _refuse_bad_answer(response, url, file)
            if response.status_code == 206:
                _accept_rest(response, part, num_bytes, origin)
            else:
                num_bytes = 0
                part.begin(_origin_of(response, url))
            _receive(response, part, num_bytes, _total(response), file, bar)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
        raise _MirrorError(str(error)) from error
    except httpx.HTTPError as error:
        raise _TransientError(str(error) or type(error).__name__) from error
    return num_bytes == 0


def _usable_part(url: str, part: PartFile, file: RemoteFile) -> tuple[int, Origin]:
    """How many bytes of the part a request to `url` may go on from, and what is known of them.

    A part that is of no use is not removed yet: this mirror may be dead, and the part's own one alive next time.
    """
    num_bytes, origin = part.num_bytes(), part.origin()
    # Without a validator only a hash at the end can tell two versions of the file apart.
    knows_version = origin.validator is not None or file.sha256 is not None
    fits = file.num_bytes is None or num_bytes <= file.num_bytes
    if num_bytes and origin.url == url and knows_version and fits:
        return num_bytes, origin
    return 0, Origin()


def _accept_nothing_more(response: httpx.Response, part: PartFile, num_bytes: int) -> None:
    if _content_range(response)[1] != num_bytes:
        part.discard()
        raise _TransientError(f"the part of {num_bytes:,} bytes does not fit the file any more")


def _refuse_bad_answer(response: httpx.Response, url: str, file: RemoteFile) -> None:
    status = f"{response.status_code} {response.reason_phrase}".strip()
    if response.status_code in _TEMPORARY_STATUSES:
        raise _TransientError(status, _retry_after_s(response))
    if response.status_code not in (200, 206):
        raise _MirrorError(status)
    if url.startswith("https:") and response.url.scheme != "https":
        raise _MirrorError(f"leads to {response.url}, which is not encrypted")
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    # Some servers call a .gz file itself an encoding; its bytes are what we want either way.
    if encoding != "identity" and not (encoding in ("gzip", "x-gzip") and file.name.endswith(".gz")):
        raise _MirrorError(f"sends the file encoded as {encoding} although it was asked not to")
    total = _total(response)
    if file.num_bytes is not None and total is not None and total != file.num_bytes:
        raise _MirrorError(f"has {total:,} bytes, expected {file.num_bytes:,}")
    if file.num_bytes is None and file.sha256 is None and total is None:
        raise _MirrorError("does not say how long the file is, so that a broken connection would look like its end")


def _accept_rest(response: httpx.Response, part: PartFile, num_bytes: int, origin: Origin) -> None:
    first, total = _content_range(response)
    if not num_bytes:
        raise _MirrorError("sends a part of the file although the whole of it was asked for")
    if first != num_bytes:
        part.discard()
        raise _TransientError(f"asked for the bytes from {num_bytes:,} on, got another range")
    # Not every server that knows Range knows If-Range.
    now = _origin_of(response, origin.url)
    pairs = ((now.etag, origin.etag), (now.last_modified, origin.last_modified), (total, origin.total))
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        part.discard()
        raise _TransientError("the file has changed since its first bytes came; starting over")


def _receive(
    response: httpx.Response, part: PartFile, num_bytes: int, total: int | None, file: RemoteFile, bar: ProgressBar
) -> None:
    """Append the body to the part, which holds `num_bytes` now."""
    expected = file.num_bytes if file.num_bytes is not None else total
    if expected is not None:
        require_free_space(part.path.parent, expected - num_bytes, f"downloading {file.name}")
    with bar(file.name, total=expected) as advance, disk_errors(part.path), open(part.path, "ab") as stream:
        advance(num_bytes)
        # Raw: the bytes as they are stored there, whatever the headers call their encoding.
        for chunk in response.iter_raw():
            num_bytes += len(chunk)
            if expected is not None and num_bytes > expected:
                part.discard()
                raise _MirrorError(f"sends more than the {expected:,} bytes that were expected")
            stream.write(chunk)
            stream.flush()  # so that a kill loses nothing that arrived
            advance(len(chunk))
    if expected is not None and num_bytes < expected:
        raise _TransientError(f"ended after {num_bytes:,} of {expected:,} bytes")


def _check(part: PartFile, file: RemoteFile, whole_in_one: bool) -> None:
    """Compare the part with what is known of the file; a wrong one is removed.

    A part that came in several pieces may be two versions of the file glued together, so that one is fetched again.
    """
    if file.sha256 is None or (found := sha256_file(part.path)) == file.sha256:
        return
    num_bytes = part.num_bytes()
    part.discard()
    problem = f"wrong content: {num_bytes:,} bytes with sha256 {found}, expected sha256 {file.sha256}; removed"
    raise _MirrorError(problem) if whole_in_one else _TransientError(problem)


def _origin_of(response: httpx.Response, url: str) -> Origin:
    return Origin(url, response.headers.get("ETag"), response.headers.get("Last-Modified"), _total(response))


def _total(response: httpx.Response) -> int | None:
    """The size of the whole file by the server's account."""
    if response.status_code == 206:
        return _content_range(response)[1]
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdigit() else None


def _content_range(response: httpx.Response) -> tuple[int | None, int | None]:
    """First byte and size of the whole, as far as `Content-Range` says them."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        return None, None
    first, total = match["first"], match["total"]
    return (int(first) if first is not None else None), (int(total) if total != "*" else None)


def _retry_after_s(response: httpx.Response) -> float:
    """`Retry-After`, which is a number of seconds or a date; 0 when there is none."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
