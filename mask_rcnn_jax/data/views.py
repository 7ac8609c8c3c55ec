"""Images in several sizes, for test-time augmentation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.options import CANVAS_MULTIPLE, ExampleOptions
from mask_rcnn_jax.structures import Batch


def scaled_options(options: ExampleOptions, scale: float) -> ExampleOptions:
    """The options of another size, without smaller canvases; a fixed one stays a multiple of 64.

    Raises ValueError, naming `eval.tta_scales`, for a larger one if `resize` enlarges no image.
    """
    if options.resize == "keep" and scale > 1:
        expected = "expected at most 1 with data.resize='keep', which enlarges no image"
        raise ValueError(f"eval.tta_scales has {scale:g}, {expected}")
    unit = 1 if options.resize == "shortest_edge" else CANVAS_MULTIPLE
    height, width = (max(1, round(side * scale / unit)) * unit for side in options.image_size)
    return replace(options, image_size=(height, width), short_sides=(), canvases=())


class ViewLoader:
    """The batches of one pass over the images, each in several sizes."""

    def __init__(self, loaders: Sequence[EvalLoader]):
        """loaders: of the same images; one for each size."""
        self._loaders, self.num_images = loaders, loaders[0].num_images

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        for batches in zip(*self._loaders, strict=True):
            if any(not np.array_equal(b.image_index, batches[0].image_index) for b in batches):
                raise ValueError(
                    "eval.tta_scales: landscapes and portraits share a canvas in one size and not "
                    "in another; choose other factors"
                )
            yield batches
