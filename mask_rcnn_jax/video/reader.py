"""Read frames of video files, network streams and cameras with PyAV."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.video.containers import CAMERA, open_container

_MAX_RATE = 1000
_DEFAULT_RATE = Fraction(25)
_LIVE_SCHEMES = ("rtsp://", "rtsps://", "rtmp://", "rtmps://", "srt://", "udp://")
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before a live source is opened again


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
        source: file or URL.
        name: for records; the file's own name if not given.
        public_only: whether it is read from public addresses alone, see `network.Limits`.
        rate: frames per second.
        num_frames: as the container states or by its duration; None if unknown.
        pixel_aspect: width / height of a stored pixel; 1 if the file says nothing or nonsense.
        frames_read: frames yielded by the last `frames`, once it has ended; None before.
        damaged: number of packets that could not be decoded.
        seconds: its duration, where that alone says how many frames there are; None otherwise.

    Raises:
        UnreadableVideo: if the source contains no readable video.
        ValueError: if PyAV is not installed.
    """

    def __init__(self, source: str, name: str = "", public_only: bool = False):
        av = import_av()
        self.source = source
        self.public_only = public_only
        self.name = name or Path(source).name
        self.frames_read: int | None = None
        self.damaged = 0
        self.seconds: Fraction | None = None
        self._end = Fraction(0)  # of the last frame read
        try:
            with open_container(av, source, public_only) as container:
                stream = _video_stream(av, container, source)
                self.rate = _rate(stream)
                self.num_frames = stream.frames or None
                if not stream.frames and (seconds := _duration(stream)):
                    self.num_frames, self.seconds = max(1, round(seconds * self.rate)), seconds
                self.pixel_aspect = _pixel_aspect(stream)
        except UnreadableVideo:
            raise
        except Exception as error:  # PyAV raises almost any for what a hostile file says of itself
            raise UnreadableVideo(f"{source}: not a readable video: {reason(error)}") from error

    def expected_frames(self, stride: int, max_frames: int) -> int | None:
        """Expected number of frames from `frames`; None if the container does not tell."""
        if self.num_frames is None:
            return max_frames or None
        count = -(-self.num_frames // stride)
        return min(count, max_frames) if max_frames else count

    def is_short(self, count: int, wanted: int) -> bool:
        """Whether `frames` ended before its time. A number of frames that was derived from the
        duration may be off by one, and says little where frames are not evenly spaced."""
        if count >= min(wanted - 1, 0.98 * wanted):
            return False
        return self.seconds is None or self._end < 0.98 * self.seconds - 2 / self.rate

    @property
    def is_live(self) -> bool:
        """Whether it is a camera or a stream that is to be opened again when it breaks off."""
        return self.source.startswith((*_LIVE_SCHEMES, CAMERA))

    def frames(self, stride: int = 1, max_frames: int = 0) -> Iterator[VideoFrame]:
        """Yield every `stride`-th frame, at most `max_frames` (0: all), resized to the first.

        Undecodable packets are counted in `damaged` and skipped. A live source that breaks off is
        opened again, after longer and longer pauses; its frames and times go on. Raises
        UnreadableVideo if no frame can be decoded.
        """
        count, size = 0, None
        try:
            for number, (frame, time) in enumerate(self._all_frames()):
                if number % stride:
                    continue
                size = size or (frame.width, frame.height, round(frame.rotation / 90) % 4)
                self._end = time + (frame.duration or 0) * frame.time_base
                yield VideoFrame(_upright(frame, *size), number, time)
                count += 1
                if count == max_frames:
                    break
        except UnreadableVideo:
            raise
        except Exception as error:
            if not count:
                raise UnreadableVideo(f"{self.source}: {reason(error)}") from error
            self.damaged += 1
        finally:
            self.frames_read = count
        if not count:
            raise UnreadableVideo(f"{self.source}: holds no decodable frame")

    def _all_frames(self) -> Iterator[tuple[Any, Fraction]]:
        """Yield PyAV's frames with their times."""
        av, times = import_av(), _FrameTimes(self.rate)
        pauses = iter(_PAUSES if self.is_live else ())
        while True:
            error = None
            try:
                with open_container(av, self.source, self.public_only) as container:
                    stream = _video_stream(av, container, self.source)
                    stream.thread_type = "AUTO"
                    times.start(by_dts=container.format.name == "avi")
                    for frame in self._decode(av, container, stream):
                        yield frame, times.next_time(frame)
                        pauses = iter(_PAUSES if self.is_live else ())
            except Exception as caught:  # of PyAV, which raises almost any
                error = caught
            pause = next(pauses, None)
            if pause is None:
                if error is not None:
                    raise error
                return
            text = reason(error) if error else "it ended"
            logging.warning("%s: %s; connecting again in %g s", self.source, text, pause)
            sleep(pause)

    def _decode(self, av, container, stream) -> Iterator:
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except (av.FFmpegError, OSError) as error:  # demuxing cannot continue
                if not isinstance(error, av.FFmpegError):
                    logging.warning("%s: %s", self.source, error)
                self.damaged += 1
                # The decoder has frames left.
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

    def __init__(self, rate: Fraction):
        self._interval = 1 / rate
        self._last: Fraction | None = None
        self.start(by_dts=False)

    def start(self, by_dts: bool) -> None:
        """Begin with another container, whose times follow those before.

        by_dts: AVI only numbers frames in decoding order.
        """
        self._by_dts = by_dts
        self._first: Fraction | None = None

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


# ITU-T H.273 codes; BT.709 has the same code for primaries, transfer and matrix.
BT709, _UNSPECIFIED, _BT601 = 1, 2, 5
_OTHER_MATRICES = (BT709, 4, 7, 9)  # FCC, SMPTE 240M, BT.2020
_HD_HEIGHT = 720


def import_av():
    """Return PyAV. Raises ValueError, naming the extra to install, if it is missing."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need PyAV: pip install 'mask-rcnn-jax[video]'") from error
    return av


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


def _duration(stream) -> Fraction | None:
    """Seconds that the container states."""
    if stream.duration:
        return Fraction(stream.duration * stream.time_base)
    duration = stream.container.duration
    return Fraction(duration, 1_000_000) if duration else None


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
    return BT709 if frame.colorspace == _UNSPECIFIED and frame.height >= _HD_HEIGHT else _BT601


def reason(error: Exception) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text or type(error).__name__
