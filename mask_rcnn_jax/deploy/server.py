"""HTTP around `Service`, by the standard library: a thread for each of a limited number of clients.

All waiting for a client has an end: for a request, for the rest of it, and for taking the answer.
"""

import io
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from absl import logging

from mask_rcnn_jax.deploy.service import RETRY, Answer, Refused, Service, refusal

MAX_CONNECTIONS = 256
MAX_LINE = 1 << 16  # bytes of a request's first line; http.client limits the others alike
HEAD_SECONDS = 15.0  # for a request to come and its head to end
BODY_SECONDS = 60.0
SEND_SECONDS = 60.0
STOP_SECONDS = 25.0  # for requests in flight; Kubernetes waits 30 before it kills
_LINGER_SECONDS = 2.0
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingMixIn, TCPServer):
    """Serve a model over HTTP.

    The address is taken at once and answers from `start` to `stop`.

    Args:
        host: name or address of this machine on which to listen; 0.0.0.0 is every one.
        port: 0 picks a free one.

    Attributes:
        url: of the page.

    Raises OSError, naming the flag, if the address cannot be taken.
    """

    allow_reuse_address = True
    daemon_threads = True  # `stop` waits for them, but not forever
    request_queue_size = 128

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self.service: Service
        self._idle: dict[socket.socket, bool] = {}  # connection -> it is between two requests
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise OSError(f"--host {host}: {error}") from error
        self.address_family, address = found[0][0], found[0][4]
        super().__init__(address, _Handler, bind_and_activate=False)  # type: ignore[arg-type]
        try:
            self.server_bind()
        except OSError as error:
            self.server_close()
            hint = f"--host {host}, --port {port}: {error.strerror}; --port 0 picks a free port"
            raise OSError(hint) from error
        name = "localhost" if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        self.url = f"http://{name}:{self.server_address[1]}/"

    def start(self, service: Service) -> None:
        """Answer requests, in threads."""
        self.service = service
        self.server_activate()
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, finish those in flight, and close the service."""
        with self._changed:
            self._stopping = True
        self.shutdown()
        self.server_close()
        with self._changed:
            for connection, idle in self._idle.items():
                if idle:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
            if not self._changed.wait_for(lambda: not self._idle, STOP_SECONDS):
                logging.warning("%d requests are not finished", len(self._idle))
        self.service.close()

    def run(self, service: Service) -> None:
        """Serve until SIGTERM or Ctrl-C; a second one ends the process at once."""
        stop = threading.Event()

        def on_signal(number: int, frame: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            stop.set()

        before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.start(service)
            print(f"ready: {self.url}", flush=True)
            stop.wait()
            logging.info("stopping")
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            full = len(self._idle) >= MAX_CONNECTIONS
            if not full:
                self._idle[request] = False
        if full:
            _turn_away(request)
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._idle.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error unless it is that of a client who has gone."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logging.error("%s: %s", type(error).__name__, error)

    @contextmanager
    def idle(self, connection: socket.socket) -> Iterator[bool]:
        """Yield whether another request may be waited for; `stop` then ends the waiting."""
        with self._changed:
            self._idle[connection] = not self._stopping
            waits = not self._stopping
        try:
            yield waits
        finally:
            with self._changed:
                self._idle[connection] = False

    @property
    def stopping(self) -> bool:
        return self._stopping


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold back the body until the head is acknowledged
    server: Server

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
        except OSError:  # also TimeoutError: the client is too slow, or gone
            self.close_connection = True

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
            answer = _failure(HTTPStatus.INTERNAL_SERVER_ERROR, message)
        self._send(answer)

    def _answer(self) -> Answer:
        path, _, query = self.path.partition("?")
        encoded = self.headers.get("Transfer-Encoding") is not None
        lengths = self.headers.get_all("Content-Length", [])
        self._unread = encoded or lengths not in ([], ["0"])
        method = "GET" if self.command == "HEAD" else self.command
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        service = self.server.service
        service.check(method, path, kind)
        content = self._body(encoded, lengths) if method == "POST" else b""
        return service.answer(path, query, content)

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
        self._send(_failure(status, message or status.phrase))

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
        """Take what the client still sends for a moment: to close at once would reset the
        connection, and the client might never see the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        self._input.limit(_LINGER_SECONDS)
        while self.rfile.read1(MAX_LINE):
            pass

    def version_string(self) -> str:
        return "mask_rcnn_jax"

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class _TimedInput(io.RawIOBase):
    """What a connection receives until a time limit, however slowly it comes."""

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


def _failure(status: HTTPStatus, message: str) -> Answer:
    return refusal(Refused(status, message))


def _turn_away(connection: socket.socket) -> None:
    """Answer a client for whom there is no thread."""
    content = refusal(Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")).content
    lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in RETRY.items()]
    lines += [f"Content-Length: {len(content)}", "Connection: close", "", ""]
    with suppress(OSError):
        connection.setblocking(False)  # a new connection has room for so little
        connection.sendall("\r\n".join(lines).encode() + content)
