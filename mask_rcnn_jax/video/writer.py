"""Write H.264 mp4 files that browsers can play, with PyAV."""

from fractions import Fraction
from pathlib import Path

import numpy as np

from mask_rcnn_jax.video.reader import BT709, import_av, reason

# Seconds. Containers with millisecond timestamps round a frame's time by up to 0.5 ms.
_ROUNDING = Fraction(6, 10_000)
_LIMITED_RANGE = 1  # FFmpeg's code for luma in 16..235


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
            context.colorspace = context.color_primaries = context.color_trc = BT709
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
            format="yuv420p", dst_colorspace=BT709, dst_color_range=_LIMITED_RANGE
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
        return OSError(f"{self._path}: cannot be written: {reason(error)}")
