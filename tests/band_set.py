"""Small sets of generated shapes whose images have other bands and other numbers."""

import json
from pathlib import Path

import cv2
import numpy as np

from mask_rcnn_jax.formats.shapes import CATEGORIES, generate_image

MIX = np.random.default_rng(5).dirichlet(np.ones(3), 64)  # of red, green and blue in other bands


def with_bands(image, names):
    """[H, W, len(names)] uint8: colors where they are named, and mixtures of them."""
    colors = dict(zip(("red", "green", "blue"), np.moveaxis(image, 2, 0), strict=True))
    mixed = (image @ MIX.T).astype(np.uint8)
    return np.dstack([colors.get(name, mixed[..., k]) for k, name in enumerate(names)])


def write_set(folder, write, ending, split="train", count=6, size=(64, 64)):
    """Write images by `write(path, [H, W, 3] uint8 RGB)`; returns (json path, image folder)."""
    images, annotations = [], []
    image_dir = Path(folder) / split
    image_dir.mkdir(parents=True)
    for index in range(count):
        image, objects = generate_image(0, split, index, size)
        name = f"{index:03d}.{ending}"
        write(image_dir / name, image)
        images.append({"id": index + 1, "file_name": name, "height": size[0], "width": size[1]})
        for entry in objects:
            annotations.append({"id": len(annotations) + 1, "image_id": index + 1, **entry})
    categories = [{"id": i, "name": name} for i, name in CATEGORIES.items()]
    content = {"images": images, "annotations": annotations, "categories": categories}
    json_path = Path(folder) / f"{split}.json"
    json_path.write_text(json.dumps(content))
    return json_path, image_dir


def write_png(path, image):
    cv2.imwrite(str(path), image[..., ::-1])
