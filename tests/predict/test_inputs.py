from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.predict import inputs as inputs_module
from mask_rcnn_jax.predict.inputs import find_inputs, read_image

PNG = cv2.imencode(".png", np.full((4, 6, 3), 7, np.uint8))[1].tobytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("b.jpg", "a.PNG", "c.mov", "notes.txt", "d[1].webm", "deep/e.tif", "deep/er/f.MP4")
    for name in (*names, "out/b.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "looks.jpg").mkdir()
    return tmp_path


def sources(found):
    return [one.source if "://" in one.source else Path(one.source).as_posix() for one in found]


@pytest.mark.parametrize(
    "inputs, images, videos",
    [
        (["."], ["a.PNG", "b.jpg", "deep/e.tif"], ["c.mov", "d[1].webm", "deep/er/f.MP4"]),
        (["*"], ["a.PNG", "b.jpg"], ["c.mov", "d[1].webm"]),
        (["deep"], ["deep/e.tif"], ["deep/er/f.MP4"]),
        (["**/*.tif"], ["deep/e.tif"], []),
        (["c.mov", "*.jpg", "b.jpg", "c.mov"], ["b.jpg"], ["c.mov"]),
        (["b.jpg", "./b.jpg", "deep/../b.jpg", "c.mov", "./c.mov"], ["b.jpg"], ["c.mov"]),
        (["d[1].webm"], [], ["d[1].webm"]),
        (["notes.txt"], [], ["notes.txt"]),  # named explicitly, not an image by content
        (["out"], ["out/b.jpg"], []),  # what is named is read, even there
        (["rtsp://camera/1"], [], ["rtsp://camera/1"]),
    ],
)
def test_inputs_of_all_kinds(inputs, images, videos, folder):
    output = folder / ("out" if inputs != ["out"] else "out/new")
    found_images, found_videos = find_inputs(inputs, output)
    assert sources(found_images) == images and sources(found_videos) == videos


def test_what_is_not_read_in_a_folder_is_counted(folder, caplog):
    for name in ("x.psd", "deep/y.PSD", "labels", "._a.PNG", ".hidden.jpg", "out/report.json"):
        (folder / name).write_bytes(b"")
    for name in ("p.avif", "q.jp2", "r.jfif", "s.pgm", "t.gif"):
        (folder / name).write_bytes(b"")
    with caplog.at_level("INFO"):
        images, videos = find_inputs(["."], folder / "out")
    found = ["a.PNG", "b.jpg", "deep/e.tif", "p.avif", "q.jp2", "r.jfif", "s.pgm"]
    assert sources(images) == found and "t.gif" in sources(videos)
    assert "--input .: these files are not read: 2 .psd, 1 .txt, 1 without ending" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        find_inputs(["deep/e.tif", "*.jpg"], folder / "out")
    assert "not read" not in caplog.text
    assert sources(find_inputs(["._a.PNG"], folder / "out")[0]) == ["._a.PNG"]  # named explicitly


def test_an_image_that_is_not_decoded_is_no_video(folder):
    (folder / "x.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    images, videos = find_inputs(["x.HEIC"], folder / "out")
    assert sources(images) == ["x.HEIC"] and not videos
    with pytest.raises(ValueError, match="x.HEIC: (HEIC is read by pillow-heif|truncated or)"):
        read_image("x.HEIC")


def test_all_endings_of_images_are_decoded(tmp_path):
    rng = np.random.default_rng(0)
    image = cv2.GaussianBlur(rng.integers(0, 256, (40, 60, 3), np.uint8), (0, 0), 5)
    for suffix in inputs_module.IMAGE_SUFFIXES:
        kind = {".jfif": "JPEG", ".jpe": "JPEG", ".dib": "BMP"}.get(suffix)
        path, gray = tmp_path / f"a{suffix}", np.repeat(image.mean(axis=2, keepdims=True), 3, 2)
        gray = gray.astype(np.uint8)
        Image.fromarray(gray).convert("1" if suffix == ".pbm" else "L").save(path, kind)
        if suffix != ".pbm":
            assert np.abs(read_image(str(path)).astype(int) - gray).mean() < 9
        assert read_image(str(path)).shape == image.shape


def test_image_without_suffix_is_recognized_by_content(folder):
    (folder / "photo").write_bytes(PNG)
    images, videos = find_inputs(["photo"], folder / "out")
    assert sources(images) == ["photo"] and not videos


@pytest.mark.parametrize("item", ["deep/er/*.jpg", "*.txt", "looks.jpg"])
def test_input_without_images_and_videos_is_named(item, folder):
    with pytest.raises(ValueError, match=r"^--input .*no images or videos found \(\.jpg"):
        find_inputs(["b.jpg", item], folder / "out")


@pytest.mark.parametrize("item", ["nowhere", "deep/x.jpg", "/dev/video77", "77"])
def test_what_does_not_exist_is_said_so(item, folder):
    with pytest.raises(ValueError, match=f"^--input {item}: does not exist"):
        find_inputs(["b.jpg", item], folder / "out")


def test_a_camera_is_a_number_or_a_device(folder, monkeypatch):
    real = inputs_module.os.path.exists
    exists = lambda path: str(path) == "/dev/video0" or real(path)  # noqa: E731
    monkeypatch.setattr(inputs_module.os.path, "exists", exists)
    for item in ("0", "/dev/video0"):
        _, (camera,) = find_inputs([item], folder / "out")
        assert camera.source == "/dev/video0" and str(camera.target) == "camera_video0.mp4"


def test_folders_keep_their_places(folder):
    for name in ("x/a.png", "y/a.png", "x/s/a.bmp", "x/s/a.jpeg", "x/a.mov"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    images, videos = find_inputs(["x", "y", "[x]/s/*.jpeg", "http://h/s/a.ts?k=1"], folder / "out")
    assert [(one.source, str(one.name), str(one.target)) for one in images] == [
        ("x/a.png", "a.png", "a.png"),
        ("x/s/a.bmp", "s/a.bmp", "s/a.jpg"),
        ("x/s/a.jpeg", "s/a.jpeg", "s/a_2.jpg"),
        ("y/a.png", "a_2.png", "a_2.png"),
    ]
    assert [str(one.target) for one in videos] == ["a.mp4", "a_2.mp4"]


@pytest.mark.parametrize("inputs", [["b.jpg"], ["c.mp4"], ["c.mp4", "c.mov"], ["deep"]])
def test_inputs_are_never_overwritten(inputs, folder):
    (folder / "c.mp4").touch()
    (folder / "deep/e.jpg").touch()
    output = folder / "deep" if inputs == ["deep"] else folder
    with pytest.raises(ValueError, match="would overwrite 1 files of --input"):
        find_inputs(inputs, output)


class Server(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.wfile.write(self.answer())

    def answer(self):
        if "other" in self.path:
            self.wfile.write(b"SSH-2.0\r\n")
            return b""
        known = ("/a.png", "/picture?id=3", "/text.jpg", "/a%20%C3%BC.png", "/a%20%C3%BC?id=3")
        found = self.path in known
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "image/png" if found else "video/mp4")
        self.end_headers()
        return b"nothing" if "text" in self.path else PNG

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_web_addresses_of_images_are_images(server, folder):
    names = ("a.png", "picture?id=3", "a ü.png", "a%20ü?id=3", "stream", "other")
    addresses = [f"{server}/{name}" for name in names]
    images, videos = find_inputs(addresses, folder / "out")
    assert [one.source for one in images] == addresses[:4]
    assert [str(one.target) for one in images] == ["a.png", "picture.jpg", "a ü.png", "a ü_2.jpg"]
    assert [one.source for one in videos] == addresses[4:]
    for one in images:
        assert read_image(one.source).shape == (4, 6, 3)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/absent.jpg", "404"), ("/text.jpg", "not an image"), ("/other.jpg", "SSH-2.0")],
)
def test_an_address_without_image_is_named(server, path, message):
    with pytest.raises(UndecodableImage, match=f"{server}{path}: .*{message}"):
        read_image(server + path)


def test_with_public_only_this_machine_is_not_asked_what_it_has(server, folder, monkeypatch):
    monkeypatch.setattr(Server, "do_HEAD", lambda handler: asked.append(handler.path))
    asked: list[str] = []
    addresses = [f"{server}/a.png", f"{server}/picture?id=3"]
    (image,), (other,) = find_inputs(addresses, folder / "out", public_only=True)
    assert image.public_only and other.public_only and not asked
    with pytest.raises(UndecodableImage, match=rf"^{server}/a.png: .*no public address"):
        read_image(image.source, image.public_only)


def test_large_answers_are_refused(server, monkeypatch):
    monkeypatch.setattr(inputs_module, "MAX_BYTES", 10)
    with pytest.raises(UndecodableImage, match="more than 10 bytes"):
        read_image(f"{server}/a.png")
