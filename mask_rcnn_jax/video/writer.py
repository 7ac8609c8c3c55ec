"""Write mp4 files with PyAV: H.264, which browsers play, where its FFmpeg can encode it."""

from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from mask_rcnn_jax.video.reader import BT709, import_av, reason

# Seconds. Containers with millisecond timestamps round a frame's time by up to 0.5 ms.
_ROUNDING = Fraction(6, 10_000)
_LIMITED_RANGE = 1  # FFmpeg's code for luma in 16..235
# The first that works here: H.264 by x264, which is GPL, by Cisco's library, by hardware or the
# system; MPEG-4, which FFmpeg itself has.
ENCODERS = (
    *("libx264", "libopenh264", "h264_nvenc", "h264_qsv", "h264_amf", "h264_videotoolbox"),
    *("h264_mf", "mpeg4"),
)
_OPTIONS = {
    "libx264": {"preset": "veryfast", "crf": "20"},
    "mpeg4": {"flags": "+qscale", "global_quality": "354"},  # 3 times FFmpeg's FF_QP2LAMBDA
}
_BITS = 0.2  # of a pixel, for the others
_MPEG4_TICKS = 60_000  # a second; the format has 16 bits for them


class VideoWriter:
    """Write equally sized images as H.264, yuv420p, to an mp4 with its index at the start.

    Without an encoder of H.264 it is MPEG-4, which a line says.

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
        width, height = width + width % 2, height + height % 2

        def settle(context) -> None:
            context.width, context.height, context.pix_fmt = width, height, "yuv420p"
            context.options = _OPTIONS.get(context.name, {})
            if not context.options:
                context.bit_rate = int(_BITS * width * height * rate)
            if context.name == "mpeg4" and self._time_base.denominator > _MPEG4_TICKS:
                self._time_base = Fraction(1, _MPEG4_TICKS)
            context.time_base = self._time_base
            context.sample_aspect_ratio = pixel_aspect
            # Set explicitly; players otherwise infer it from the frame height.
            context.colorspace = context.color_primaries = context.color_trc = BT709
            context.color_range = _LIMITED_RANGE

        encoder = self._encoder(settle)
        try:
            self._container = self._av.open(str(path), "w", options={"movflags": "+faststart"})
            stream = self._container.add_stream(encoder, rate=rate)
            settle(stream.codec_context)
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

    def _encoder(self, settle: Callable[[Any], None]) -> str:
        """Return the name of the first encoder that opens: being listed says little."""
        for name in ENCODERS:
            with suppress(self._av.FFmpegError, ValueError):  # ValueError: not in this build
                context = self._av.CodecContext.create(name, "w")
                settle(context)
                context.open()
                if name != ENCODERS[0]:
                    kind = "MPEG-4, which browsers do not play" if name == "mpeg4" else "H.264"
                    logging.info("%s: written by the encoder %s: %s", self._path, name, kind)
                return name
        tried = ", ".join(ENCODERS)
        raise ValueError(f"{self._path}: PyAV's FFmpeg has no encoder for it, expected {tried}")

    def _ticks(self, time: Fraction) -> int:
        nearest = round(time * self._rate) / self._rate
        time = nearest if abs(time - nearest) <= _ROUNDING else time
        return round(time / self._time_base)

    def _failure(self, error: Exception) -> OSError:
        return OSError(f"{self._path}: cannot be written: {reason(error)}")
