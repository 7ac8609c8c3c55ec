"""Which containers are opened, from files and over http; lists of other files are not followed."""

import contextlib
import re

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.network import Limits
from mask_rcnn_jax.video import containers
from mask_rcnn_jax.video.reader import UnreadableVideo, Video
from tests.video.videos import write_video
from tests.web_server import redirect, serving

LISTS = {
    "ffconcat": "ffconcat version 1.0\nfile a.mp4\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\na.ts\n#EXT-X-ENDLIST\n",
    "dash": "<?xml version='1.0'?>\n<MPD xmlns='urn:mpeg:dash:schema:mpd:2011'></MPD>\n",
    "sdp": "v=0\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5000 RTP/AVP 96\n",
    "imf": "<?xml version='1.0'?>\n<CompositionPlaylist></CompositionPlaylist>\n",
}


def count(source, **options) -> int:
    return len(list(Video(str(source), **options).frames()))


@pytest.mark.parametrize(
    "name, codec",
    [
        *(
            (f"a.{suffix}", "libx264")
            for suffix in ("mp4", "mov", "mkv", "ts", "flv", "m4v", "3gp")
        ),
        *((f"a.{suffix}", "mpeg4") for suffix in ("avi", "nut", "wtv")),
        *(("a.mpg", "mpeg2video"), ("a.webm", "libvpx"), ("a.ogv", "libvpx"), ("a.wmv", "wmv2")),
        *(
            ("a.h264", "libx264"),
            ("a.ivf", "libvpx"),
            ("a.mxf", "mpeg2video"),
            ("a.y4m", "rawvideo"),
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_containers_are_known_by_their_content(name, codec, suffix, tmp_path):
    path = write_video(tmp_path / name, 6, codec)
    assert count(path.rename(tmp_path / (name + suffix))) == 6


@pytest.mark.parametrize("name, pixels", [("a.gif", "rgb8"), ("a.apng", "rgb24")])
def test_moving_pictures_are_videos(name, pixels, tmp_path):
    path = write_video(tmp_path / name, 6, name[2:], pixel_format=pixels)
    assert count(path) == 6


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("path", ["clip.mp4", "clip", "clip.m3u8.mp4"])
def test_a_list_of_files_is_no_video(name, path, tmp_path):
    write_video(tmp_path / "a.mp4", 3)
    write_video(tmp_path / "a.ts", 3)
    (tmp_path / path).write_text(LISTS[name])
    words = rf"^{re.escape(str(tmp_path / path))}: not a readable video: [^\n]+$"
    with pytest.raises(UnreadableVideo, match=words) as caught:
        Video(str(tmp_path / path))
    if name in ("ffconcat", "sdp"):  # FFmpeg knows the others by their names alone
        assert "lists of other files are not" in str(caught.value)


def test_a_playlist_whose_name_says_so_is_followed(tmp_path):
    write_video(tmp_path / "a.ts", 5)
    (tmp_path / "a.m3u8").write_text(LISTS["hls"])
    assert count(tmp_path / "a.m3u8") == 5


@pytest.fixture
def server():
    with serving() as server:
        yield server


def offer(server, path: str, content: bytes, **headers: str) -> str:
    """Serve content with ranges; return its address."""

    def answer(handler):
        start = int(re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "bytes=0-")[1])
        place = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.send(content[start:], 206, Content_Range=place, **headers)

    server.answers[path] = answer
    return server.url(path)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "ts"])
def test_a_video_is_read_over_http(suffix, server, tmp_path):
    """The index of the mp4 is at its end."""
    path = write_video(tmp_path / f"a.{suffix}", 40, "mpeg4", size=(240, 320))
    address = offer(server, f"/a.{suffix}", path.read_bytes())
    server.answers["/moved"] = redirect(address)
    expected, found = Video(str(path)), Video(server.url("/moved"))
    assert found.expected_frames(1, 0) == expected.expected_frames(1, 0)
    for one, other in zip(found.frames(), expected.frames(), strict=True):
        assert one.time == other.time and np.array_equal(one.image, other.image)


def test_a_server_without_ranges_will_do(server, tmp_path):
    path = write_video(tmp_path / "a.mp4", 9, container_options={"movflags": "+faststart"})
    server.answers["/a"] = lambda handler: handler.send(path.read_bytes())
    assert count(server.url("/a")) == 9


def test_a_camera_that_sends_pictures_without_end(server):
    picture = cv2.imencode(".jpg", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
    part = f"--next\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n".encode()

    def pictures(handler):
        handler.send(b"", Content_Type="multipart/x-mixed-replace;boundary=next")
        while not handler.server.ended.wait(0.001):
            handler.wfile.write(part + picture + b"\r\n")

    server.answers["/camera"] = pictures
    frames = list(Video(server.url("/camera")).frames(max_frames=20))
    assert len(frames) == 20 and frames[0].image.shape == (48, 64, 3)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_ends_early_leaves_its_frames(ranges, server, tmp_path, caplog):
    options = {"container_options": {"movflags": "+faststart"}, "size": (96, 128)}
    path = write_video(tmp_path / "a.mp4", 60, "mjpeg", pixel_format="yuvj420p", **options)
    content = path.read_bytes()

    def cut(handler):
        place = f"bytes 0-{len(content) - 1}/{len(content)}"
        whole = {"Content_Length": str(len(content))}
        status, headers = (206, {"Content_Range": place}) if ranges else (200, whole)
        handler.send(content[: len(content) // 2], status, **headers)

    server.answers["/cut"] = cut
    video = Video(server.url("/cut"))
    assert 15 < len(list(video.frames())) < 45 and video.damaged == 1
    assert f"/cut: the connection ended after {len(content) // 2} of" in caplog.text


@pytest.mark.parametrize("size", [2**62, 10**30])
def test_a_server_that_lies_about_the_size_gets_one_line(size, server, tmp_path, capfd):
    content = write_video(tmp_path / "a.mp4", 9).read_bytes()
    place = f"bytes 0-{len(content) - 1}/{size}"
    server.answers["/a"] = lambda handler: handler.send(content, 206, Content_Range=place)
    with contextlib.suppress(UnreadableVideo):
        count(server.url("/a"))
    assert "Traceback" not in capfd.readouterr().err


def test_a_video_that_drips_ends(server, tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "_LIMITS", Limits(window=0.2))
    content = write_video(tmp_path / "a.mp4", 3).read_bytes()

    def drip(handler):
        handler.send(b"")
        handler.drip(content)

    server.answers["/drip"] = drip
    words = r"/drip: not a readable video: the server sent \d+ bytes in 0 seconds, fewer than 1000"
    with pytest.raises(UnreadableVideo, match=words):
        Video(server.url("/drip"))


@pytest.mark.parametrize("path", ["/list.m3u8", "/live"])
def test_a_playlist_is_followed_unless_its_addresses_must_be_public(path, server, tmp_path):
    address = offer(server, path, LISTS["hls"].encode(), Content_Type="application/x-mpegurl")
    offer(server, "/a.ts", write_video(tmp_path / "a.ts", 5).read_bytes())
    assert count(address) == 5
    server.requests.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mask_rcnn_jax.network.is_public", lambda _: True)
        with pytest.raises(
            UnreadableVideo, match="a playlist, whose addresses would not be checked"
        ):
            Video(address, public_only=True)
    assert [asked for asked, _ in server.requests] == [path]


@pytest.mark.parametrize("name", ["ffconcat", "sdp", "imf"])
def test_other_lists_are_not_followed_over_http(name, server, tmp_path):
    address = offer(server, "/list.mp4", LISTS[name].encode())
    with pytest.raises(UnreadableVideo, match=r"/list\.mp4: not a readable video: "):
        Video(address)
    assert {asked for asked, _ in server.requests} == {"/list.mp4"}


@pytest.mark.parametrize(
    "address",
    ["rtsp://127.0.0.1:9/a", "udp://127.0.0.1:9", "tcp://127.0.0.1:9", "file:///etc/hostname"],
)
def test_with_public_only_nothing_but_http_is_read(address):
    with pytest.raises(UnreadableVideo, match=f"{address}: .*: no address of http or https"):
        Video(address, public_only=True)


def test_with_public_only_videos_of_this_machine_are_refused(server, tmp_path):
    path = write_video(tmp_path / "a.mp4", 5)
    address = offer(server, "/a.mp4", path.read_bytes())
    with pytest.raises(UnreadableVideo, match="127.0.0.1 is at 127.0.0.1, no public address"):
        Video(address, public_only=True)
    assert not server.requests and count(path, public_only=True) == 5
