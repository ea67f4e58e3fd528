"""A real HTTP server on a free local port that keeps to the standard, or breaks it on request.

    with FileServer() as server:
        url = server.serve("text.zip", content, drop(after=1000), unavailable(), correct)

answers the first request for `/text.zip` by hanging up after 1,000 bytes, the second with a 503, and all others as
RFC 9110 says: `Range`, `If-Range` and 416 included. `server.requests` has what was asked.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

Answer = Callable[["_Handler", bytes], None]


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'  # noqa: S324


def correct(
    handler: _Handler,
    content: bytes,
    *,
    tag: str | None = "strong",
    modified: str | None = None,
    heeds_if_range: bool = True,
) -> None:
    """What a good server answers."""
    headers = {"Accept-Ranges": "bytes"}
    if tag is not None:
        headers["ETag"] = etag(content) if tag == "strong" else "W/" + etag(content)
    if modified is not None:
        headers["Last-Modified"] = modified
    start = 0
    wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    condition = handler.headers.get("If-Range") if heeds_if_range else None
    if wanted and condition in (None, headers.get("ETag"), modified):
        start = int(wanted[1])
        if start >= len(content):
            handler.reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    handler.reply(206 if "Content-Range" in headers else 200, content[start:], headers)


def with_validators(*, tag: str | None, modified: str | None = None) -> Answer:
    """A good answer with an ETag (`strong`, `weak` or None) and a Last-Modified of your choice."""
    return lambda handler, content: correct(handler, content, tag=tag, modified=modified)


def ignoring_if_range(handler: _Handler, content: bytes) -> None:
    """The range that was asked for, whatever the condition."""
    correct(handler, content, heeds_if_range=False)


def ignoring_range(handler: _Handler, content: bytes) -> None:
    """The whole file, whatever was asked."""
    handler.reply(200, content, {"ETag": etag(content)})


def drop(after: int, then: Answer = correct, *, reset: bool = False) -> Answer:
    """Begin the answer `then`, and hang up (or reset the connection) after so many bytes of its body."""

    def answer(handler: _Handler, content: bytes) -> None:
        handler.body_limit, handler.reset = after, reset
        then(handler, content)

    return answer


def hang(after: int, *, release: threading.Event) -> Answer:
    """Begin a good answer and say nothing more after so many bytes of its body, until the event is set."""

    def answer(handler: _Handler, content: bytes) -> None:
        handler.body_limit, handler.release = after, release
        correct(handler, content)

    return answer


def status(code: int, headers: dict[str, str] | None = None, body: bytes = b"no") -> Answer:
    """Nothing but a status."""
    return lambda handler, content: handler.reply(code, body, headers or {})


def unavailable(retry_after: str | None = None) -> Answer:
    return status(503, {} if retry_after is None else {"Retry-After": retry_after})


def claiming(num_bytes: int) -> Answer:
    """A Content-Length that is not true."""
    return lambda handler, content: handler.reply(200, content, {"Content-Length": str(num_bytes)})


def with_headers(**headers: str) -> Answer:
    """The whole file with headers of your choice, `Content_Encoding` for `Content-Encoding`."""
    return lambda handler, content: handler.reply(
        200, content, {name.replace("_", "-"): value for name, value in headers.items()}
    )


def chunked(handler: _Handler, content: bytes) -> None:
    """The whole file in chunks, its size not said beforehand."""
    handler.reply(200, b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content), {"Transfer-Encoding": "chunked"})


def until_closed(handler: _Handler, content: bytes) -> None:
    """The whole file, its end marked by nothing but the end of the connection."""
    handler.reply(200, content, {}, length=False)


def serving(other: bytes, then: Answer = correct) -> Answer:
    """Another file in the place of this one."""
    return lambda handler, content: then(handler, other)


@dataclass
class Request:
    """One request that came in."""

    path: str
    headers: dict[str, str]


@dataclass
class _File:
    content: bytes
    answers: list[Answer]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_answer(self) -> Answer:
        """Each answer once, the last one for ever."""
        with self.lock:
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class FileServer:
    """Serves files from memory until its `with` block ends."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.files: dict[str, _File] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that hung up
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def serve(self, path: str, content: bytes, *answers: Answer) -> str:
        """Make a file available; returns its URL. Each answer is given once, in order, and the last one again."""
        self.files["/" + path] = _File(content, list(answers) or [correct])
        return self.url(path)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{path}"

    def asked(self, header: str) -> list[str | None]:
        """What each request said in a header, in order."""
        return [request.headers.get(header) for request in self.requests]

    def __enter__(self) -> FileServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: FileServer
    protocol_version = "HTTP/1.1"
    body_limit: int | None = None
    reset = False
    release: threading.Event | None = None

    def do_GET(self) -> None:
        self.owner.requests.append(Request(self.path, dict(self.headers.items())))
        file = self.owner.files.get(self.path)
        if file is None:
            self.reply(404, b"no such file", {})
        else:
            file.next_answer()(self, file.content)

    def reply(self, code: int, body: bytes, headers: dict[str, str], *, length: bool = True) -> None:
        self.send_response(code)
        if length and not headers.keys() & {"Content-Length", "Transfer-Encoding"}:
            self.send_header("Content-Length", str(len(body)))
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: self.body_limit])
        self.wfile.flush()
        if self.release is not None:
            self.release.wait(10)
        if self.reset:  # an abrupt end: the kernel sends RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass
