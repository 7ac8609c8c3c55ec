"""HTTP on one connection: read requests with limits on size and time, and answer by `Service`."""

import io
import re
import socket
import time
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from absl import logging

from mask_rcnn_jax.serving.service import Answer, Refused, Service, refusal

MAX_LINE = 1 << 16  # bytes of a request's first line; http.client limits the others alike
HEAD_SECONDS = 15.0  # for a request to come and its head to end
BODY_SECONDS = 60.0
SEND_SECONDS = 60.0
_LINGER_SECONDS = 2.0
# No spaces in or after a name, no folded lines, no lone carriage returns: http.client takes some of
# them for the end of the head, and the body would be read as another request.
_HEADER_LINE = re.compile(rb"([\w!#$%&'*+.^`|~-]+:[^\r\n]*)?(\r?\n)?", re.ASCII)
_LOCAL_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]*)?", re.IGNORECASE)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Site(Protocol):
    """What a handler needs of its `Server`."""

    service: Service
    is_local: bool
    stopping: bool

    def idle(self, connection: socket.socket) -> AbstractContextManager[bool]: ...


class Handler(BaseHTTPRequestHandler):
    """Answer the requests of a client, one after the other, until either side ends it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold back the body until the head is acknowledged
    server: Site  # type: ignore[assignment]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._input = _TimedInput(self.connection)
        self.rfile = io.BufferedReader(self._input)

    def handle_one_request(self) -> None:
        self._unread = False  # whether a body is left in the connection
        self._input.limit(HEAD_SECONDS)
        try:
            with self.server.idle(self.connection) as waits:
                self.raw_requestline = self.rfile.readline(MAX_LINE + 1) if waits else b""
            if not self.raw_requestline:
                self.close_connection = True
            elif len(self.raw_requestline) > MAX_LINE:
                self.requestline = self.command = ""
                self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
            elif self.parse_request():  # otherwise it has called `send_error`
                self._respond()
        except Refused as refused:  # by the lines of the head
            self.send_error(refused.status, str(refused))
        except OSError:  # also TimeoutError: the client is too slow, or gone
            self.close_connection = True

    def parse_request(self) -> bool:
        reader = self.rfile
        self.rfile = _HeaderLines(reader)  # type: ignore[assignment]
        try:
            return super().parse_request()
        finally:
            self.rfile = reader

    def _respond(self) -> None:
        try:
            answer = self._answer()
        except Refused as refused:
            answer = refusal(refused)
        except OSError:
            raise
        except Exception as error:
            logging.error("%s: %s", type(error).__name__, error)
            message = "the server failed, its log says more"
            answer = refusal(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, message))
        self._send(answer)

    def _answer(self) -> Answer:
        path, _, query = self.path.partition("?")
        encoded = self.headers.get("Transfer-Encoding") is not None
        lengths = self.headers.get_all("Content-Length", [])
        self._unread = encoded or lengths not in ([], ["0"])
        method = "GET" if self.command == "HEAD" else self.command
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        hosts = self.headers.get_all("Host", [])
        if self.server.is_local and not all(map(_LOCAL_HOST.fullmatch, hosts)):
            message = f"the Host is {hosts[0]!r}, expected an address of this machine or localhost"
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, message)
        service = self.server.service
        service.check(method, path, kind)
        return service.answer(path, query, lambda: self._body(encoded, lengths))

    def _body(self, encoded: bool, lengths: list[str]) -> bytes:
        """Read the body; Refused if it is too long, or says no length."""
        if encoded or not lengths:
            message = "expected a Content-Length, and no Transfer-Encoding"
            raise Refused(HTTPStatus.LENGTH_REQUIRED, message)
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,15}", lengths[0]):
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
        length, most = int(lengths[0]), self.server.service.limits.content
        if length > most:
            message = f"{length:,} bytes, at most {most:,} are taken"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
        self._input.limit(BODY_SECONDS)
        try:
            content = self.rfile.read(length)
        except TimeoutError as error:
            message = f"the body took more than {BODY_SECONDS:.0f} seconds"
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, message) from error
        self._unread = False
        if len(content) < length:
            raise ConnectionError("the client has gone")
        return content

    def handle_expect_100(self) -> bool:
        return True  # `_body` tells the client to go on, once nothing speaks against it

    def send_error(self, code: int, message: str | None = None, _: str | None = None) -> None:
        """Answer a head that cannot be parsed."""
        status = HTTPStatus(code)
        self._unread, self.request_version = True, "HTTP/1.1"
        self._send(refusal(Refused(status, message or status.phrase)))

    def _send(self, answer: Answer) -> None:
        close = self._unread or self.close_connection or self.server.stopping
        self.connection.settimeout(SEND_SECONDS)
        self.send_response(answer.status)
        headers = {**_HEADERS, "Content-Type": answer.content_type, **answer.headers}
        headers["Content-Length"] = str(len(answer.content))
        if close:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)
        self.close_connection = close
        if self._unread:
            self._linger()

    def _linger(self) -> None:
        """Take the rest of the body for a moment.

        To close at once would reset the connection, and the client might never see the answer.
        """
        self.connection.shutdown(socket.SHUT_WR)
        self._input.limit(_LINGER_SECONDS)
        while self.rfile.read1(MAX_LINE):
            pass

    def version_string(self) -> str:
        return "mask_rcnn_jax"

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class _HeaderLines:
    """The lines of a head after its first; Refused for what is no header."""

    def __init__(self, reader: Any):
        self._reader = reader

    def readline(self, size: int) -> bytes:
        line = self._reader.readline(size)
        if not _HEADER_LINE.fullmatch(line):
            raise Refused(HTTPStatus.BAD_REQUEST, "a line of the head is not 'Name: value'")
        return line


class _TimedInput(io.RawIOBase):
    """A connection's input, with one time limit however slowly it comes."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def limit(self, seconds: float) -> None:
        """Let reading raise TimeoutError from so many seconds on."""
        self._end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
