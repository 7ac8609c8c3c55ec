"""HTTP on one connection: read requests with limits on size and time, and answer by `Service`."""

import io
import re
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from absl import logging

from mask_rcnn_jax.serving.answers import Answer, Refused, refusal
from mask_rcnn_jax.serving.clients import Clients
from mask_rcnn_jax.serving.service import RETRY, Service

MAX_LINE = 1 << 16  # bytes of a request's first line; http.client limits the others alike
HEAD_SECONDS = 15.0  # for a request to come and its head to end
BODY_SECONDS = 60.0
BODY_RATE = 16_000.0  # bytes a second, at least
SEND_SECONDS = 60.0
LINGER_SECONDS = 30.0
# No spaces in or after a name, no folded lines, no lone carriage returns: http.client takes some of
# them for the end of the head, and the body would be read as another request. And no other control
# characters, but for a tab in a value.
_FIRST_LINE = re.compile(rb"[^\x00-\x1f\x7f]*\r?\n")
_HEADER_LINE = re.compile(rb"([\w!#$%&'*+.^`|~-]+:[^\x00-\x08\x0a-\x1f\x7f]*)?\r?\n", re.ASCII)
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
    clients: Clients


class Handler(BaseHTTPRequestHandler):
    """Answer the requests of a client, one after the other, until either side ends it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold back the body until the head is acknowledged
    server: Site  # type: ignore[assignment]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._client = self.server.clients.of(self.connection)
        self.rfile = io.BufferedReader(self._client)
        self.wfile = self._output = io.BytesIO()  # so that an answer is sent in one piece

    def handle_one_request(self) -> None:
        self._unread = False  # whether a body is left in the connection
        self.requestline = self.command = ""
        try:
            self.server.clients.wait(self._client, HEAD_SECONDS)
            self.raw_requestline = self.rfile.readline(MAX_LINE + 1)
            if len(self.raw_requestline) > MAX_LINE:
                raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, "the first line is too long")
            if not self.raw_requestline.endswith(b"\n"):
                raise ConnectionError("the client has gone")
            if not _FIRST_LINE.fullmatch(self.raw_requestline):
                raise Refused(HTTPStatus.BAD_REQUEST, "control characters in the first line")
            if self.parse_request():
                self.server.clients.work(self._client)
                self._respond()
        except Refused as refused:  # by the lines of the head
            self._unread, self.request_version = True, "HTTP/1.1"
            self._send(refusal(refused))
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
        finally:
            self.server.clients.release(self._client)
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
        if len(hosts) != 1 and (hosts or self.request_version not in ("HTTP/0.9", "HTTP/1.0")):
            raise Refused(HTTPStatus.BAD_REQUEST, f"{len(hosts)} lines with a Host, expected one")
        if self._client.is_spare and path != "/health":
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", RETRY)
        service = self.server.service
        service.check(method, path, kind)
        return service.answer(path, query, self)

    def read_body(self) -> bytes:
        """Read the body; Refused if it is too long or too slow, or says no length."""
        lengths = self.headers.get_all("Content-Length", [])
        if self.headers.get("Transfer-Encoding") is not None or not lengths:
            message = "expected a Content-Length, and no Transfer-Encoding"
            raise Refused(HTTPStatus.LENGTH_REQUIRED, message)
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,15}", lengths[0]):
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
        length, most = int(lengths[0]), self.server.service.limits.content
        if length > most:
            message = f"{length:,} bytes, at most {most:,} are taken"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        if not self.server.clients.hold(self._client, length):
            message = "too many bytes are being received, try again"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message, RETRY)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
            self._flush()
        rate = max(BODY_RATE, length / BODY_SECONDS)
        self._client.wait(BODY_SECONDS, rate)
        try:
            content = self.rfile.read(length)
        except TimeoutError as error:
            message = f"the body comes at less than {rate / 1000:.0f} kB a second"
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, message) from error
        if len(content) < length:
            raise ConnectionError("the client has gone")
        self.server.clients.work(self._client)
        self._unread = False
        return content

    def release_body(self) -> None:
        """Tell that nothing keeps the bytes of the body any more."""
        self.server.clients.release(self._client)

    def has_gone(self) -> bool:
        """Whether no one waits for the answer. Any thread may ask."""
        return self._client.has_gone()

    def handle_expect_100(self) -> bool:
        return True  # `read_body` tells the client to go on, once nothing speaks against it

    def send_error(self, code: int, message: str | None = None, _: str | None = None) -> None:
        """Refuse a head that cannot be parsed."""
        raise Refused(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _send(self, answer: Answer) -> None:
        close = self._unread or self.close_connection or self._client.is_spare
        close = close or self.server.clients.stopping
        self._client.wait(SEND_SECONDS)
        self.connection.settimeout(SEND_SECONDS)
        self.send_response(answer.status)
        headers = {**_HEADERS, "Content-Type": answer.content_type, **answer.headers}
        headers["Content-Length"] = str(len(answer.content))
        if close:
            headers["Connection"] = "close"
        elif self.request_version == "HTTP/1.0":  # which closes unless both sides say otherwise
            headers["Connection"] = "keep-alive"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)
        self._flush()
        self.close_connection = close
        if self._unread:
            self._linger()

    def _flush(self) -> None:
        self.connection.sendall(self._output.getvalue())
        self._output.seek(0)
        self._output.truncate()

    def _linger(self) -> None:
        """Take the rest of the body for a while, unless others need the connection.

        To close at once would reset the connection, and the client might never see the answer.
        """
        self.connection.shutdown(socket.SHUT_WR)
        self.server.clients.wait(self._client, LINGER_SECONDS)
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
        if not line.endswith(b"\n") and len(line) < size:
            raise ConnectionError("the client has gone")
        if len(line) < size and not _HEADER_LINE.fullmatch(line):
            raise Refused(HTTPStatus.BAD_REQUEST, "a line of the head is not 'Name: value'")
        return line
