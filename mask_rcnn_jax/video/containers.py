"""Open a video's container, and no file or address that the container names."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from mask_rcnn_jax import stores
from mask_rcnn_jax.network import Limits, is_web
from mask_rcnn_jax.video.remote_file import RemoteFile

CAMERA = "/dev/video"
_LIMITS = Limits()  # of what comes over http, which may go on and on
_TIMEOUT = (20.0, 20.0)  # seconds to open a network stream and to wait for a packet
# FFmpeg's readers of containers and streams that hold their frames themselves. Not among them are
# those that go on to other files and addresses: concat, hls, dash, sdp, image2, imf, mlv, lavfi ..
CONTAINERS = (
    *("mov", "matroska", "avi", "mpegts", "mpegtsraw", "mpeg", "mpegvideo", "flv", "live_flv"),
    *("asf", "asf_o", "ogg", "gif", "apng", "mxf", "nut", "nsv", "nuv", "rm", "ivf", "ivr", "wtv"),
    *("dv", "dhav", "gxf", "swf", "kux", "lxf", "ty", "usm", "pva", "smjpeg", "yuv4mpegpipe"),
    *("h261", "h263", "h264", "hevc", "vvc", "evc", "av1", "obu", "vc1", "vc1test", "m4v", "apv"),
    *("mjpeg", "mjpeg_2000", "mpjpeg", "cavsvideo", "avs2", "avs3", "dirac", "dnxhd", "cine"),
    *("ser", "fits", "iff", "flic", "roq", "bink", "smk", "thp", "film_cpk", "jpegxl_anim"),
    *("jpeg_pipe", "png_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe", "gif_pipe", "j2k_pipe"),
    "v4l2",
)
_STREAMS = ("rtsp", "rtp")  # of addresses with such a scheme
# Of files whose names say so, and what they may list, other than videos.
_PLAYLISTS = {".m3u8": "hls", ".mpd": "dash"}
_LISTED = ("aac", "mp3", "ac3", "eac3", "webvtt")


@contextmanager
def open_container(av, source: str, public_only: bool = False) -> Iterator:
    """Open a file, an address or a camera; `av` is PyAV, whose errors are raised.

    What comes over http and https is read within the limits of `network`, but for playlists, whose
    addresses FFmpeg reads. public_only: see `Limits`; neither playlists nor other schemes are read.

    Raises ValueError for such an address, and for a container that is none of `CONTAINERS`; OSError
    for an address that cannot be read.
    """
    limits = replace(_LIMITS, public_only=public_only)
    if stores.is_store(source) and not public_only:
        source = str(stores.local_file(source))
    with ExitStack() as opened:
        target: Any = source
        readers, timeout = [*CONTAINERS], None
        if is_web(source):
            target = opened.enter_context(RemoteFile(source, limits))
            if playlist := _playlist(target):
                if public_only:
                    raise ValueError("a playlist, whose addresses would not be checked")
                target, timeout = source, _TIMEOUT
                readers += [playlist, *_LISTED]
        elif "://" in source:
            if public_only:
                raise ValueError("no address of http or https: it would not be checked")
            readers, timeout = [*CONTAINERS, *_STREAMS], _TIMEOUT
        for suffix, reader in _PLAYLISTS.items():
            if target is source and source.lower().endswith(suffix):
                readers += [reader, *_LISTED]
        yield opened.enter_context(_open(av, target, readers, timeout))


def _open(av, target: Any, readers: list[str], timeout: tuple[float, float] | None):
    options: dict[str, Any] = {"timeout": timeout}
    settings = {"format_whitelist": ",".join(readers)}
    if int(av.__version__.partition(".")[0]) < 19:  # newer ones always do
        options["metadata_errors"] = "replace"  # titles need not be UTF-8, nothing here reads them
    if str(target).startswith(CAMERA):
        options["format"] = "v4l2"
    if str(target).startswith("rtsp"):
        settings["rtsp_transport"] = "tcp"  # over UDP, lost packets damage frames
    try:
        return av.open(target, options=settings, **options)
    except av.ArgumentError as error:
        raise ValueError(
            "its container is damaged, or none of those that are read; lists of other files are not"
        ) from error


def _playlist(file: RemoteFile) -> str:
    """FFmpeg's reader of a playlist, known by its first bytes; "" for anything else."""
    start = file.peek(1024)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"#EXTM3U"):
        return "hls"
    return "dash" if b"<MPD" in start else ""
