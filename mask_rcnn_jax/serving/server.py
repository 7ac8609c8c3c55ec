"""Listen, and give clients, up to a limit, a thread with a `Handler` each."""

import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from absl import logging

from mask_rcnn_jax.serving.answers import Refused, refusal
from mask_rcnn_jax.serving.clients import Clients
from mask_rcnn_jax.serving.handler import Handler
from mask_rcnn_jax.serving.service import RETRY, Service

MAX_CONNECTIONS = 256
STOP_SECONDS = 25.0  # for requests in flight; Kubernetes waits 30 before it kills
YIELD_SECONDS = 0.005  # for another worker to take a connection


class Server(ThreadingMixIn, TCPServer):
    """Serve a model over HTTP.

    The address is taken at once and answers from `start` to `stop`, or the end of a `with`.

    Args:
        host: name or address of this machine on which to listen; 0.0.0.0 is every one.
        port: 0 picks a free one.
        listener: file descriptor of a socket that has the address already; other processes may
            accept from it, too.

    Attributes:
        url: of the page.
        is_local: only this machine can reach it.
        clients: that are connected, from `start` on.

    Raises OSError, naming the flag, if the address cannot be taken.
    """

    allow_reuse_address = True
    daemon_threads = True  # `stop` waits for them, but not forever
    request_queue_size = 128

    def __init__(self, host: str = "127.0.0.1", port: int = 0, listener: int | None = None):
        self.service: Service
        self.clients: Clients
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise OSError(f"--host {host}: {error}") from error
        self.address_family, address = found[0][0], found[0][4]
        super().__init__(address, Handler, bind_and_activate=False)  # type: ignore[arg-type]
        try:
            self._bind(listener)
        except OSError as error:
            self.server_close()
            hint = "; --port 0 picks a free port" if error.errno == errno.EADDRINUSE else ""
            raise OSError(f"--host {host}, --port {port}: {error.strerror}{hint}") from error
        name = "localhost" if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        own = str(self.server_address[0]).partition("%")[0]  # without an IPv6 zone
        self.is_local = ipaddress.ip_address(own).is_loopback
        self.url = f"http://{name}:{self.server_address[1]}/"

    def _bind(self, listener: int | None) -> None:
        if listener is None:
            self.server_bind()
        else:
            self.socket.close()
            self.socket = socket.socket(fileno=listener)
            self.server_address = self.socket.getsockname()
        # Another worker may take a connection first, or its client may go, before `accept`.
        self.socket.setblocking(False)

    def start(self, service: Service) -> None:
        """Answer requests, in threads."""
        limits = service.limits
        self.service = service
        self.clients = Clients(MAX_CONNECTIONS, max(limits.receiving, limits.content))
        self.server_activate()
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, finish those in flight, and close the service."""
        is_started = hasattr(self, "clients")
        if is_started and not self.clients.stop():
            return
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
        if is_started:
            if left := self.clients.join(STOP_SECONDS):
                logging.warning("%d requests are not finished", left)
            self.service.close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, service: Service, supervisor: int | None = None) -> None:
        """Serve until SIGTERM or Ctrl-C; a second one ends the process at once.

        supervisor: id of the process that started this one as a worker: serve once it listens, and
            no longer than it runs. It says what there is to say, and decides when to end at once.
        """
        told = []  # signals; their handler may take no lock that the main thread may hold
        is_worker = supervisor is not None

        def on_signal(number: int, frame: object) -> None:
            signal.signal(number, signal.SIG_IGN if is_worker else signal.SIG_DFL)
            told.append(number)

        def goes_on() -> bool:
            return not told and supervisor in (None, os.getppid())

        before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while is_worker and goes_on() and not self._listens():
                time.sleep(0.05)
            if goes_on():
                self.start(service)
            if not is_worker:
                print(f"ready: {self.url}", flush=True)
            while goes_on():
                time.sleep(0.1)
            if not is_worker:
                logging.info("stopping")
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listens(self) -> bool:
        return bool(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def get_request(self) -> Any:
        """Accept a connection, unless a worker with fewer of them does so first."""
        if self.service.has_more_connections():
            time.sleep(YIELD_SECONDS)
        return super().get_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.clients.add(request):
            self.service.count_connections(len(self.clients))
            super().process_request(request, client_address)
        else:
            _turn_away(request)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.clients.remove(request)
        self.service.count_connections(len(self.clients))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error unless its client has gone."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logging.error("%s: %s", type(error).__name__, error)


def _turn_away(connection: socket.socket) -> None:
    """Answer a client for whom there is no thread."""
    content = refusal(Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")).content
    lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in RETRY.items()]
    lines += [f"Content-Length: {len(content)}", "Connection: close", "", ""]
    with suppress(OSError):
        connection.setblocking(False)  # a new connection has room for so little
        connection.sendall("\r\n".join(lines).encode() + content)
