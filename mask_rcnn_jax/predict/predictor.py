"""Run a trained model on images."""

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, overload

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mask_rcnn_jax import compile_cache, device
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.options import all_canvases
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.data.tiles import tiling, view_windows
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.images.pixel_size import read_pixel_size
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.predict.batches import Batching, PreparedImage, in_batches
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.large import open_large
from mask_rcnn_jax.predict.live import LiveModel
from mask_rcnn_jax.predict.pixels import (
    ImageLike,
    checked,
    path_if_file,
    read_pixels,
    to_pixels,
    to_view,
)
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.predict.tiles import TiledImage, as_view, merge_tiles
from mask_rcnn_jax.ranges import AT_LEAST_1
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.weights.categories import guess_categories
from mask_rcnn_jax.weights.convert import num_classes_in

Prepared = PreparedImage | TiledImage


class Predictor:
    """Detect objects in images of any size, on all devices of this process. Thread-safe.

    Compiles once per canvas (one, or one each for landscape and portrait, and `data.canvases`) for
    batches with `batch_size` rows on each device; rows without an image are wasted work, unless
    `split_partial`, or an engine takes fewer. An image's detections do not depend on the rest of
    its batch.

    Args:
        config: the model's recipe; `eval.score_threshold` is the lowest score of what is found. An
            exported model has its own, and finds nothing below.
        variables: see `load_variables`; None for an exported model.
        batch_size: rows of a batch on each device; None is 1, or the exported model's.
        categories: {"id", "name"} for each class, class 1 first; None takes those in
            `data.val_json` if it is there, else COCO's, else numbers, or those of the export.
        tile: images with a longer side are cut into overlapping squares of this many pixels, whose
            detections are merged; 0 cuts none. Each tile is resized as an image is.
        overlap: smallest overlap of neighboring tiles, as a fraction of their side.
        split_partial: compile each canvas for one row on each device, too, and run the images of a
            batch that is not full in that program, one after the other.
        engine: an exported model that runs in place of the variables, see `load_exported`.

    Attributes:
        images_at_once: rows of a batch, over all devices.
        bands: of the images, as files are read and shown.
        upright: whether images are turned as their EXIF entry says.
        canvases: every (height, width) that an image may be placed on.
        categories: as given or found.
        tiles: how large images are cut; None if they are not.
    """

    def __init__(
        self,
        config: Recipe | ConfigDict,
        variables: dict | None,
        batch_size: int | None = None,
        categories: Sequence[Mapping[str, Any]] | None = None,
        tile: int = 0,
        overlap: float = 0.2,
        *,
        split_partial: bool = False,
        engine: Exported | None = None,
    ):
        compile_cache.use_default()
        if (variables is None) == (engine is None):
            raise ValueError("expected either variables or an engine")
        if variables is not None and "params" not in variables:
            raise ValueError("variables has no 'params', expected what load_variables returns")
        exported_for = engine.batch if engine else None
        batch_size = exported_for or 1 if batch_size is None else batch_size
        AT_LEAST_1.check(batch_size, "batch_size")
        if exported_for not in (None, batch_size):
            raise ValueError(
                f"batch_size is {batch_size}, but the model was exported for {exported_for}: see "
                "--batch of export"
            )
        self.tiles, recipe = tiling(tile, overlap), as_recipe(config)
        self._split_partial = split_partial
        self._fills = engine is None or engine.compiles  # batches, so that they share a program
        self._model: LiveModel | Exported
        if engine is not None:
            engine.check_unchanged(recipe, but=("eval.score_threshold", "eval.soft_min_score"))
            self._model, self._num_devices = engine, 1
            self.categories = categories or engine.categories
        else:
            assert variables is not None
            # A recipe may leave the class count to the annotations; the weights have it.
            options = recipe.with_classes(num_classes_in(variables) or 0).model
            precision, implementation = recipe.train.precision, recipe.train.implementation
            device.log_devices()
            device.log_precision(precision)
            device.check_kernels(implementation)
            model = build_model(options, precision=precision, implementation=implementation)
            self._model = LiveModel(model, recipe.eval, variables)
            self._num_devices = self._model.num_devices
            self.categories = categories or guess_categories(recipe.data, variables)
            if len(self.categories) != options.num_classes:
                found = f"categories has {len(self.categories)}"
                raise ValueError(f"{found}, expected one for each of {options.num_classes} classes")
        self.images_at_once = batch_size * self._num_devices
        self._options, self.bands = recipe.data, recipe.data.bands
        self.upright = recipe.data.apply_exif != "never"
        self.canvases = all_canvases(self._options)
        self._sample_sizes = engine.sample_sizes if engine else self.canvases
        self.keypoint_names = recipe.data.keypoints if recipe.model.has_keypoints else ()
        self.keypoint_threshold = recipe.keypoint_threshold
        self._rules: dict[str, Any] = dict(
            paste=recipe.eval.paste,
            inclusive_boxes=recipe.data.inclusive_boxes,
            keypoint_names=self.keypoint_names,
            keypoint_offset=recipe.data.keypoint_offset,
            keypoint_threshold=self.keypoint_threshold,
        )
        self._pad_multiple = recipe.model.input.pad_multiple
        # What is exported keeps its own threshold; that of the recipe may be higher.
        self._above = recipe.eval.score_threshold if engine else None

    @overload  # a str is a sequence of str
    def __call__(  # type: ignore[overload-overlap]
        self, images: str | os.PathLike | bytes | bytearray | BinaryIO | Image.Image
    ) -> Result: ...

    @overload
    def __call__(self, images: np.ndarray) -> Result | list[Result]: ...

    @overload
    def __call__(self, images: Sequence[ImageLike]) -> list[Result]: ...

    def __call__(self, images: Any) -> Result | list[Result]:
        """Detect objects in one image, or in several, whatever their sizes.

        Args:
            images: a path, a file's content or an open file, uint8 [H, W, 3] RGB, a Pillow image, a
                sequence with such, or uint8 [B, H, W, 3]. Files and Pillow's images are turned
                upright by their EXIF entry, unless `data.apply_exif` is "never". With
                `data.bands.names` an array has a file's numbers [H, W, C], or [H, W] of one band,
                which become 0 to 255 as the recipe says.

        Returns:
            A `Result`, or a list of them for several images.

        Raises:
            ValueError: for another shape or dtype, or a file that is no image or lacks bands.
            OSError: a file cannot be read.
            ImportError: a file needs a package that is missing.
            TypeError: for anything else.
        """
        if isinstance(images, np.ndarray):
            several = images.ndim == 4
        else:
            one = isinstance(images, str | bytes | bytearray)
            several = isinstance(images, Sequence) and not one
        if not several:
            return self([images])[0]
        prepared = ((path_if_file(image), self._prepared(image)) for image in images)
        return [self.result(one, found, path) for path, one, found in self.stream(prepared)]

    def _prepared(self, image: ImageLike) -> Prepared:
        large = self.prepare_large(path) if (path := path_if_file(image)) else None
        if large is not None:
            return large
        return self.prepare(to_pixels(image, self.bands, self.upright))

    def result(self, image: Prepared, found: Any, path: str = "") -> Result:
        """Make a result from an image and detections of `stream`; those in tiles are merged."""
        if isinstance(image, TiledImage):
            fields = merge_tiles(image.windows, found, self._rules["paste"])
            if image.large is not None:
                fields |= {"overview": image.large.shown(), "read": image.large.values}
        else:
            rows = np.flatnonzero(found.valid)
            masks = None if found.masks is None else found.masks[rows]
            arrays = found.boxes[rows], found.scores[rows], found.classes[rows], masks
            fields = dict(zip(("boxes", "scores", "classes", "mask_grids"), arrays, strict=True))
            fields["keypoints"] = None if found.keypoints is None else found.keypoints[rows]
        fields |= self._rules | {"categories": self.categories, "path": path}
        fields |= {"pixels": image.pixels, "band_names": self.bands.names}
        return Result(image.image, **fields, pixel_size=read_pixel_size(path))

    def read(
        self,
        source: str | os.PathLike | bytes,
        *,
        name: str = "",
        at_least: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> np.ndarray:
        """Read a file, or its content, for `prepare`; see `pixels.read_pixels`."""
        given: Any = dict(name=name, at_least=at_least, max_bytes=max_bytes)
        return read_pixels(source, self.bands, self.upright, **given)

    def decoded_size(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """Return what `read` takes as `at_least` for an image (height, width)."""
        if self.bands.names or not self._options.scaled_decoding:
            return None
        return resize_plan(*size, self._options).size

    def prepare(self, image: np.ndarray, size: tuple[int, int] | None = None) -> Prepared:
        """Resize an image onto its canvas, all host work before the network, or find its tiles.

        image: [H, W, C] as `read` gives it.
        size: (height, width) if `image` was reduced to `decoded_size` or more; the result has black
            pixels then.

        Raises ValueError for another shape or dtype, UnfitImage if an exported model does not take
        images of this size.
        """
        if size is not None and image.shape[:2] != size:
            plan = resize_plan(*size, self._options)
            self._model.check(plan)
            black = np.broadcast_to(np.uint8(0), (*size, 3))
            return PreparedImage(black, resize_image(image, plan, self._options), plan)
        pixels = checked(image, self.bands)
        windows = view_windows(pixels.shape[0], pixels.shape[1], self.tiles)
        for x0, y0, x1, y1 in windows:
            self._model.check(resize_plan(y1 - y0, x1 - x0, self._options))
        limits = self.bands.limits_of(pixels) if self.bands.is_scaled else None
        if len(windows) > 1:
            view = to_view(pixels, self.bands, limits)
            return TiledImage(view, windows, None if view is pixels else pixels, limits)
        scaled = self.bands.scaled(pixels, limits)
        view = self.bands.to_rgb(scaled)
        prepared = self._resized(scaled)
        return prepared._replace(image=view, pixels=None if view is pixels else pixels)

    def prepare_large(self, path: str) -> TiledImage | None:
        """Find the tiles of an image file that is too large to be decoded whole, which are read
        one by one; the result has black pixels and an `overview`.

        Returns None for other files, and without tiles.

        Raises UnfitImage and ValueError as `prepare` does.
        """
        large = None if self.tiles is None else open_large(path, self._options.bands)
        if large is None:
            return None
        windows = view_windows(*large.size, self.tiles)
        for x0, y0, x1, y1 in windows:
            self._model.check(resize_plan(y1 - y0, x1 - x0, self._options))
        black = np.broadcast_to(np.uint8(0), (*large.size, 3))
        return TiledImage(black, windows, large=large)

    def samples(self) -> list[np.ndarray]:
        """Return a black image for each canvas; detecting in them compiles all there is."""
        return [np.zeros((*size, self.bands.count), np.uint8) for size in self._sample_sizes]

    def _resized(self, image: np.ndarray) -> PreparedImage:
        """Resize [H, W, C] in 0..255."""
        plan = resize_plan(image.shape[0], image.shape[1], self._options)
        return PreparedImage(image, resize_image(image, plan, self._options), plan)

    def stream(
        self, images: Iterable[tuple[Any, Prepared]]
    ) -> Generator[tuple[Any, Prepared, Detections | list[ImageDetections]]]:
        """Yield (key, image, detections) for (key, image) pairs, in order.

        The detections of an image with tiles are a list; `result` merges them. Its tiles are
        resized here, so that only those of a few batches take memory.
        """
        found = []
        rules = Batching(self.images_at_once, self._num_devices, self._split_partial)
        views = in_batches(self._views(images), self._run, self.bucket, rules)
        for (key, image, is_last), one in views:
            if not isinstance(image, TiledImage):
                yield key, image, one
                continue
            found.append(as_view(one, image.windows[len(found)], self._rules["paste"]))
            if is_last:
                yield key, image, found
                found = []

    def _views(self, images: Iterable[tuple[Any, Prepared]]) -> Iterator[tuple[Any, PreparedImage]]:
        for key, image in images:
            if isinstance(image, PreparedImage):
                yield (key, image, True), image
                continue
            for number, (x0, y0, x1, y1) in enumerate(image.windows):
                plan = resize_plan(y1 - y0, x1 - x0, self._options)
                view = image.view(number, plan.size, self.bands)
                canvas = resize_image(view, plan, self._options)
                seen = view if view.shape[:2] == (y1 - y0, x1 - x0) else image.image
                is_last = number + 1 == len(image.windows)
                yield (key, image, is_last), PreparedImage(seen, canvas, plan)

    def bucket(self, image: PreparedImage) -> tuple:
        """Return a key that images have in common which can share a batch.

        They have the same canvas and, if the model's maps end at the image, the same extent there.
        """
        plan = image.plan
        if not self._pad_multiple:
            return (plan.canvas,)
        return plan.canvas, *(-(-side // self._pad_multiple) for side in plan.size)

    def _run(self, images: list[PreparedImage]) -> Detections:
        """Dispatch up to `images_at_once` images from one bucket without waiting."""
        canvas, rows = images[0].canvas, self.images_at_once
        if self._split_partial and len(images) <= self._num_devices:
            rows = self._num_devices
        rows = rows if self._fills else len(images)
        inputs = np.zeros((rows, *canvas.shape), canvas.dtype)
        sizes = np.ones((rows, 2), np.int32)
        for row, image in enumerate(images):
            inputs[row], sizes[row] = image.canvas, image.plan.size
        found = self._model(inputs, sizes)
        if self._above is not None:
            found = replace(found, valid=found.valid & (found.scores > self._above))
        return found
