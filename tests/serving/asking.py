"""A server on a free port with a model's stub, and clients of it."""

import contextlib
import http.client
import json
import socket
import time

import cv2

from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Limits, Service
from tests.predict.stub_predictor import image_of

TIMEOUT = 30.0
PNG = {"Content-Type": "image/png"}
HOST = b"Host: localhost\r\n"
HEAD = b"POST /detect HTTP/1.1\r\nContent-Type: image/png\r\n" + HOST


@contextlib.contextmanager
def serving(predictor, **limits):
    """A running server of that model."""
    with Server() as server:
        server.start(Service(predictor, Limits(**limits)))
        try:
            yield server
        finally:
            server.stop()


def connect(server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=TIMEOUT)


def ask(server, method="POST", path="/detect", body=None, headers=PNG):
    """The response, with its content in `body`, on a connection of its own."""
    with contextlib.closing(connect(server)) as connection:
        return ask_on(connection, method, path, body, headers)


def ask_on(connection, method="POST", path="/detect", body=None, headers=PNG):
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    response.body = response.read()
    return response


def opened(server, content: bytes = b"") -> socket.socket:
    """A connection on which these bytes are sent."""
    connection = socket.create_connection(("127.0.0.1", server.server_address[1]), TIMEOUT)
    connection.sendall(content)
    return connection


def said_on(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def raw(server, content: bytes, *, wait=True) -> bytes:
    """Everything that the server answers to these bytes."""
    with opened(server, content) as connection:
        connection.shutdown(socket.SHUT_WR)
        return said_on(connection) if wait else b""


def png(value=1, width=8, height=12) -> bytes:
    return cv2.imencode(".png", image_of(value, width, height))[1].tobytes()


def classes(response) -> list[str]:
    assert response.status == 200, response.body
    return [found["category"] for found in json.loads(response.body)["detections"]]


def error_of(response) -> str:
    """The message of a refusal, which is one line of json and no traceback."""
    assert response.headers["Content-Type"] == "application/json"
    content = json.loads(response.body)
    assert list(content) == ["error"] and response.body.count(b"\n") == 1
    assert content["error"] and "Traceback" not in content["error"]
    return content["error"]


def wait_until(condition, seconds=TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def waiting(server) -> int:
    """Images at work."""
    return json.loads(ask(server, "GET", "/health").body)["waiting"]
