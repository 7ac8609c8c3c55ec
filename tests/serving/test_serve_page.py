"""The page of `serve` in a real browser, on a desk and on a phone."""

import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Limits, Service
from tests.browser import chromium
from tests.predict.stub_predictor import StubPredictor
from tests.serving.asking import ask, png, serving, wait_until, waiting

HOSTILE = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"
SHOTS = os.environ.get("MASK_RCNN_SCREENSHOTS")  # a folder in which screenshots are kept

pytestmark = pytest.mark.slow


class ShapesPredictor(StubPredictor):
    """Knows the objects of the image that `generate_image` drew, with falling scores."""

    def __init__(self):
        super().__init__(names=["circle", HOSTILE, "square", "a triangle with a name " * 9])


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "profile") as browser:
        yield browser


@pytest.fixture
def server():
    with Server() as server:
        server.start(Service(ShapesPredictor(), Limits(content=2_000_000)))
        yield server
        server.stop()


@pytest.fixture
def photo(tmp_path) -> Path:
    """An image whose first pixel is 2: for the stub, an object of the hostile class."""
    image = generate_image(0, "val", 1, (240, 320))[0]
    image[0, 0] = 2
    path = tmp_path / "photo.png"
    cv2.imwrite(str(path), image[..., ::-1])
    return path


def shoot(browser, tmp_path, name):
    folder = Path(SHOTS) if SHOTS else tmp_path
    browser.screenshot(folder / f"{name}.png")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_image_and_its_objects(width, height, dark, browser, server, photo, tmp_path):
    browser.open(server.url, width, height, dark=dark)
    browser.wait_for("document.getElementById('classes').textContent.includes('circle')")
    shade = "dark" if dark else "light"
    shoot(browser, tmp_path, f"serve_{width}_{shade}_start")
    browser.choose_file("#file", photo)
    browser.wait_for("document.querySelectorAll('#objects li').length === 1")
    shoot(browser, tmp_path, f"serve_{width}_{shade}_found")

    # Nothing is wider than the window, and the image is drawn as large as there is room.
    assert browser.run("document.documentElement.scrollWidth") <= width
    drawn = browser.run("document.getElementById('canvas').getBoundingClientRect().toJSON()")
    assert drawn["width"] / drawn["height"] == pytest.approx(320 / 240, rel=0.01)
    assert drawn["width"] > 0.7 * min(width, 900) - 40

    # The class name is text.
    name = "document.querySelector('#objects li span:nth-child(2)').textContent"
    assert browser.run(name) == HOSTILE
    assert browser.run("document.title") == "Mask R-CNN"
    assert browser.run("document.querySelectorAll('main img').length") == 0

    # The object fills the lower right quarter; the threshold takes effect without a request.
    assert tinted(browser, 0.62, 0.75) and not tinted(browser, 0.25, 0.25)
    before = len(browser.requests())
    move = "const s = document.getElementById('threshold'); s.value = {}; "
    browser.run("(() => {" + move.format(0.95) + "s.dispatchEvent(new Event('input'))})()")
    assert browser.run("document.getElementById('count').textContent") == "No objects"
    assert not tinted(browser, 0.62, 0.75)
    browser.run("(() => {" + move.format(0.3) + "s.dispatchEvent(new Event('input'))})()")
    assert browser.run("document.getElementById('count').textContent") == "1 object"
    assert tinted(browser, 0.62, 0.75)
    assert len(browser.requests()) == before

    assert browser.complaints() == []
    assert [address for address in browser.requests() if not address.startswith(server.url)] == []


def test_sure_keypoints_are_drawn(browser, tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(png(1, 320, 240))
    with serving(StubPredictor(points=("a", "b", "c", "d", "e"))) as server:
        browser.open(server.url, 1280, 800)
        browser.choose_file("#file", path)
        browser.wait_for("document.querySelectorAll('#objects li').length === 1")
        drawn = [tinted(browser, share, share) for share in (0.1, 0.175, 0.25, 0.325, 0.4)]
        assert drawn == [True, False, True, False, True]
        browser.run("document.getElementById('points').click()")
        assert not tinted(browser, 0.1, 0.1)
        assert browser.complaints() == []


def test_a_format_that_browsers_cannot_decode_is_shown_by_the_server(browser, server, tmp_path):
    path = tmp_path / "map.tif"
    cv2.imwrite(str(path), np.full((40, 60, 3), (10, 200, 1), np.uint8))
    browser.open(server.url, 1280, 800)
    browser.choose_file("#file", path)
    browser.wait_for("!document.getElementById('canvas').hidden")
    assert browser.run("document.getElementById('status').textContent") == ""
    color = browser.run(
        "[...document.getElementById('canvas').getContext('2d').getImageData(3, 3, 1, 1).data]"
    )
    np.testing.assert_allclose(color, [1, 200, 10, 255], atol=6)


def tinted(browser, x: float, y: float) -> bool:
    """Whether the canvas differs there, as a share of its size, from the image alone."""
    return browser.run(
        f"""(() => {{
          const canvas = document.getElementById('canvas');
          const scratch = new OffscreenCanvas(1, 1).getContext('2d', {{willReadFrequently: true}});
          const at = () => {{
            const place = [{x} * canvas.width, {y} * canvas.height];
            scratch.drawImage(canvas, ...place, 1, 1, 0, 0, 1, 1);
            return [...scratch.getImageData(0, 0, 1, 1).data].join();
          }};
          const drawn = at(), box = document.getElementById('masks');
          box.click();
          const plain = at();
          box.click();
          return drawn !== plain;
        }})()"""
    )


def test_what_the_page_says_of_bad_files(browser, server, photo, tmp_path):
    browser.open(server.url, 390, 844)
    browser.wait_for("document.getElementById('classes').textContent.includes('circle')")
    said = "document.getElementById('error').textContent"
    (tmp_path / "notes.png").write_text("no image")
    browser.choose_file("#file", tmp_path / "notes.png")
    browser.wait_for(f"{said}.includes('not an image')")
    shoot(browser, tmp_path, "serve_390_error")
    (tmp_path / "large.png").write_bytes(np.zeros(3_000_000, np.uint8).tobytes())
    browser.choose_file("#file", tmp_path / "large.png")
    browser.wait_for(f"{said}.includes('more than 1 MB')")
    browser.choose_file("#file", photo)
    browser.wait_for("document.querySelectorAll('#objects li').length === 1")
    assert browser.run(said) == ""
    for name, words in (("notes.png", "not an image"), ("large.png", "more than 1 MB")):
        browser.choose_file("#file", tmp_path / name)
        browser.wait_for(f"{said}.includes('{words}')")
        gone = [f"document.getElementById('{name}').hidden" for name in ("canvas", "panel")]
        assert browser.run(f"[{', '.join(gone)}]") == [True, True]  # of the image before
        assert browser.run("document.querySelectorAll('#objects li').length") == 0
        assert not browser.run("document.getElementById('drop').hidden")
        browser.choose_file("#file", photo)
        browser.wait_for("document.querySelectorAll('#objects li').length === 1")
        assert not browser.run("document.getElementById('canvas').hidden")
        assert tinted(browser, 0.62, 0.75)
    server.stop()
    browser.choose_file("#file", photo)
    browser.wait_for(f"{said} === 'The server cannot be reached.'")


@pytest.fixture
def large(tmp_path) -> Path:
    """More than the buffers of a connection hold."""
    noise = np.random.default_rng(0).integers(0, 256, (2400, 2400, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "large.png"), noise)
    return tmp_path / "large.png"


def test_what_the_page_says_of_a_refused_upload(browser, large):
    """The server answers before it has read the file."""
    predictor = ShapesPredictor()
    predictor.hold.clear()
    with serving(predictor, waiting=1) as server, ThreadPoolExecutor(1) as pool:
        browser.open(server.url, 390, 844)
        browser.wait_for("document.getElementById('classes').textContent.includes('circle')")
        at_work = pool.submit(ask, server, body=png(1))
        wait_until(lambda: waiting(server) == 1)
        browser.choose_file("#file", large)
        said = "document.getElementById('error').textContent"
        browser.wait_for(f"{said} !== ''")
        assert browser.run(said) == "Error: 1 images are waiting already, try again."
        predictor.hold.set()
        assert at_work.result().status == 200


@contextmanager
def slow_line(server):
    """Yield the address of a relay that passes on 20 kB a second to the server."""

    def pass_on(source, target):
        with source, target, suppress(OSError):  # which resets what has not been read
            while content := source.recv(2_000):
                target.sendall(content)
                time.sleep(0.1)

    def answer(source, target):
        with suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)

    def accept():
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                other = socket.create_connection(("127.0.0.1", server.server_address[1]))
                threading.Thread(target=pass_on, args=(client, other), daemon=True).start()
                threading.Thread(target=answer, args=(other, client), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        listener.shutdown(socket.SHUT_RDWR)


def test_what_the_page_says_of_a_slow_upload(browser, large, monkeypatch):
    monkeypatch.setattr("mask_rcnn_jax.serving.clients.GRACE_SECONDS", 0.5)
    monkeypatch.setattr("mask_rcnn_jax.serving.handler.LINGER_SECONDS", 1.0)
    with serving(ShapesPredictor()) as server, slow_line(server) as address:
        browser.open(address, 390, 844)
        browser.wait_for("document.getElementById('classes').textContent.includes('circle')")
        browser.choose_file("#file", large)
        said = "document.getElementById('error').textContent"
        browser.wait_for(f"{said} !== ''")
        assert browser.run(said) == "Error: the body comes at less than 289 kB a second."


def test_what_the_page_says_where_the_connection_gave_way_to_others(browser, photo):
    predictor = ShapesPredictor()
    predictor.hold.clear()
    with serving(predictor) as server, ExitStack() as stack:
        stack.callback(predictor.hold.set)
        browser.open(server.url, 390, 844)
        browser.wait_for("document.getElementById('classes').textContent.includes('circle')")
        browser.choose_file("#file", photo)
        said = "document.getElementById('error').textContent"

        def has_ended():  # the browser tries again by itself on every connection that it has
            for client in [*server.clients._clients.values()]:
                if client.since == math.inf:
                    server.clients._drop(client)
            return browser.run(f"{said} !== ''")

        wait_until(has_ended)
        assert "the connection was closed" in browser.run(said)
        predictor.hold.set()
        browser.choose_file("#file", photo)
        browser.wait_for("document.querySelectorAll('#objects li').length === 1")
        assert browser.run(said) == ""
