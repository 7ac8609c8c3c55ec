"""Read video frames with PyAV and write H.264 mp4 files that browsers can play."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Seconds. Containers with millisecond timestamps round a frame's time by up to 0.5 ms.
_ROUNDING = Fraction(6, 10_000)
_MAX_RATE = 1000
_DEFAULT_RATE = Fraction(25)
_TIMEOUT = (20.0, 20.0)  # seconds to open a network stream and to wait for a packet


class UnreadableVideo(ValueError):
    """A file or URL without any readable frame."""


class VideoFrame(NamedTuple):
    """A decoded, upright frame."""

    image: np.ndarray  # uint8 [H, W, 3] RGB
    number: int  # 0-based index in the video
    time: Fraction  # seconds since the first frame


class Video:
    """Video in a file or at a URL; nothing stays open between calls.

    Attributes:
        rate: frames per second.
        num_frames: as the container states or by its duration; None if unknown.
        pixel_aspect: width / height of a stored pixel; 1 if the file says nothing or nonsense.
        frames_read: frames yielded by the last `frames`, once it has ended; None before.
        damaged: number of packets that could not be decoded.

    Raises:
        UnreadableVideo: if the source contains no readable video.
        ValueError: if PyAV is not installed.
    """

    def __init__(self, source: str):
        av = import_av()
        self.source = source
        self.frames_read: int | None = None
        self.damaged = 0
        try:
            with _open(av, source) as container:
                stream = _video_stream(av, container, source)
                self.rate = _rate(stream)
                self.num_frames = stream.frames or _frames_by_duration(stream, self.rate)
                self.pixel_aspect = _pixel_aspect(stream)
        except UnreadableVideo:
            raise
        except Exception as error:  # PyAV raises almost any for what a hostile file says of itself
            raise UnreadableVideo(f"{source}: not a readable video: {_reason(error)}") from error

    def expected_frames(self, stride: int, max_frames: int) -> int | None:
        """Expected number of frames from `frames`; None if the container does not tell."""
        if self.num_frames is None:
            return max_frames or None
        count = -(-self.num_frames // stride)
        return min(count, max_frames) if max_frames else count

    def frames(self, stride: int = 1, max_frames: int = 0) -> Iterator[VideoFrame]:
        """Yield every `stride`-th frame, at most `max_frames` (0: all), resized to the first.

        Undecodable packets are counted in `damaged` and skipped. Raises UnreadableVideo if no frame
        can be decoded.
        """
        av = import_av()
        count, size = 0, None
        try:
            with _open(av, self.source) as container:
                stream = _video_stream(av, container, self.source)
                stream.thread_type = "AUTO"
                times = _FrameTimes(self.rate, by_dts=container.format.name == "avi")
                for number, frame in enumerate(self._decode(av, container, stream)):
                    time = times.next_time(frame)
                    if number % stride:
                        continue
                    size = size or (frame.width, frame.height, round(frame.rotation / 90) % 4)
                    yield VideoFrame(_upright(frame, *size), number, time)
                    count += 1
                    if count == max_frames:
                        break
        except UnreadableVideo:
            raise
        except Exception as error:
            if not count:
                raise UnreadableVideo(f"{self.source}: {_reason(error)}") from error
            self.damaged += 1
        finally:
            self.frames_read = count
        if not count:
            raise UnreadableVideo(f"{self.source}: holds no decodable frame")

    def _decode(self, av, container, stream) -> Iterator:
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except av.FFmpegError:  # demuxing cannot continue; flush the decoder's frames
                self.damaged += 1
                yield from stream.codec_context.decode(None)
                return
            try:
                frames = packet.decode()
            except av.FFmpegError:
                self.damaged += 1
                continue
            yield from frames


class _FrameTimes:
    """Strictly increasing presentation times in seconds since the first frame."""

    def __init__(self, rate: Fraction, by_dts: bool):
        self._by_dts = by_dts  # AVI only numbers frames in decoding order
        self._interval = 1 / rate
        self._first: Fraction | None = None
        self._last: Fraction | None = None

    def next_time(self, frame) -> Fraction:
        """The container's time or, if it is absent or not later, one interval after the last."""
        ticks = frame.dts if self._by_dts else frame.pts
        following = Fraction(0) if self._last is None else self._last + self._interval
        if ticks is None:
            self._last = following
            return following
        time = ticks * frame.time_base
        if self._first is None:
            self._first = time - following
        time -= self._first
        self._last = following if self._last is not None and time <= self._last else time
        return self._last


class VideoWriter:
    """Write equally sized images as H.264, yuv420p, to an mp4 with its index at the start.

    An odd side is padded by repeating its last row or column. Raises OSError, naming the file, if
    it cannot be written.
    """

    def __init__(self, path: Path, height: int, width: int, rate: Fraction, pixel_aspect: Fraction):
        self._av = import_av()
        self._path = path
        self._rate = rate
        # A frame interval is a whole number of ticks; they are fine enough for variable rates.
        self._time_base = Fraction(1, rate.numerator * -(-10_000 // rate.numerator))
        self._last = -1
        if "libx264" not in self._av.codecs_available:
            raise ValueError(f"{path}: this build of PyAV has no H.264 encoder (libx264)")
        try:
            self._container = self._av.open(str(path), "w", options={"movflags": "+faststart"})
            stream = self._container.add_stream("libx264", rate=rate)
            stream.width, stream.height = width + width % 2, height + height % 2
            stream.pix_fmt = "yuv420p"
            stream.options = {"preset": "veryfast", "crf": "20"}
            context = stream.codec_context
            context.time_base = self._time_base
            context.sample_aspect_ratio = pixel_aspect
            # Set explicitly; players otherwise infer it from the frame height.
            context.colorspace = context.color_primaries = context.color_trc = _BT709
            context.color_range = _LIMITED_RANGE
        except self._av.FFmpegError as error:
            raise self._failure(error) from error
        self._stream = stream

    def write(self, image: np.ndarray, time: Fraction) -> None:
        """Append a uint8 [H, W, 3] RGB image, shown from `time` (seconds) or the next free tick."""
        pad = [(0, side % 2) for side in image.shape[:2]] + [(0, 0)]
        image = np.pad(image, pad, mode="edge") if any(pad[0] + pad[1]) else image
        frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame = frame.reformat(
            format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED_RANGE
        )
        frame.pts = self._last = max(self._ticks(time), self._last + 1)
        frame.time_base = self._time_base
        try:
            self._container.mux(self._stream.encode(frame))
        except self._av.FFmpegError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Flush the encoder and write the index, without which the file cannot be played."""
        try:
            try:
                self._container.mux(self._stream.encode(None))
            finally:
                self._container.close()
        except self._av.FFmpegError as error:
            raise self._failure(error) from error

    def _ticks(self, time: Fraction) -> int:
        nearest = round(time * self._rate) / self._rate
        time = nearest if abs(time - nearest) <= _ROUNDING else time
        return round(time / self._time_base)

    def _failure(self, error: Exception) -> OSError:
        return OSError(f"{self._path}: cannot be written: {_reason(error)}")


# ITU-T H.273 codes; BT.709 has the same code for primaries, transfer and matrix. FFmpeg's code for
# luma in 16..235.
_BT709, _UNSPECIFIED, _BT601 = 1, 2, 5
_OTHER_MATRICES = (_BT709, 4, 7, 9)  # FCC, SMPTE 240M, BT.2020
_LIMITED_RANGE = 1
_HD_HEIGHT = 720


def import_av():
    """Return PyAV. Raises ValueError, naming the extra to install, if it is missing."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need PyAV: pip install 'mask-rcnn-jax[video]'") from error
    return av


def _open(av, source: str):
    # Titles and other metadata need not be UTF-8; nothing here reads them.
    timeout = _TIMEOUT if "://" in source else None
    return av.open(source, timeout=timeout, metadata_errors="replace")


def _video_stream(av, container, source: str):
    """Return the first video stream that is not an attached cover image."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            return stream
    kinds = sorted({stream.type for stream in container.streams}) or ["nothing"]
    raise UnreadableVideo(f"{source}: holds no video, only {', '.join(kinds)}")


def _rate(stream) -> Fraction:
    """Frames per second. Containers without a rate report implausible values, which are ignored."""
    for rate in (stream.average_rate, stream.guessed_rate):
        rounded = Fraction(rate or 0).limit_denominator(1001)
        if 0 < rounded <= _MAX_RATE:
            return rounded
    return _DEFAULT_RATE


def _frames_by_duration(stream, rate: Fraction) -> int | None:
    container = stream.container
    if stream.duration:
        seconds = stream.duration * stream.time_base
    elif container.duration:
        seconds = Fraction(container.duration, 1_000_000)
    else:
        return None
    return max(1, round(seconds * rate))


def _upright(frame, width: int, height: int, turns: int) -> np.ndarray:
    """Convert to RGB [height, width, 3], then rotate by `turns` counterclockwise quarters."""
    image = frame.to_ndarray(
        format="rgb24", width=width, height=height, src_colorspace=_color_matrix(frame)
    )
    return np.ascontiguousarray(np.rot90(image, turns))


def _pixel_aspect(stream) -> Fraction:
    aspect = Fraction(stream.sample_aspect_ratio or 1)
    return aspect if 0 < aspect < 10**6 else Fraction(1)


def _color_matrix(frame) -> int:
    """FFmpeg's code for a frame's color matrix; if unspecified, inferred from the height."""
    if frame.colorspace in _OTHER_MATRICES:
        return frame.colorspace
    return _BT709 if frame.colorspace == _UNSPECIFIED and frame.height >= _HD_HEIGHT else _BT601


def _reason(error: Exception) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text or type(error).__name__
