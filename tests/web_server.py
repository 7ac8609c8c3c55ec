"""A web server on this machine whose answers a test writes."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer(ThreadingHTTPServer):
    """Calls `answers[path](handler)`; `requests` are the paths, with the Host headers.

    `ended` is set when the test is over, for answers that would go on.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int = 0):
        super().__init__((host, port), _Handler)
        self.answers: dict[str, Callable[[_Handler], None]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ended = threading.Event()

    def url(self, path: str) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.requests.append((path, self.headers["Host"]))
        with contextlib.suppress(OSError):  # a client may have heard enough
            self.server.answers[path](self)

    do_HEAD = do_GET

    def send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def drip(self, content: bytes) -> None:
        """Write content without end, a byte at a time, each soon after the other."""
        while not self.server.ended.wait(0.01):
            self.wfile.write(content[:1])
            content = content[1:] + content[:1]

    def log_message(self, *_):
        pass


def redirect(address: str, content: bytes = b"") -> Callable[[_Handler], None]:
    return lambda handler: handler.send(content, 302, Location=address)


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", port: int = 0) -> Iterator[WebServer]:
    """A server that answers until the end of the block."""
    with WebServer(host, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
