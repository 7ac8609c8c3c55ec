"""A web server on this machine that breaks off, lies, or knows no ranges, as a test wants it."""

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves `files`: path on the server -> content. `requests` lists the ranges asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str | None] = []
        self.cut: int | None = None  # bytes of an answer after which the connection ends
        self.ranges = True  # whether it knows them
        self.shift = 0  # bytes before the asked ones that a range starts at
        self.length: int | None = None  # what it says instead of the length
        self.says_length = True
        self.pause = 0.0  # seconds after each byte

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append(asked)
        if self.path not in server.files:
            self.send_error(404)
            return
        content, start = server.files[self.path], 0
        if asked and server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-")) - server.shift
            if start >= len(content):
                self.send_error(416)
                return
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.says_length:
            length = len(body) if server.length is None else server.length
            self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client may have heard enough
            body = body if server.cut is None else body[: server.cut]
            for piece in (body[i : i + 1] for i in range(len(body))) if server.pause else (body,):
                self.wfile.write(piece)
                time.sleep(server.pause)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def running():
    """A server that answers until the end of the block."""
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
