"""Downloads from a server on this machine that breaks off, lies, or knows no ranges."""

import hashlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from mask_rcnn_jax.data import download as download_module
from mask_rcnn_jax.data.download import PUBLIC_WEIGHTS, download, download_weights

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = 1_400_000


class Handler(BaseHTTPRequestHandler):
    """Serves `server.content` at /file. `server.cut`: bytes after which the connection ends."""

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append(asked)
        if self.path != "/file":
            self.send_error(404)
            return
        start = 0
        if asked and server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if server.cut is None else body[: server.cut])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.cut, server.ranges, server.requests = CONTENT, None, True, []
    server.url = f"http://127.0.0.1:{server.server_port}/file"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("digits", [8, 64])
def test_arrives_whole_and_is_not_fetched_again(server, tmp_path, digits):
    path = tmp_path / "new" / "weights.pth"
    for _ in range(2):
        assert download(server.url, path, sha256=SHA256[:digits]) == path
        assert path.read_bytes() == CONTENT
    assert server.requests == [None]
    assert files(path.parent) == ["weights.pth"]


def test_progress_adds_up_to_the_whole_file(server, tmp_path):
    totals, counts = [], []

    def progress_of(total):
        totals.append(total)
        return counts.append

    (tmp_path / "w.part").write_bytes(CONTENT[:HALF])
    download(server.url, tmp_path / "w", sha256=SHA256, progress_of=progress_of)
    assert totals == [len(CONTENT)]
    assert counts[0] == HALF and sum(counts) == len(CONTENT)


def test_broken_connection_leaves_only_what_the_next_call_goes_on_from(server, tmp_path):
    server.cut = HALF
    with pytest.raises(OSError, match=rf"{server.url}: .* after {HALF} of {len(CONTENT)} bytes"):
        download(server.url, tmp_path / "w", sha256=SHA256)
    assert files(tmp_path) == ["w.part"]
    server.cut = None
    download(server.url, tmp_path / "w", sha256=SHA256)
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert server.requests == [None, f"bytes={HALF}-"]
    assert files(tmp_path) == ["w"]


def test_server_without_ranges_starts_over(server, tmp_path):
    server.ranges = False
    (tmp_path / "w.part").write_bytes(CONTENT[:HALF])
    download(server.url, tmp_path / "w", sha256=SHA256)
    assert (tmp_path / "w").read_bytes() == CONTENT


def test_complete_part_is_only_checked(server, tmp_path):
    (tmp_path / "w.part").write_bytes(CONTENT)
    download(server.url, tmp_path / "w", sha256=SHA256)
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert server.requests == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("part", [None, b"x" * HALF, b"x" * (len(CONTENT) + 1)])
def test_wrong_checksum_leaves_nothing(server, tmp_path, part):
    wrong = SHA256 if part else "0" * 8
    if part:
        (tmp_path / "w.part").write_bytes(part)
    with pytest.raises(ValueError, match=rf"{server.url} has sha256 \w+, expected {wrong}"):
        download(server.url, tmp_path / "w", sha256=wrong)
    assert files(tmp_path) == []


def test_wrong_file_in_its_place_is_replaced_only_by_the_right_one(server, tmp_path):
    path = tmp_path / "w"
    path.write_bytes(b"old")
    server.cut = HALF
    with pytest.raises(OSError):
        download(server.url, path, sha256=SHA256)
    assert path.read_bytes() == b"old"
    server.cut = None
    download(server.url, path, sha256=SHA256)
    assert path.read_bytes() == CONTENT


def test_missing_file_and_missing_server_are_named(server, tmp_path):
    url = server.url.replace("/file", "/other")
    with pytest.raises(OSError, match=f"{url}: HTTP Error 404"):
        download(url, tmp_path / "w", sha256=SHA256)
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:9/file: .*refused"):
        download("http://127.0.0.1:9/file", tmp_path / "w", sha256=SHA256)
    assert files(tmp_path) == []


@pytest.mark.parametrize("sha256", ["", "abc", "0676BA61", "xyzxyzxyz", "0" * 65])
def test_checksum_must_be_one(tmp_path, sha256):
    with pytest.raises(ValueError, match="expected 8 to 64 hexadecimal digits"):
        download("http://127.0.0.1:9/", tmp_path / "w", sha256=sha256)


def test_weights_by_name(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "PUBLIC_WEIGHTS", {"some": (server.url, SHA256[:8])})
    assert download_weights("some", tmp_path) == tmp_path / "file"
    assert (tmp_path / "file").read_bytes() == CONTENT
    with pytest.raises(ValueError, match=r"called 'other', expected one of \['some'\]"):
        download_weights("other", tmp_path)


@pytest.mark.parametrize("name", PUBLIC_WEIGHTS)
def test_file_names_carry_their_checksum(name):
    url, sha256 = PUBLIC_WEIGHTS[name]
    assert url.startswith("https://") and url.endswith(f"-{sha256}.pth")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weights"], "needs one name of ['resnet18', "),
        (["weights", "resnet50"], "prepare weights needs --data_dir"),
        (["weights", "resnet51", "--data_dir", "x"], "'resnet51', expected one of ['resnet18', "),
    ],
)
def test_mistake_is_one_line_with_exit_code_2(arguments, words):
    command = [sys.executable, "-m", "mask_rcnn_jax.prepare", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
