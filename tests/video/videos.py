"""Generate video and audio files."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def frame_image(number: int, height: int, width: int) -> np.ndarray:
    """Gray level encoding the frame number, and a white block moving to the right."""
    image = np.full((height, width, 3), 40 + number % 160, np.uint8)
    x = 2 * number % (width - 8)
    image[8:16, x : x + 8] = 255
    return image


def write_video(
    path: Path,
    count: int,
    codec: str = "libx264",
    *,
    size: tuple[int, int] = (48, 64),
    rate: Fraction | int = 25,
    ticks=None,
    options=None,
    container_options=None,
    pixel_format: str = "yuv420p",
) -> Path:
    """Write `count` frames of `frame_image`; ticks: times in milliseconds, default by rate."""
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = pixel_format
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(frame_image(number, *size), format="rgb24")
            if ticks is not None:
                frame.pts, frame.time_base = ticks[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def turn(path: Path, matrix: tuple[int, int, int, int]) -> None:
    """Write a display matrix [a, b, c, d] to an mp4 track header: (x, y) is shown at
    (a x + c y, b x + d y)."""
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 44
    a, b, c, d = (value << 16 for value in matrix)
    for place, value in zip((0, 4, 12, 16), (a, b, c, d), strict=True):
        content[at + place : at + place + 4] = value.to_bytes(4, "big", signed=True)
    path.write_bytes(content)


def write_sound(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 2048), np.float32), "fltp", "mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence))
        container.mux(stream.encode(None))
    return path
