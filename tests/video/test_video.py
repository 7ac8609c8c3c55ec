from fractions import Fraction

import av
import numpy as np
import pytest

from mask_rcnn_jax.video import reader as video_module
from mask_rcnn_jax.video import writer as writer_module
from mask_rcnn_jax.video.reader import UnreadableVideo, Video
from mask_rcnn_jax.video.writer import VideoWriter
from tests.video.videos import frame_image, turn, write_sound, write_video

CODECS = {
    "h264.mp4": ("libx264", {}),
    "h264.mkv": ("libx264", {}),
    "h264.ts": ("libx264", {}),
    "h265.mp4": ("libx265", {"options": {"preset": "ultrafast", "x265-params": "log-level=0"}}),
    "vp9.webm": ("libvpx-vp9", {"options": {"deadline": "realtime", "cpu-used": "8"}}),
    "mpeg4.avi": ("mpeg4", {"options": {"qscale": "2"}}),
    "mjpeg.mov": ("mjpeg", {"pixel_format": "yuvj420p"}),
}


@pytest.mark.parametrize("name", CODECS)
def test_codecs_give_all_frames_with_rate_and_content(name, tmp_path):
    codec, options = CODECS[name]
    video = Video(str(write_video(tmp_path / name, 100, codec, **options)))
    assert video.rate == 25
    assert abs(video.expected_frames(1, 0) - 100) <= (0 if name.endswith(("mp4", "avi")) else 1)
    count = 0
    for count, frame in enumerate(video.frames(), start=1):
        assert frame.number == count - 1
        assert abs(frame.time - Fraction(frame.number, 25)) <= Fraction(1, 1000)
        assert frame.image.shape == (48, 64, 3) and frame.image.dtype == np.uint8
        difference = frame.image.astype(int) - frame_image(frame.number, 48, 64)
        assert np.abs(difference).mean() < 6
    assert count == video.frames_read == 100
    assert video.damaged == 0


@pytest.mark.parametrize(
    "stride, max_frames, numbers",
    [(1, 3, [0, 1, 2]), (4, 0, [0, 4, 8]), (4, 2, [0, 4]), (20, 0, [0]), (1, 99, [*range(10)])],
)
def test_stride_and_max_frames(stride, max_frames, numbers, tmp_path):
    video = Video(str(write_video(tmp_path / "a.mp4", 10)))
    frames = list(video.frames(stride, max_frames))
    assert [frame.number for frame in frames] == numbers
    assert [frame.time for frame in frames] == [Fraction(number, 25) for number in numbers]
    assert video.expected_frames(stride, max_frames) == video.frames_read == len(numbers)


@pytest.mark.parametrize(
    "matrix, quarters", [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_container_rotation_is_applied(matrix, quarters, tmp_path):
    """The matrix maps stored to displayed points; rot90 rotates counterclockwise."""
    path = write_video(tmp_path / "a.mp4", 3)
    stored = [frame.image for frame in Video(str(path)).frames()]
    turn(path, matrix)
    a, b, c, d = matrix
    for frame, image in zip(Video(str(path)).frames(), stored, strict=True):
        assert frame.image.flags.c_contiguous
        height, width = frame.image.shape[:2]
        assert (height, width) == ((64, 48) if a == 0 else (48, 64))
        np.testing.assert_array_equal(frame.image, np.rot90(image, quarters))
        y, x = 10, 3  # map one pixel with the matrix, relative to the image center
        u, v = x - 31.5, y - 23.5
        shown_x, shown_y = a * u + c * v + (width - 1) / 2, b * u + d * v + (height - 1) / 2
        np.testing.assert_array_equal(frame.image[int(shown_y), int(shown_x)], image[y, x])


def test_variable_frame_times_are_kept(tmp_path):
    ticks = [0, 40, 200, 210, 800, 1600]
    source = write_video(tmp_path / "a.mkv", len(ticks), ticks=ticks)
    video = Video(str(source))
    frames = list(video.frames())
    assert [round(1000 * frame.time) for frame in frames] == ticks
    write_frames(tmp_path / "b.mp4", frames, video)
    copied = list(Video(str(tmp_path / "b.mp4")).frames())
    assert [round(1000 * frame.time) for frame in copied] == ticks


def write_frames(path, frames, video):
    height, width = frames[0].image.shape[:2]
    writer = VideoWriter(path, height, width, video.rate, video.pixel_aspect)
    for frame in frames:
        writer.write(frame.image, frame.time)
    writer.close()


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
@pytest.mark.parametrize("rate", [Fraction(25), Fraction(30000, 1001), Fraction(24000, 1001)])
def test_output_plays_in_browsers_at_the_same_rate(rate, suffix, tmp_path):
    """Matroska rounds times to milliseconds; written times are exact again."""
    source = Video(str(write_video(tmp_path / f"a{suffix}", 40, rate=rate)))
    assert source.rate == rate
    write_frames(tmp_path / "out.mp4", list(source.frames()), source)
    content = (tmp_path / "out.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")
    with av.open(str(tmp_path / "out.mp4")) as container:
        (stream,) = container.streams
        context = stream.codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert context.profile in ("High", "Main", "Constrained Baseline")
        assert stream.average_rate == rate and stream.frames == 40
        times = [frame.pts * frame.time_base for frame in container.decode(stream)]
    assert times == [number / rate for number in range(40)]


@pytest.mark.parametrize("size", [(47, 63), (48, 63), (2, 2), (1, 1)])
def test_odd_sides_get_one_more_pixel(size, tmp_path):
    height, width = size
    image = np.random.default_rng(0).integers(60, 200, (1, 1, 3), np.uint8).repeat(height, 0)
    image = image.repeat(width, 1)
    writer = VideoWriter(tmp_path / "a.mp4", height, width, Fraction(25), Fraction(1))
    for number in range(3):
        writer.write(image, Fraction(number, 25))
    writer.close()
    for frame in Video(str(tmp_path / "a.mp4")).frames():
        assert frame.image.shape == (height + height % 2, width + width % 2, 3)
        assert (
            np.abs(frame.image.astype(int) - image[0, 0]).max() <= 6
        )  # including the added row and column


def test_colors_and_pixel_aspect_are_kept(tmp_path):
    image = np.zeros((64, 96, 3), np.uint8)
    for column, color in enumerate([(210, 30, 40), (30, 190, 60), (20, 60, 220)]):
        image[:, 32 * column : 32 * column + 32] = color
    writer = VideoWriter(tmp_path / "a.mp4", 64, 96, Fraction(25), Fraction(16, 15))
    writer.write(image, Fraction(0))
    writer.close()
    video = Video(str(tmp_path / "a.mp4"))
    assert video.pixel_aspect == Fraction(16, 15)
    (frame,) = video.frames()
    middle = frame.image[32, [16, 48, 80]].astype(int)
    assert np.abs(middle - image[32, [16, 48, 80]]).max() <= 4
    with av.open(str(tmp_path / "a.mp4")) as container:  # BT.709, as HD video
        assert container.streams.video[0].codec_context.colorspace == 1


@pytest.mark.parametrize("rate", [Fraction(25), Fraction(1_000_000, 33_333), Fraction(65_537)])
@pytest.mark.parametrize("size", [(48, 64), (1, 1), (47, 333)])
def test_without_h264_it_is_mpeg4(tmp_path, monkeypatch, caplog, size, rate):
    """As in a build of FFmpeg under the LGPL, on a machine without an encoder."""
    monkeypatch.setattr("mask_rcnn_jax.video.writer.ENCODERS", ("libx264_absent", "mpeg4"))
    caplog.set_level("INFO")
    path = tmp_path / "a.mp4"
    writer = VideoWriter(path, *size, rate, Fraction(1))
    image = np.full((*size, 3), (200, 60, 90), np.uint8)
    for number in range(5):
        writer.write(image, number / rate)
    writer.close()
    assert (
        f"{path}: written by the encoder mpeg4: MPEG-4, which browsers do not play" in caplog.text
    )
    frames = list(Video(str(path)).frames())
    assert len(frames) == 5 and np.abs(frames[-1].image.astype(int) - image[0, 0]).max() <= 8
    assert [float(f.time) for f in frames] == pytest.approx(
        [n / float(rate) for n in range(5)], abs=1e-3
    )


def test_an_encoder_that_is_listed_and_does_not_work_is_passed_over(tmp_path, monkeypatch):
    """PyAV's wheels list those of hardware that is not there."""
    listed = [name for name in writer_module.ENCODERS if name != "libx264"]
    monkeypatch.setattr(writer_module, "ENCODERS", listed)
    writer = VideoWriter(tmp_path / "a.mp4", 16, 16, Fraction(25), Fraction(1))
    writer.write(np.zeros((16, 16, 3), np.uint8), Fraction(0))
    writer.close()
    assert len(list(Video(str(tmp_path / "a.mp4")).frames())) == 1


def test_no_encoder_at_all_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "ENCODERS", ("libx264_absent",))
    with pytest.raises(ValueError, match="a.mp4: PyAV's FFmpeg has no encoder for it, expected"):
        VideoWriter(tmp_path / "a.mp4", 16, 16, Fraction(25), Fraction(1))
    assert not (tmp_path / "a.mp4").exists()


def test_only_a_video_that_ends_before_its_time_is_short(tmp_path):
    """Screens are recorded where something moves: Matroska says how long, not how many frames."""
    ticks = [0, 33, 66, 500, 533, 2000, 2033, 2066]
    path = write_video(tmp_path / "a.mkv", 8, rate=30, ticks=ticks, options={"bf": "0"})
    video = Video(str(path))
    wanted = video.expected_frames(1, 0)
    assert wanted > 60
    assert [round(1000 * float(frame.time)) for frame in video.frames()] == ticks
    assert not video.is_short(8, wanted)
    assert len(list(video.frames(max_frames=5))) == 5 and video.is_short(5, wanted)


def test_repeated_times_are_moved_forward(tmp_path):
    writer = VideoWriter(tmp_path / "a.mp4", 16, 16, Fraction(25), Fraction(1))
    for time in (0, 0, Fraction(1, 25), 0):
        writer.write(np.zeros((16, 16, 3), np.uint8), Fraction(time))
    writer.close()
    assert len(list(Video(str(tmp_path / "a.mp4")).frames())) == 4


def test_truncated_video_gives_its_remaining_frames(tmp_path):
    """The second half of the file is missing; its index is at the start."""
    options = {"container_options": {"movflags": "+faststart"}, "size": (96, 128)}
    path = write_video(tmp_path / "a.mp4", 100, "mjpeg", pixel_format="yuvj420p", **options)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    video = Video(str(path))
    frames = list(video.frames())
    assert video.num_frames == 100
    assert 30 < len(frames) == video.frames_read < 70
    difference = frames[20].image.astype(int) - frame_image(20, 96, 128)
    assert np.abs(difference).mean() < 6


def test_damage_only_loses_the_affected_frames(tmp_path):
    path = write_video(tmp_path / "a.avi", 60, "mjpeg", pixel_format="yuvj420p", size=(96, 128))
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    for packet in packets[20:23]:
        content[packet.pos : packet.pos + packet.size] = bytes(packet.size)
    path.write_bytes(content)
    video = Video(str(path))
    frames = list(video.frames())
    assert len(frames) == 57 and video.damaged == 3
    assert np.abs(frames[-1].image.astype(int) - frame_image(59, 96, 128)).mean() < 6


def zero_frames(path):
    write_video(path, 0)


FAULTS = {
    "absent": (lambda path: None, "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "Invalid data"),
    "text": (lambda path: path.write_text("no video at all\n" * 50), "Invalid data"),
    "index cut off": (lambda path: cut(write_video(path, 30)), "Invalid data"),
    "sound only": (write_sound, "holds no video, only audio"),
    "no frame": (zero_frames, ""),
}


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("fault", FAULTS)
def test_file_without_frames_is_named(fault, tmp_path):
    make, words = FAULTS[fault]
    path = tmp_path / "clip.mp4"
    make(path)
    with pytest.raises(UnreadableVideo) as caught:
        list(Video(str(path)).frames())
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unwritable_video_is_named(tmp_path):
    writer = None
    with pytest.raises(OSError, match="gone/a.mp4"):
        writer = VideoWriter(tmp_path / "gone" / "a.mp4", 16, 16, Fraction(25), Fraction(1))
        writer.write(np.zeros((16, 16, 3), np.uint8), Fraction(0))
        writer.close()


def test_urls_are_read_like_files(tmp_path):
    path = write_video(tmp_path / "a.mp4", 5)
    assert len(list(Video(f"file://{path}").frames())) == 5


def test_a_title_that_is_not_utf8_does_no_harm(tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "TITLE1"
        stream = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        frame = av.VideoFrame.from_ndarray(frame_image(0, 48, 64), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    content = path.read_bytes()
    assert b"TITLE1" in content
    path.write_bytes(content.replace(b"TITLE1", "TITLÉ1".encode("latin-1")))
    assert len(list(Video(str(path)).frames())) == 1


@pytest.mark.slow
def test_a_changed_header_gives_frames_or_names_the_video(tmp_path):
    path, rng = write_video(tmp_path / "a.mp4", 3), np.random.default_rng(0)
    content = path.read_bytes()
    start = content.index(b"moov")
    outcomes = {True: 0, False: 0}
    for _ in range(150):
        changed = bytearray(content)
        for place in rng.integers(start, len(content), 3):
            changed[place] = rng.choice([0, 0xFF, rng.integers(256)])
        path.write_bytes(changed)
        try:
            outcomes[True] += len(list(Video(str(path)).frames(max_frames=3))) > 0
        except UnreadableVideo as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            outcomes[False] += 1
    assert min(outcomes.values()) > 5


def test_any_error_of_pyav_names_the_video(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 3)
    monkeypatch.setattr("mask_rcnn_jax.video.reader._rate", lambda stream: 1 // 0)
    with pytest.raises(UnreadableVideo, match=r"a\.mp4: not a readable video: integer division"):
        Video(str(path))
    monkeypatch.undo()
    video = Video(str(path))
    monkeypatch.setattr("mask_rcnn_jax.video.reader._upright", lambda *_: None + 1)
    with pytest.raises(UnreadableVideo, match=r"a\.mp4: unsupported operand"):
        list(video.frames())


@pytest.fixture
def pauses(monkeypatch):
    """Every file is a live source; the pauses taken."""
    taken = []
    monkeypatch.setattr(video_module, "_LIVE_SCHEMES", ("/",))
    monkeypatch.setattr(video_module, "sleep", taken.append)
    return taken


def test_a_live_source_that_ends_is_opened_again(pauses, tmp_path):
    video = Video(str(write_video(tmp_path / "a.mp4", 4, rate=30)))
    frames = list(video.frames(max_frames=10))
    assert [frame.number for frame in frames] == [*range(10)]
    assert [frame.time for frame in frames] == [Fraction(n, 30) for n in range(10)]
    assert pauses == [1.0, 1.0] and video.frames_read == 10


def test_a_live_source_that_stays_away_ends_after_the_last_pause(pauses, tmp_path):
    path = write_video(tmp_path / "a.mp4", 4)
    video = Video(str(path))
    found = []
    for frame in video.frames():
        found.append(frame.number)
        path.unlink(missing_ok=True)
    assert found == [0, 1, 2, 3]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0] and video.damaged == 1


def test_a_live_source_that_never_answers_is_unreadable(pauses, tmp_path):
    path = write_video(tmp_path / "a.mp4", 4)
    video = Video(str(path))
    path.write_bytes(b"nothing")
    with pytest.raises(UnreadableVideo, match=r"a\.mp4: "):
        list(video.frames())
    assert len(pauses) == 5


@pytest.mark.parametrize(
    ("source", "live"),
    [("rtsp://h/1", True), ("/dev/video0", True), ("http://h/a.mp4", False), ("a.mp4", False)],
)
def test_cameras_and_streams_are_live(source, live):
    video = Video.__new__(Video)
    video.source = source
    assert video.is_live == live
