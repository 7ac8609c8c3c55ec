"""The server itself, on a free port: answers, refusals, many clients, slow ones, and its end."""

import contextlib
import http.client
import io
import json
import re
import signal
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from types import SimpleNamespace

import cv2
import jax
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from mask_rcnn_jax.data.tiles import Tiles
from mask_rcnn_jax.images.headers import reads_heic
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.serving import server as server_module
from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Limits, Service
from tests.commands.command import ROOT
from tests.helpers import any_variables
from tests.predict.conftest import CATEGORIES, two_canvas_config
from tests.predict.stub_predictor import StubPredictor, image_of
from tests.serving.asking import (
    HEAD,
    HOST,
    TIMEOUT,
    ask,
    ask_on,
    classes,
    connect,
    error_of,
    opened,
    png,
    raw,
    said_on,
    serving,
    wait_until,
    waiting,
)


@pytest.fixture(scope="module")
def shared():
    """A server for tests that leave it as it is."""
    with serving(StubPredictor(), content=50_000, pixels=10_000) as server:
        yield server


class TestAnswers:
    def test_detections_are_coco_results_with_names(self, shared):
        response = ask(shared, body=png(3, width=40, height=60), path="/detect?masks=none")
        assert json.loads(response.body) == {
            "image": {"width": 40, "height": 60},
            "detections": [
                {
                    "category_id": 30,
                    "category": "class 3",
                    "score": pytest.approx(0.9),
                    "bbox": [20.0, 30.0, 20.0, 30.0],
                }
            ],
        }

    @pytest.mark.parametrize("path", ["/detect", "/detect?masks=rle&score_threshold=0.2"])
    def test_masks_are_run_lengths(self, shared, path):
        response = ask(shared, body=png(1, width=80, height=100), path=path)
        (found,) = json.loads(response.body)["detections"]
        mask = coco_mask.decode(found["segmentation"])
        assert mask.shape == (100, 80)
        # The stub's ring has radii of 0.45 and 0.2 boxes of 40 x 50.
        assert mask.sum() == pytest.approx(np.pi * 40 * 50 * (0.45**2 - 0.2**2), rel=0.05)
        assert not mask[75, 60] and not mask[:50].any() and not mask[:, :40].any()

    def test_polygons_keep_holes_for_coco_and_outlines_for_drawing(self, shared):
        def found(masks):
            body = png(1, width=80, height=100)
            response = ask(shared, body=body, path=f"/detect?masks={masks}")
            return json.loads(response.body)["detections"][0]["segmentation"]

        mask = coco_mask.decode(found("rle"))
        polygons, outlines = found("polygons"), found("outlines")
        assert len(polygons) == 1 and len(outlines) == 2
        from_polygons = coco_mask.decode(coco_mask.frPyObjects(polygons, 100, 80))[..., 0]
        drawn = np.zeros((100, 80), np.uint8)
        lines = [np.round(np.reshape(line, (-1, 2)) - 0.5).astype(int) for line in outlines]
        cv2.fillPoly(drawn, lines, 1)
        for other in (from_polygons, drawn):
            assert (mask & other).sum() / (mask | other).sum() > 0.85

    def test_a_model_of_boxes_alone_has_no_segmentation(self):
        with serving(StubPredictor(masks=False)) as server:
            for masks in ("rle", "polygons", "outlines"):
                response = ask(server, body=png(), path=f"/detect?masks={masks}")
                (found,) = json.loads(response.body)["detections"]
                assert "segmentation" not in found
            assert json.loads(ask(server, "GET", "/model").body)["masks"] is False

    def test_keypoints_have_names_and_lines(self):
        with serving(StubPredictor(points=("nose", "left_eye", "tail"))) as server:
            (found,) = json.loads(ask(server, body=png(1, 80, 60)).body)["detections"]
            assert found["keypoint_scores"] == [3, 1, 3] and len(found["keypoints"]) == 9
            model = json.loads(ask(server, "GET", "/model").body)["keypoints"]
            assert model["names"] == ["nose", "left_eye", "tail"] and model["threshold"] == 2
            assert model["skeleton"] == [[0, 1]]  # COCO's
        with serving(StubPredictor()) as server:
            assert json.loads(ask(server, "GET", "/model").body)["keypoints"] is None

    def test_the_threshold_drops_lower_scores(self, shared):
        assert classes(ask(shared, body=png(2), path="/detect?score_threshold=0.95")) == []
        assert classes(ask(shared, body=png(2), path="/detect?score_threshold=0.85")) == ["class 2"]

    def test_an_image_is_turned_as_its_camera_says(self, shared):
        content, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(image_of(1, width=8, height=12)).save(content, "JPEG", exif=exif)
        body = content.getvalue()
        response = ask(shared, body=body, headers={"Content-Type": "image/jpeg"})
        assert json.loads(response.body)["image"] == {"width": 12, "height": 8}

    def test_the_model_and_its_health(self, shared):
        model = json.loads(ask(shared, "GET", "/model", headers={}).body)
        assert model["classes"][2] == {"id": 30, "name": "class 3"}
        assert (model["masks"], model["max_bytes"], model["max_pixels"]) == (True, 50_000, 10_000)
        health = json.loads(ask(shared, "GET", "/health", headers={}).body)
        assert health["status"] == "ready" and health["waiting"] == 0
        before = health["answered"]
        ask(shared, body=png())
        assert json.loads(ask(shared, "GET", "/health").body)["answered"] == before + 1

    def test_a_head_request_has_no_content(self, shared):
        response = ask(shared, "HEAD", "/health")
        assert (response.status, response.body) == (200, b"")
        assert int(response.headers["Content-Length"]) > 0

    def test_a_client_who_asks_is_told_to_send_the_body(self, shared):
        body = png(5)
        head = HEAD + f"Content-Length: {len(body)}\r\nConnection: close\r\n".encode()
        with opened(shared, head + b"Expect: 100-continue\r\n\r\n" + body) as connection:
            said = said_on(connection)
        assert (
            said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") and b"class 5" in said
        )
        refused = raw(shared, b"POST /detect HTTP/1.1\r\nExpect: 100-continue\r\n" + HOST + b"\r\n")
        assert refused.startswith(b"HTTP/1.1 415")


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


class TestPage:
    def test_allows_itself_alone(self, shared):
        response = ask(shared, "GET", "/")
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"

    def test_asks_for_its_own_files_alone(self, shared):
        tags = Tags(ask(shared, "GET", "/").body.decode()).found
        files = [a.get("src") or a.get("href") for _, a in tags if "src" in a or "href" in a]
        assert files == ["data:,", "serve_page.css", "serve_page.js"]
        for _, attributes in tags:
            assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for file in files[1:]:
            response = ask(shared, "GET", f"/{file}")
            kind = {"css": "text/css", "js": "text/javascript"}[file.split(".")[-1]]
            assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
            assert b"http" not in response.body and b"@import" not in response.body

    def test_names_are_never_read_as_html(self, shared):
        script = ask(shared, "GET", "/serve_page.js").body.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def too_large_png(width=100_000, height=100_000) -> bytes:
    """The head of an image with gigabytes of pixels, in 70 bytes."""
    head = b"IHDR" + struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c))
        for c in (head, data, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def cut_jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = cv2.imencode(".jpg", noise)[1].tobytes()
    return content[: len(content) // 2]


HEIC = b"\0\0\0\x18ftypheic" + bytes(40)
HEIC_REFUSED = (400, "damaged") if reads_heic() else (415, "pip install 'mask-rcnn-jax[heif]'")
# Name: (method, path, Content-Type, body, status, words of the message).
BAD = {
    "not an image": (
        "POST",
        "/detect",
        "image/png",
        b"no image" * 9,
        400,
        "not an image, ",
    ),
    "page as image": ("POST", "/detect", "image/png", b"<html><svg/></html>", 400, "not an image"),
    "HEIC": ("POST", "/detect", "image/heic", HEIC, *HEIC_REFUSED),
    "truncated JPEG": ("POST", "/detect", "image/jpeg", cut_jpeg(), 400, "truncated"),
    "truncated PNG": ("POST", "/detect", "image/png", png()[:45], 400, "truncated"),
    "huge dimensions": ("POST", "/detect", "image/png", too_large_png(), 413, "10,000 pixels"),
    "too many pixels": ("POST", "/detect", "image/png", png(1, 101, 100), 413, "100 x 101 pixels"),
    "too many bytes": ("POST", "/detect", "image/png", b"x" * 50_001, 413, "at most 50,000"),
    "empty body": ("POST", "/detect", "image/png", b"", 400, "the body is empty"),
    "no body": ("POST", "/detect", "image/png", None, 400, "the body is empty"),
    "form": ("POST", "/detect", "multipart/form-data; boundary=x", b"x", 415, "the bytes of an"),
    "type of curl": (
        "POST",
        "/detect",
        "application/x-www-form-urlencoded",
        b"x",
        415,
        "image/",
    ),
    "no type": ("POST", "/detect", None, b"x", 415, "Content-Type"),
    "GET of detections": ("GET", "/detect", None, None, 405, "/detect takes POST"),
    "POST to the page": ("POST", "/", "image/png", png(), 405, "/ takes GET"),
    "PUT": ("PUT", "/detect", "image/png", png(), 405, "/detect takes POST"),
    "DELETE": ("DELETE", "/detect", None, None, 405, "/detect takes POST"),
    "another site's question": ("OPTIONS", "/detect", None, None, 405, "/detect takes POST"),
    "unknown page": ("GET", "/admin", None, None, 404, "expected /detect, /model"),
    "a file": ("GET", "/../../pyproject.toml", None, None, 404, "no such page"),
    "score of 2": ("POST", "/detect?score_threshold=2", "image/png", png(), 400, "from 0 to 1"),
    "score NaN": ("POST", "/detect?score_threshold=nan", "image/png", png(), 400, "'nan'"),
    "no score": ("POST", "/detect?score_threshold=", "image/png", png(), 400, "''"),
    "unknown masks": ("POST", "/detect?masks=all", "image/png", png(), 400, "rle, polygons"),
    "unknown parameter": ("POST", "/detect?mask=rle", "image/png", png(), 400, "'mask'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_told_why(case, shared):
    method, path, kind, body, status, words = BAD[case]
    response = ask(shared, method, path, body, {"Content-Type": kind} if kind else {})
    assert response.status == status
    assert words in error_of(response)
    assert ("Allow" in response.headers) == (status == 405)
    assert classes(ask(shared, body=png(4))) == ["class 4"]


GET = b"GET /health HTTP/1.1\r\n" + HOST
HIDDEN = b"Content-Length: 30\r\n\r\nGET /hidden HTTP/1.1\r\nA: b\r\n\r\n"
# Bytes as no decent client sends them: (content, first line of the answer).
RAW = {
    "no HTTP": (b"hello\r\n\r\n", b"400 Bad Request"),
    "no such version": (b"GET / HTTP/9.9\r\n\r\n", b"505"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", b"400"),
    "endless line": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
    "endless header": (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
    "1000 headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n", b"431"),
    "no length": (HEAD + b"\r\n", b"411 Length Required"),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", b"411"),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", b"400"),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx", b"400"),
    "length of many digits": (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b"400"),
    "a length and chunks": (
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
        b"411",
    ),
    "space in a name": (GET + b"X y: 1\r\n" + HIDDEN, b"400 Bad Request"),
    "space after a name": (GET + HIDDEN.replace(b":", b" :"), b"400"),
    "envelope": (GET + b"From x: 1\r\n" + HIDDEN, b"400"),
    "folded line": (GET + b"A: b\r\n c: d\r\n" + HIDDEN, b"400"),
    "lone return": (GET + b"A: b\rX y: 1\r\n" + HIDDEN, b"400"),
    "another host": (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", b"421"),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", b"421"),
    "the host twice": (GET + HOST + b"\r\n", b"400"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
    "no host, HTTP/1.2": (b"GET /health HTTP/1.2\r\n\r\n", b"400"),
    "NUL in a value": (GET + b"A: b\0c\r\n\r\n", b"400"),
    "escape in a value": (GET + b"A: \x1b[31m\r\n\r\n", b"400"),
    "delete in a value": (GET + b"A: \x7f\r\n\r\n", b"400"),
    "NUL in the host": (b"GET /health HTTP/1.1\r\nHost: localhost\0\r\n\r\n", b"400"),
    "NUL in the path": (b"GET /health\0 HTTP/1.1\r\n" + HOST + b"\r\n", b"400"),
    "tab in the first line": (b"GET\t/health HTTP/1.1\r\n" + HOST + b"\r\n", b"400"),
    "address of no host": (b"GET //[x HTTP/1.1\r\n" + HOST + b"\r\n", b"404"),
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_no_client_should_send(case, shared, caplog):
    content, status = RAW[case]
    said = raw(shared, content)
    assert said.startswith(b"HTTP/1.1 " + status), said[:200]
    assert list(json.loads(said.partition(b"\r\n\r\n")[2])) == ["error"]
    assert said.count(b"HTTP/1.1 ") == 1  # what follows in the body is no request
    assert not caplog.text
    assert classes(ask(shared, body=png(4))) == ["class 4"]


@pytest.mark.parametrize("line", [b"A: b\tc", b"A: \xfcber", b"A:"])
def test_values_that_a_client_may_send(line, shared):
    assert raw(shared, GET + line + b"\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET /health HTTP/1.0\r\n", "close"),
        (b"GET /health HTTP/1.0\r\nConnection: Keep-Alive\r\n", "keep-alive"),
        (b"GET /health HTTP/1.1\r\nConnection: keep-alive\r\n" + HOST, None),
        (b"GET /health HTTP/1.1\r\nConnection: close\r\n" + HOST, "close"),
    ],
)
def test_a_client_is_told_whether_its_connection_is_kept(head, kept, shared):
    with opened(shared, head + b"\r\n") as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200 and response.headers["Connection"] == kept
        assert json.loads(response.read())["status"] == "ready"
        if kept == "close":
            assert connection.recv(1) == b""
        else:
            connection.sendall(head + b"\r\n")
            assert connection.recv(1) == b"H"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:9"])
def test_names_of_this_machine(host, shared):
    assert ask(shared, "GET", "/health", headers={"Host": host}).status == 200


def test_any_name_where_others_can_ask(shared, monkeypatch):
    monkeypatch.setattr(shared, "is_local", False)
    assert ask(shared, "GET", "/health", headers={"Host": "gpu.example"}).status == 200


class TestManyClients:
    def test_each_of_eight_gets_its_own_answers(self):
        stub = StubPredictor(batch_size=4)
        with serving(stub) as server:

            def work(client):
                with contextlib.closing(connect(server)) as connection:
                    for i in range(20):
                        value, width = 1 + (client * 20 + i) % 250, 8 + client % 2
                        response = ask_on(connection, body=png(value, width))
                        assert classes(response) == [f"class {value}"]
                        assert json.loads(response.body)["image"]["width"] == width
                return i + 1

            with ThreadPoolExecutor(8) as pool:
                assert sum(pool.map(work, range(8))) == 160
        assert sorted(stub.values) == sorted(1 + k % 250 for k in range(160))
        assert stub.mixed == 0 and max(stub.batches) > 1

    def test_too_many_images_are_refused_and_none_that_waits_is_lost(self):
        stub = StubPredictor()
        stub.hold.clear()
        with serving(stub, waiting=2) as server, ThreadPoolExecutor(2) as pool:
            at_work = [pool.submit(ask, server, body=png(v)) for v in (1, 2)]
            wait_until(lambda: waiting(server) == 2)
            refused = ask(server, body=png(3))
            assert refused.status == 503 and refused.headers["Retry-After"] == "1"
            assert "2 images are waiting" in error_of(refused)
            stub.hold.set()
            assert [classes(one.result()) for one in at_work] == [["class 1"], ["class 2"]]
            assert classes(ask(server, body=png(3))) == ["class 3"]

    def test_no_body_is_read_where_all_places_are_taken(self):
        stub = StubPredictor()
        stub.hold.clear()
        with serving(stub, waiting=1) as server, ThreadPoolExecutor(1) as pool:
            at_work = pool.submit(ask, server, body=png(1))
            wait_until(lambda: waiting(server) == 1)
            with opened(server, HEAD + b"Content-Length: 1000\r\n\r\n") as second:
                assert second.recv(100).startswith(b"HTTP/1.1 503")
            stub.hold.set()
            assert classes(at_work.result()) == ["class 1"]

    def test_an_image_that_waits_for_its_batch_has_no_file(self):
        stub = StubPredictor()
        content = png(3, width=100)
        released = threading.Event()
        request = SimpleNamespace(
            read_body=lambda: content, release_body=released.set, has_gone=lambda: False
        )
        before = sys.getrefcount(content)
        service = Service(stub)
        stub.started.clear()
        stub.hold.clear()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(service.detect, request, "")
            stub.started.wait(TIMEOUT)
            assert released.is_set()
            assert sys.getrefcount(content) == before
            stub.hold.set()
            assert found.result()["image"] == {"width": 100, "height": 12}
        service.close()

    def test_waiting_for_a_decoder_ends(self, monkeypatch):
        monkeypatch.setattr("mask_rcnn_jax.serving.service.DECODE_SECONDS", 0.05)
        with serving(StubPredictor()) as server:
            monkeypatch.setattr(server.service, "_decoders", threading.Semaphore(0))
            response = ask(server, body=png())
            assert response.status == 503 and "not decoded within" in error_of(response)

    def test_an_answer_that_takes_too_long_is_given_up(self, monkeypatch):
        monkeypatch.setattr("mask_rcnn_jax.serving.service.DETECT_SECONDS", 0.05)
        stub = StubPredictor()
        with serving(stub) as server:
            stub.hold.clear()
            response = ask(server, body=png())
            stub.hold.set()
            assert response.status == 503 and "no detections within" in error_of(response)

    def test_a_failure_is_told_and_the_next_image_is_answered(self):
        stub = StubPredictor()
        with serving(stub) as server:
            stub.error = RuntimeError("RESOURCE_EXHAUSTED: secrets")
            response = ask(server, body=png())
            assert (
                response.status == 500
                and error_of(response) == "the server failed, its log says more"
            )
            stub.error = None
            assert classes(ask(server, body=png(2))) == ["class 2"]


def ask_or_none(server):
    with contextlib.suppress(OSError):
        response = ask(server, "GET", "/health")
        return response if response.status == 200 else None


class TestEnd:
    def test_requests_in_flight_are_finished(self, monkeypatch):
        monkeypatch.setattr("mask_rcnn_jax.serving.handler.HEAD_SECONDS", 3600.0)
        stub = StubPredictor()
        stub.hold.clear()
        with Server() as server, ThreadPoolExecutor(4) as pool:
            server.start(Service(stub))
            idle = connect(server)
            assert ask_on(idle, "GET", "/health").status == 200
            at_work = [pool.submit(ask, server, body=png(v)) for v in (1, 2, 3)]
            wait_until(lambda: waiting(server) == 3)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            assert idle.sock.recv(1) == b""  # closed at once
            idle.close()
            stub.hold.set()
            for value, one in zip((1, 2, 3), at_work, strict=True):
                assert classes(one.result()) == [f"class {value}"]
                assert one.result().headers["Connection"] == "close"
            stopping.join(TIMEOUT)
            assert not stopping.is_alive()
            with pytest.raises(OSError):
                ask(server, "GET", "/health")

    def test_a_request_that_never_ends_does_not_stop_it(self, monkeypatch):
        monkeypatch.setattr(server_module, "STOP_SECONDS", 0.05)
        with Server() as server:
            server.start(Service(StubPredictor()))
            with opened(server, HEAD + b"Content-Length: 9\r\n\r\n"):
                wait_until(lambda: len(server.clients))
                server.stop()

    def test_a_signal_ends_it(self, capsys):
        def end():
            while ask_or_none(server) is None:
                time.sleep(0.005)
            signal.raise_signal(signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        with Server() as server:
            ending = threading.Thread(target=end)
            ending.start()
            server.run(Service(StubPredictor()))
            ending.join()
        assert capsys.readouterr().out == f"ready: {server.url}\n"
        assert signal.getsignal(signal.SIGTERM) == before

    def test_a_server_that_never_started(self):
        with Server() as server:
            server.stop()

    def test_an_error_in_the_block_stops_it(self):
        before = threading.enumerate()
        with pytest.raises(KeyError), Server() as server:
            server.start(Service(StubPredictor()))
            started = [thread for thread in threading.enumerate() if thread not in before]
            raise KeyError
        assert len(started) > 1  # those of the server and of the batches
        for thread in started:
            thread.join(TIMEOUT)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("host", "words"),
    [("no.such.host.invalid", "--host no.such.host.invalid"), ("203.0.113.1", "--port 0: ")],
)
def test_an_address_that_is_not_ours_is_named(host, words):
    with pytest.raises(OSError, match=re.escape(words)):
        Server(host)


def test_a_port_that_is_taken_is_named(shared):
    port = shared.server_address[1]
    with pytest.raises(OSError, match=f"--port {port}: .*--port 0 picks a free port"):
        Server(port=port)


def test_a_predictor_with_tiles_is_refused():
    stub = StubPredictor()
    stub.tiles = Tiles(640)
    with pytest.raises(ValueError, match="tiles, which cannot be served"):
        Service(stub)


@pytest.mark.slow
def test_a_real_model_answers_many_at_once_and_compiles_nothing_for_it():
    """On canvases for landscape and portrait images, as it answers each alone."""
    config, compiled = two_canvas_config(), []
    predictor = Predictor(config, any_variables(build_model(config.model)), 3, CATEGORIES)
    service = Service(predictor, Limits(delay=0.01))

    def note(event, _, **kwargs):
        if "backend_compile" in event:
            compiled.append(kwargs.get("fun_name", event))

    def detect(image):
        request = SimpleNamespace(
            read_body=lambda: image, release_body=lambda: None, has_gone=lambda: False
        )
        return service.detect(request, "score_threshold=0&masks=outlines")

    rng = np.random.default_rng(3)
    sizes = [(60, 40), (30, 90), (90, 30), (1, 300), (300, 1), (1, 1)]
    noise = [rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8) for size in sizes]
    images = [cv2.imencode(".png", image)[1].tobytes() for image in noise] * 4
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(detect, images))
        alone = predictor([image[..., ::-1] for image in noise])
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
        service.close()
    assert compiled == []
    assert sum(map(len, alone)) > len(alone)
    for found, size, result in zip(together, sizes * 4, alone * 4, strict=True):
        assert found["image"] == dict(zip(("width", "height"), size, strict=True))
        expected = [box["bbox"] for box in result.to_coco()]
        boxes = [box["bbox"] for box in found["detections"]]
        np.testing.assert_allclose(boxes, expected, atol=2e-3)
        assert [box["category"] for box in found["detections"]] == result.names


def test_the_example_of_the_page(monkeypatch, capsys):
    page = (ROOT / "docs" / "serving.md").read_text()
    (example,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setattr("mask_rcnn_jax.load", lambda run, score_threshold: StubPredictor())
    exec(example, {})
    assert re.fullmatch(r"http://127.0.0.1:\d+/\n", capsys.readouterr().out)


def test_the_page_lists_every_status_of_a_mistake():
    page = (ROOT / "docs" / "serving.md").read_text()
    listed = {int(number) for row in re.findall(r"^\|[^|]+\| (.*)$", page, re.M)
              for number in re.findall(r"\b[45]\d\d\b", row)}  # fmt: skip
    answered = {row[4] for row in BAD.values()} | {int(line[:3]) for _, line in RAW.values()}
    assert answered - {505} <= listed


def test_damaged_uploads_leave_no_lines_in_the_log(shared, capfd):
    """libjpeg's own would say neither when nor from whom."""
    rng = np.random.default_rng(0)
    content = cv2.imencode(".jpg", rng.integers(0, 255, (64, 64, 3), np.uint8))[1].tobytes()
    answered = set()
    for at in range(700, len(content) - 20, 97):
        body = content[:at] + content[at + 9 :]
        answered.add(ask(shared, body=body, headers={"Content-Type": "image/jpeg"}).status)
    answered.add(ask(shared, body=content[:-600], headers={"Content-Type": "image/jpeg"}).status)
    assert answered == {200, 400}
    assert capfd.readouterr() == ("", "")
