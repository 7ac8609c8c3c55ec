"""Downloads from a server on this machine that breaks off, lies, or knows no ranges."""

import hashlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mask_rcnn_jax import download as download_module
from mask_rcnn_jax.download import download
from mask_rcnn_jax.network import Limits
from tests.commands.command import error_line, run_inside
from tests.faults.harness import wait_until

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()
HALF = 1_400_000


@pytest.fixture
def server(file_server):
    file_server.files["/file"] = CONTENT
    return file_server


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("digits", [8, 64])
def test_arrives_whole_and_is_not_fetched_again(server, tmp_path, digits):
    path = tmp_path / "new" / "weights.pth"
    for _ in range(2):
        assert download(server.url("/file"), path, SHA256[: len("sha256:") + digits]) == path
        assert path.read_bytes() == CONTENT
    assert server.requests == [None]
    assert files(path.parent) == ["weights.pth"]


def test_several_processes_fetch_a_file_once(server, tmp_path, caplog):
    """Threads, which hold locks of their own as processes do."""
    started, others = threading.Event(), ThreadPoolExecutor(3)

    def slow(total):
        started.set()
        assert wait_until(lambda: caplog.text.count("waiting for another process") == 3)
        return lambda count: None

    def later():
        started.wait()
        return download(server.url("/file"), tmp_path / "w", SHA256)

    with caplog.at_level("INFO"), others:
        found = [others.submit(later) for _ in range(3)]
        download(server.url("/file"), tmp_path / "w", SHA256, make_progress=slow)
        assert {one.result() for one in found} == {tmp_path / "w"}
    assert server.requests == [None]
    assert files(tmp_path) == ["w"]


def test_progress_adds_up_to_the_whole_file(server, tmp_path):
    totals, counts = [], []

    def bytes_progress(total):
        totals.append(total)
        return counts.append

    (tmp_path / "w.part").write_bytes(CONTENT[:HALF])
    download(server.url("/file"), tmp_path / "w", SHA256, make_progress=bytes_progress)
    assert totals == [len(CONTENT)]
    assert counts[0] == HALF and sum(counts) == len(CONTENT)


def test_broken_connection_leaves_only_what_the_next_call_goes_on_from(server, tmp_path):
    server.cut = HALF
    with pytest.raises(OSError, match=rf"/file: .* after {HALF} of {len(CONTENT)} bytes"):
        download(server.url("/file"), tmp_path / "w", SHA256)
    assert files(tmp_path) == ["w.part"]
    server.cut = None
    download(server.url("/file"), tmp_path / "w", SHA256)
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert server.requests == [None, f"bytes={HALF}-"]
    assert files(tmp_path) == ["w"]


def test_server_without_ranges_starts_over(server, tmp_path):
    server.ranges = False
    (tmp_path / "w.part").write_bytes(CONTENT[:HALF])
    download(server.url("/file"), tmp_path / "w", SHA256)
    assert (tmp_path / "w").read_bytes() == CONTENT


def test_complete_part_is_only_checked(server, tmp_path):
    (tmp_path / "w.part").write_bytes(CONTENT)
    download(server.url("/file"), tmp_path / "w", SHA256)
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert server.requests == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("part", [None, b"x" * HALF, b"x" * (len(CONTENT) + 1)])
def test_wrong_checksum_leaves_nothing(server, tmp_path, part):
    wrong = SHA256.removeprefix("sha256:") if part else "0" * 8
    if part:
        (tmp_path / "w.part").write_bytes(part)
    with pytest.raises(ValueError, match=rf"/file has sha256 \w+, expected {wrong}"):
        download(server.url("/file"), tmp_path / "w", f"sha256:{wrong}")
    assert files(tmp_path) == []


def test_wrong_file_in_its_place_is_replaced_only_by_the_right_one(server, tmp_path):
    path = tmp_path / "w"
    path.write_bytes(b"old")
    server.cut = HALF
    with pytest.raises(OSError):
        download(server.url("/file"), path, SHA256)
    assert path.read_bytes() == b"old"
    server.cut = None
    download(server.url("/file"), path, SHA256)
    assert path.read_bytes() == CONTENT


def test_missing_file_and_missing_server_are_named(server, tmp_path):
    url = server.url("/other")
    with pytest.raises(OSError, match=f"{url}: HTTP Error 404"):
        download(url, tmp_path / "w", SHA256)
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:9/file: .*refused"):
        download("http://127.0.0.1:9/file", tmp_path / "w", SHA256)
    assert files(tmp_path) == []


def test_persistent_download_goes_on_after_breaks(server, tmp_path):
    server.cut = HALF
    path = download(server.url("/file"), tmp_path / "w", MD5, persistent=True)
    assert path.read_bytes() == CONTENT
    assert server.requests == [None, f"bytes={HALF}-", f"bytes={2 * HALF}-"]


@pytest.mark.parametrize("ranges, cut", [(True, 1000), (False, HALF)], ids=["little", "no ranges"])
def test_persistent_download_ends_without_progress(server, tmp_path, ranges, cut):
    server.cut, server.ranges = cut, ranges
    with pytest.raises(OSError, match=f"/file: the connection ended after {cut} of {len(CONTENT)}"):
        download(server.url("/file"), tmp_path / "w", MD5, persistent=True)
    assert files(tmp_path) == ["w.part"] and len(server.requests) <= 2


@pytest.mark.parametrize("length", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_another_length_than_the_known_one_is_refused_at_once(server, tmp_path, length):
    server.length = length
    words = f"/file: the server offers {length} bytes, expected {len(CONTENT)}"
    with pytest.raises(OSError, match=words):
        download(server.url("/file"), tmp_path / "w", MD5, size=len(CONTENT))
    assert files(tmp_path) == []


def test_without_a_length_the_known_one_counts(server, tmp_path):
    server.says_length = False
    path = download(server.url("/file"), tmp_path / "w", MD5, size=len(CONTENT))
    assert path.read_bytes() == CONTENT
    server.cut = HALF
    with pytest.raises(OSError, match=f"ended after {HALF} of {len(CONTENT)} bytes"):
        download(server.url("/file"), tmp_path / "v", MD5, size=len(CONTENT))
    server.cut, server.files["/file"] = None, CONTENT * 2
    with pytest.raises(OSError, match=f"the server sent more than {len(CONTENT)} bytes"):
        download(server.url("/file"), tmp_path / "v", MD5, size=len(CONTENT))
    assert files(tmp_path) == ["w"]


def test_part_of_the_known_length_is_only_checked_and_a_longer_one_is_no_part(server, tmp_path):
    (tmp_path / "w.part").write_bytes(CONTENT)
    download(server.url("/file"), tmp_path / "w", MD5, size=len(CONTENT))
    assert server.requests == []
    (tmp_path / "v.part").write_bytes(CONTENT + b"x")
    download(server.url("/file"), tmp_path / "v", MD5, size=len(CONTENT))
    assert server.requests == [None]
    assert files(tmp_path) == ["v", "w"]


def test_another_range_than_asked_for_is_refused(server, tmp_path):
    server.shift = 10
    (tmp_path / "w.part").write_bytes(CONTENT[:HALF])
    words = f"sent bytes from {HALF - 10}, expected from {HALF}"
    with pytest.raises(OSError, match=words):
        download(server.url("/file"), tmp_path / "w", MD5)
    assert (tmp_path / "w.part").read_bytes() == CONTENT[:HALF]


def test_full_disk_is_one_line(server, tmp_path, monkeypatch):
    (tmp_path / "w.part").symlink_to("/dev/full")  # a device on which every write fails
    with pytest.raises(OSError, match="/file: .*No space left on device"):
        download(server.url("/file"), tmp_path / "w", MD5, persistent=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match="/file: .*: 3,000,000 bytes are needed, 1,000 are free"):
        download(server.url("/file"), tmp_path / "v", MD5)
    assert files(tmp_path) == ["w.part"]


@pytest.mark.parametrize(
    "checksum",
    [
        *("", "sha256:", "sha256:abc", "sha256:0676BA61", "sha256:xyzxyzxyz", "sha256:" + "0" * 65),
        *("md5:abc", "md5:" + "0" * 33, "sha1:" + "0" * 40, SHA256.removeprefix("sha256:")),
    ],
)
def test_checksum_must_be_one(tmp_path, checksum):
    words = f"checksum is '{checksum}', expected 'sha256:' and 8 to 64 .* or 'md5:' and 32"
    with pytest.raises(ValueError, match=words):
        download("http://127.0.0.1:9/", tmp_path / "w", checksum)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weights", "resnet18", "resnet50"], "needs one name, or none to list all"),
        (["weights", "resnet50"], "prepare weights needs --data_dir"),
        (["weights", "yolo", "--data_dir", "x"], "expected one that `prepare weights` lists"),
        (
            ["weights", "resnet51", "--data_dir", "x"],
            "unknown weights 'resnet51', did you mean 'resnet50'?",
        ),
    ],
)
def test_mistake_is_one_line_with_exit_code_2(arguments, words, capsys):
    code = run_inside("prepare", *arguments)
    assert words in error_line(code, capsys.readouterr().err)


def test_a_server_that_drips_is_given_up(server, tmp_path, monkeypatch):
    """Each byte comes long before the time without data is over."""
    monkeypatch.setattr(download_module, "_LIMITS", Limits(window=0.3))
    server.pause = 0.02
    says = r"/file: the server sent \d+ bytes in 0 seconds, fewer than 1000 a second; retry"
    with pytest.raises(OSError, match=says):
        download(server.url("/file"), tmp_path / "w", SHA256)
    part = (tmp_path / "w.part").read_bytes()
    assert 0 < len(part) < 100 and CONTENT.startswith(part)
    server.pause = 0.0
    assert download(server.url("/file"), tmp_path / "w", SHA256).read_bytes() == CONTENT
