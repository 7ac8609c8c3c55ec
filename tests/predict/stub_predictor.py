"""A predictor that finds one object, whose class is the value of the image's pixels."""

import threading
from collections import Counter

import numpy as np

from mask_rcnn_jax.data.resize import ResizePlan
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.predict.batches import PreparedImage
from mask_rcnn_jax.predict.pixels import read_pixels
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.structures import Detections

NUM_CLASSES = 255
GRID = 28


def image_of(value: int, width: int = 8, height: int = 12) -> np.ndarray:
    """uint8 [height, width, 3], one value in all pixels."""
    return np.full((height, width, 3), value, np.uint8)


class StubPredictor:
    """With the methods of `Predictor` that serving takes; batches are of images of one width.

    The object's box is the lower right quarter of the image, its score 0.9, and its mask a ring.

    Attributes:
        batches: number of images in each so far.
        values: of the images.
        mixed: batches with images of several widths.
        started: a batch has begun.
        hold: batches go on only while it is set.
        error: what they raise.
    """

    def __init__(self, batch_size: int = 1, names=None, masks: bool = True, points=()):
        names = names or [f"class {k}" for k in range(1, NUM_CLASSES + 1)]
        self.categories = [{"id": 10 * (k + 1), "name": name} for k, name in enumerate(names)]
        self.images_at_once, self.tiles = batch_size, None
        self.bands, self.upright = Bands(), True
        self.canvases = ((48, 64), (64, 48))
        self.keypoint_names, self.keypoint_threshold = tuple(points), 2.0
        self.batches, self.values, self.mixed = [], [], 0
        self.started, self.hold, self.error = threading.Event(), threading.Event(), None
        self.hold.set()
        self._masks = masks

    def __call__(self, images):
        prepared = [self.prepare(image) for image in images]
        return [self.result(image, self._found(image)) for image in prepared]

    def read(self, source, **options):
        return read_pixels(source, self.bands, self.upright, **options)

    def decoded_size(self, size):
        return None

    def prepare(self, image, size=None):
        height, width = image.shape[:2]
        plan = ResizePlan((height, width), (height, width), (1.0, 1.0))
        return PreparedImage(image, image[:1, :1].copy(), plan)

    def samples(self):
        return [np.zeros(shape, np.uint8) for shape in ((48, 64, 3), (64, 48, 3))]

    def bucket(self, image):
        return (image.image.shape[1],)

    def stream(self, images):
        rows = list(images)
        if not rows:
            return
        self.batches.append(len(rows))
        self.mixed += len(Counter(self.bucket(image) for _, image in rows)) > 1
        self.started.set()
        self.hold.wait()
        if self.error:
            raise self.error
        self.values += [int(image.canvas[0, 0, 0]) for _, image in rows]
        for key, image in rows:
            yield key, image, self._found(image)

    def result(self, image, found):
        arrays = found.boxes, found.scores, found.classes, found.masks
        points = {"keypoints": found.keypoints, "keypoint_names": self.keypoint_names}
        return Result(image.image, *arrays, self.categories, **points)

    def _found(self, image):
        height, width = image.image.shape[:2]
        y, x = np.mgrid[:GRID, :GRID] + 0.5 - GRID / 2
        radius = np.hypot(x, y)
        ring = (radius < 0.45 * GRID) & (radius > 0.2 * GRID)
        return Detections(
            boxes=np.array([[width / 2, height / 2, width, height]], np.float32),
            scores=np.array([0.9], np.float32),
            classes=np.array([image.canvas[0, 0, 0]], np.int32),
            masks=ring[None].astype(np.float32) if self._masks else None,
            valid=np.array([True]),
            keypoints=self._points(width, height),
        )

    def _points(self, width, height):
        """On the diagonal of the upper left half, each second one too unsure to be drawn."""
        count = len(self.keypoint_names)
        part = np.linspace(0.1, 0.4, count)
        points = np.stack([width * part, height * part, 3 - 2 * (np.arange(count) % 2)], axis=1)
        return points[None].astype(np.float32) if count else None
