"""The page of `serve` in a real browser, on a desk and on a phone."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Limits, Service
from tests.browser import chromium
from tests.predict.stub_predictor import StubPredictor

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
    server.stop()
    browser.choose_file("#file", photo)
    browser.wait_for(f"{said} === 'The server cannot be reached.'")
