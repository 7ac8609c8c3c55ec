"""Answer requests about one model: detections as json, the page, and the facts it needs."""

import io
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mask_rcnn_jax.annotations.keypoints import skeleton_of
from mask_rcnn_jax.evaluation.visualize import PALETTE_SIZE, instance_color
from mask_rcnn_jax.images.decode import UndecodableImage, header_size, upright_size
from mask_rcnn_jax.images.headers import FORMATS, is_heic
from mask_rcnn_jax.images.opening import has_raster_head
from mask_rcnn_jax.images.raster import ImageTooLarge
from mask_rcnn_jax.memory import peak_rss_mb
from mask_rcnn_jax.predict.batches import PreparedImage
from mask_rcnn_jax.predict.predictor import Predictor, Prepared
from mask_rcnn_jax.predict.programs import usable_cpus
from mask_rcnn_jax.serving.answers import (
    Answer,
    Refused,
    json_answer,
    read_options,
    to_data_uri,
    to_entries,
)
from mask_rcnn_jax.serving.batching import Batcher
from mask_rcnn_jax.serving.workers import COUNTS

DECODE_SECONDS = 30.0  # that a request waits for a decoder
DETECT_SECONDS = 60.0  # that a request waits for its detections
BYTES = 3  # for each pixel that an image may have
RETRY = {"Retry-After": "1"}  # seconds
_FOLDER = Path(__file__).parent
_PAGE = {
    "/": ("serve_page.html", "text/html; charset=utf-8"),
    "/serve_page.css": ("serve_page.css", "text/css; charset=utf-8"),
    "/serve_page.js": ("serve_page.js", "text/javascript; charset=utf-8"),
}
_METHODS = {"/detect": "POST", "/model": "GET", "/health": "GET", **dict.fromkeys(_PAGE, "GET")}
_TYPE = re.compile(r"image/[\w.+-]+|application/octet-stream", re.ASCII)


class Request(Protocol):
    """What a service needs of a request with a body, which is the file of an image."""

    def read_body(self) -> bytes: ...
    def release_body(self) -> None: ...
    def has_gone(self) -> bool: ...


@dataclass(frozen=True)
class Limits:
    """The most that requests may ask for.

    Attributes:
        waiting: images that are decoded, detected or encoded at a time; others are refused.
        delay: seconds that an image waits for others to fill its batch.
        content: bytes in an image file.
        pixels: in a decoded image; of other bands than 8-bit RGB, also three times as many bytes.
        receiving: bytes in all files on their way, by their Content-Length, until they are decoded;
            at least `content`.
    """

    waiting: int = 64
    delay: float = 0.005
    content: int = 32 << 20
    pixels: int = 64_000_000
    receiving: int = 256 << 20


class Service:
    """Answer requests about one model, from any number of threads.

    Creating it compiles the predictor's programs, so that no request waits for that; ValueError for
    a predictor with tiles. `close` ends its thread once no request is at work.

    Args:
        counts: COUNTS of this and of all other workers; there are none if unset.
        index: of this one in them.
    """

    def __init__(
        self,
        predictor: Predictor,
        limits: Limits = Limits(),
        counts: np.ndarray | None = None,
        index: int = 0,
    ):
        if predictor.tiles is not None:
            raise ValueError("the predictor cuts images into tiles, which cannot be served")
        self.limits = limits
        self._predictor = predictor
        has_masks = _warm_up(predictor)
        self._model = {
            "classes": [{"id": c["id"], "name": str(c["name"])} for c in predictor.categories],
            "masks": has_masks,
            "keypoints": _keypoints(predictor),
            "max_bytes": limits.content,
            "max_pixels": limits.pixels,
            # Whether a browser does not show images as the model sees them.
            "view": bool(predictor.bands.names) or not predictor.upright,
            "colors": [_hex(instance_color(i)) for i in range(PALETTE_SIZE)],
        }
        self._page = {
            path: (_FOLDER.joinpath(name).read_bytes(), kind)
            for path, (name, kind) in _PAGE.items()
        }
        self._batcher = Batcher(predictor, limits.delay)
        # Only here an image has all its pixels, which may take more memory than anything else.
        self._decoders = threading.BoundedSemaphore(min(4, usable_cpus()))
        self._lock = threading.Lock()
        self._counts = np.zeros(1, COUNTS) if counts is None else counts
        self._own = self._counts[index]
        self._own["megabytes"], self._own["ready"] = round(peak_rss_mb()), 1

    def close(self) -> None:
        self._batcher.close()

    def count_connections(self, count: int) -> None:
        """Tell the other workers how many connections this one has."""
        self._own["connections"] = count

    def has_more_connections(self) -> bool:
        """Whether another worker that is ready has fewer."""
        ready = self._counts["connections"][self._counts["ready"] > 0]
        return bool((ready < self._own["connections"]).any())

    @property
    def _waiting(self) -> int:
        """Images at work here."""
        return int(self._own["waiting"])

    def check(self, method: str, path: str, content_type: str) -> None:
        """Refuse a request by its head, before its body is read."""
        expected = _METHODS.get(path)
        if expected is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"no such page, expected {', '.join(_METHODS)}")
        if method != expected:
            message = f"{path} takes {expected} requests"
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, message, {"Allow": expected})
        if method == "POST" and not _TYPE.fullmatch(content_type):
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "expected the bytes of an image as the body, and a Content-Type of image/.. or "
                "application/octet-stream",
            )

    def answer(self, path: str, query: str, request: Request) -> Answer:
        """Answer a request that `check` let pass; Refused for a mistake in it."""
        if path in self._page:
            return Answer(HTTPStatus.OK, *self._page[path])
        if path == "/model":
            return json_answer(self._model)
        if path == "/health":
            counts = {name: int(self._counts[name].sum()) for name in ("waiting", "answered")}
            workers = int(self._counts["ready"].sum())
            return json_answer({"status": "ready", **counts, "workers": workers})
        return json_answer(self.detect(request, query))

    def detect(self, request: Request, query: str) -> dict[str, Any]:
        """Return the objects of an image, as docs/serving.md describes them.

        Raises Refused for a mistake in the request, ConnectionError if its client has gone.
        """
        threshold, masks, with_view = read_options(query)
        with self._lock:
            self._check_places()  # the body need not come in vain, but takes no place meanwhile
        content = request.read_body()
        with self._place():
            image, view = self._prepare(content, request, with_view=with_view)
            del content
            request.release_body()
            try:
                found = self._batcher.detect(image, DETECT_SECONDS, request.has_gone)
            except TimeoutError as error:
                message = f"no detections within {DETECT_SECONDS:.0f} seconds"
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message, RETRY) from error
            result = self._predictor.result(image, found)
            result = result[result.scores >= threshold]
            height, width = result.image.shape[:2]
            about = {"width": width, "height": height} | ({"view": view} if view else {})
            return {"image": about, "detections": to_entries(result, masks)}

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Hold one of the places for images; count the image if it is answered."""
        with self._lock:
            self._check_places()
            self._own["waiting"] += 1
        answered = False
        try:
            yield
            answered = True
        finally:
            with self._lock:
                self._own["waiting"] -= 1
                self._own["answered"] += answered

    def _check_places(self) -> None:
        if self._waiting >= self.limits.waiting:
            message = f"{self._waiting} images are waiting already, try again"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message, RETRY)

    def _prepare(
        self, content: bytes, request: Request, *, with_view: bool
    ) -> tuple[PreparedImage, str]:
        """Decode and resize an image; keep its size and not its pixels, of which there are many,
        and how it looks as a data URI."""
        if not content:
            raise Refused(HTTPStatus.BAD_REQUEST, "the body is empty, expected an image")
        if not self._decoders.acquire(timeout=DECODE_SECONDS):
            message = f"not decoded within {DECODE_SECONDS:.0f} seconds"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message, RETRY)
        try:
            if request.has_gone():
                raise ConnectionError("the client has gone")
            image = self._decoded(content, with_view)
            assert isinstance(image, PreparedImage)  # no tiles
            view = to_data_uri(image.image) if with_view else ""
        finally:
            self._decoders.release()
        shape = image.image.shape
        return image._replace(image=np.broadcast_to(np.uint8(0), shape), pixels=None), view

    def _decoded(self, content: bytes, whole: bool) -> Prepared:
        """Decode an image and place it on its canvas.

        whole: do not reduce it while it is decoded.
        """
        predictor, most = self._predictor, self.limits.pixels
        try:
            size = header_size(content, "image", most)
        except UndecodableImage as error:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error
        has_head = predictor.bands.names and has_raster_head(content)
        if size is None and not (has_head or is_heic(content)):
            message = f"not an image, expected {', '.join(FORMATS)}"
            raise Refused(HTTPStatus.BAD_REQUEST, message)
        try:
            turned = (upright_size(io.BytesIO(content)) if predictor.upright else None) or size
            at_least = predictor.decoded_size(turned) if turned and not whole else None
            given: Any = {"at_least": at_least, "max_bytes": BYTES * most}
            pixels = predictor.read(content, name="image", **given)
            if pixels.shape[0] * pixels.shape[1] > most:  # of a file whose head was not understood
                shape = f"image: {pixels.shape[0]} x {pixels.shape[1]} pixels"
                raise ImageTooLarge(f"{shape}, more than the {most:,} pixels that are read")
            return predictor.prepare(pixels, turned if at_least else None)
        except ImageTooLarge as error:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error
        except ImportError as error:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, str(error)) from error
        except ValueError as error:  # also UndecodableImage and UnfitImage
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error


def _hex(color: tuple[int, int, int]) -> str:
    return "#" + bytes(color).hex()


def _keypoints(predictor: Predictor) -> dict[str, Any] | None:
    """Describe a model's keypoints and how they are drawn, None without any."""
    names, least = predictor.keypoint_names, predictor.keypoint_threshold
    if not names:
        return None
    lines = skeleton_of(predictor.categories, names)
    return {
        "names": names,
        "skeleton": lines,  # pairs of places in the names
        "threshold": least if math.isfinite(least) else None,
    }


def _warm_up(predictor: Predictor) -> bool:
    """Compile the programs for each canvas; return whether the model has masks."""
    images = predictor.samples()
    for image in images if predictor.images_at_once > 1 else ():
        predictor([image] * predictor.images_at_once)
    return [predictor([image])[0].has_masks for image in images][0]
