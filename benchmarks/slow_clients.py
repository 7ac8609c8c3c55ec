"""Attack a running `serve` with slow clients; print how others fare meanwhile.

    python -m mask_rcnn_jax.serve --workdir runs/mine &
    python benchmarks/slow_clients.py --port 8000 --image photo.jpg

Each attack keeps its connections for some seconds. Another client asks for `/health` and sends the
image meanwhile, alone and with 400 kB behind it, which a decoder ignores. Printed are its requests,
how many were not answered with 200, and the longest.
"""

import argparse
import contextlib
import http.client
import socket
import time
from collections.abc import Callable
from pathlib import Path

LARGE = 32 << 20  # bytes, the largest body by default


def connect(port: int, content: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 20)
    with contextlib.suppress(OSError):  # refused or closed by the server
        connection.sendall(content)
    return connection


def promise(size: int) -> bytes:
    head = "POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode()


ATTACKS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "no attack": (0, bytes),
    "bodies of one byte": (64, lambda: promise(1000) + b"x"),
    "more bodies of one byte": (300, lambda: promise(1000) + b"x"),
    "silent connections": (256, bytes),
    "more silent connections": (600, bytes),
    "half heads": (300, lambda: b"POST /det"),
    "32 MB that are promised": (24, lambda: promise(LARGE) + bytes(1000)),
    "32 MB but for a byte": (24, lambda: promise(LARGE) + bytes(LARGE - 1)),
}


def ask(port: int, path: str, body: bytes | None) -> tuple[int, float]:
    """Return the status, 0 for no answer, and the seconds."""
    started = time.perf_counter()
    status = 0
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(client), contextlib.suppress(OSError, http.client.HTTPException):
        method = "GET" if body is None else "POST"
        client.request(method, path, body, {"Content-Type": "image/jpeg"})
        response = client.getresponse()
        response.read()
        status = response.status
    return status, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--image", required=True)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    args = parser.parse_args()
    image = Path(args.image).read_bytes()
    asked = [("/health", None), ("/detect", image), ("/detect", image + bytes(400_000))]
    for name, (count, content) in ATTACKS.items():
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(connect(args.port, content()))
            end, found = time.monotonic() + args.seconds, []
            while time.monotonic() < end:
                found += [ask(args.port, path, body) for path, body in asked]
        refused = sum(status != 200 for status, _ in found)
        longest = max(seconds for _, seconds in found)
        print(
            f"{count:4} {name}: {len(found)} requests, {refused} refused, {longest:.2f} s at most"
        )


if __name__ == "__main__":
    main()
