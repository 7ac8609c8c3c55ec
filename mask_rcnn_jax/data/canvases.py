"""Choose canvases for images whose sizes are known.

An image takes the smallest canvas that holds it (`resize.resize_plan`). Each canvas beside those
that `image_size` sets means less padding, and one program more to compile.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import jax
import numpy as np

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.options import CANVAS_MULTIPLE, ExampleOptions
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.resize import resize_plan

Size = tuple[int, int]  # (height, width)
# Pixels that a detector computes while another one compiles.
COMPILING = {"cpu": 25e6, "gpu": 15e9}


def canvas_buckets(
    dataset: Dataset, indices: Iterable[int], options: ExampleOptions
) -> dict[tuple[int, int], list[int]]:
    """Canvas (H, W) -> indices of the images that go on it."""
    buckets: dict[tuple[int, int], list[int]] = {}
    images, canvases = dataset.images, {}
    for index in indices:
        size = image_size(images, index)
        if size not in canvases:
            canvases[size] = resize_plan(*size, options).canvas
        buckets.setdefault(canvases[size], []).append(index)
    return buckets


def evaluation_options(
    options: ExampleOptions,
    sizes: Iterable[Size],
    *,
    rows: int,
    most: int,
    multiple: int,
    share: float = 1.0,
) -> ExampleOptions:
    """Return options for images to detect objects in, with canvases that follow their sizes.

    Each canvas saves more than it takes to compile. There are further ones only in recipes whose
    detections do not depend on the canvas, since `multiple` divides its sides, and that have no
    `data.canvases`.

    Args:
        options: the recipe's.
        sizes: (height, width) for each image, or for an even selection.
        rows: images in a batch, over all devices.
        most: canvases in all, `eval.canvases`.
        multiple: the model's `input.pad_multiple`.
        share: part that `sizes` is out of all images.
    """
    if options.canvases or not most or not multiple or CANVAS_MULTIPLE % multiple:
        return options
    price = share * COMPILING.get(jax.default_backend(), COMPILING["gpu"])
    canvases = choose_canvases(sizes, options, most=most, price=price, rows=rows)
    return replace(options, canvases=canvases)


def choose_canvases(
    sizes: Iterable[Size],
    options: ExampleOptions,
    *,
    most: int,
    price: float = 0.0,
    rows: int = 1,
) -> tuple[Size, ...]:
    """Choose further canvases, as `data.canvases` takes them, that leave the least padding.

    Each is the best beside those before it; then each is exchanged for a better one, while there
    is any.

    Args:
        sizes: (height, width) for each image, its own pixels.
        options: how images are resized; `canvases` is replaced.
        most: canvases in all, with those that `image_size` sets.
        price: pixels that a canvas must save at least.
        rows: images in a batch; those missing in the last batch on a canvas are computed as well.
    """
    plain = replace(options, canvases=())
    counted, full = Counter(sizes), set()
    cells: Counter[Size] = Counter()  # sizes rounded up
    for (height, width), count in counted.items():
        plan = resize_plan(height, width, plain)
        full.add(plan.canvas)
        cells[_rounded_up(plan.size)] += count
    corners = np.array(sorted(cells), np.int64).reshape(-1, 2)
    numbers = np.array([cells[height, width] for height, width in corners.tolist()], np.int64)
    sides = [np.unique(corners[:, axis]).tolist() for axis in (0, 1)]
    candidates = [(h, w) for h, w in product(*sides) if any(h <= H and w <= W for H, W in full)]

    def cost(chosen: list[Size]) -> int:
        canvases = np.array([*full, *chosen], np.int64)
        areas = canvases.prod(axis=1)
        holds = (corners[:, None] <= canvases).all(axis=2)  # [cells, canvases]
        own = np.where(holds, areas, np.iinfo(np.int64).max).argmin(axis=1)
        images = np.bincount(own, numbers, len(canvases)).astype(np.int64)
        return int((-(-images // rows) * rows * areas).sum())

    def better(others: list[Size]) -> tuple[int, Size]:
        return min((cost([*others, one]), one) for one in candidates)

    chosen: list[Size] = []
    known = cost(chosen) if counted else 0
    while len(full) + len(chosen) < most and counted:
        found, canvas = better(chosen)
        if known - found <= price:
            break
        known, chosen = found, [*chosen, canvas]
    exchanged = len(chosen) > 1
    while exchanged:
        exchanged = False
        for place in range(len(chosen)):
            found, canvas = better(chosen[:place] + chosen[place + 1 :])
            if found < known:
                known, chosen[place], exchanged = found, canvas, True
    return tuple(sorted(chosen))


def _rounded_up(size: Size) -> Size:
    height, width = (-(-side // CANVAS_MULTIPLE) * CANVAS_MULTIPLE for side in size)
    return height, width
