"""Small COCO data sets on disk, as faulty as a test wants them."""

import json

import cv2
import numpy as np

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]


def rectangle(x, y, width, height, **keys):
    """An annotation of image 1, category 3, whose polygon is its box."""
    corners = [x, y, x + width, y, x + width, y + height, x, y + height]
    entry = {"image_id": 1, "category_id": 3, "iscrowd": 0, "area": width * height}
    return entry | {"bbox": [x, y, width, height], "segmentation": [corners]} | keys


def write_coco(folder, sizes=((40, 60),), annotations=(), **replace):
    """Write pictures of the given (height, width) and a json; returns (json path, image folder).

    Image k (from 1) is filled with the value k. `replace` overrides whole sections of the json;
    None leaves a section out.
    """
    image_dir = folder / "images"
    image_dir.mkdir(exist_ok=True)
    images = []
    for k, (height, width) in enumerate(sizes, start=1):
        name = f"{k:03d}.png"
        cv2.imwrite(str(image_dir / name), np.full((height, width, 3), k, np.uint8))
        images.append({"id": k, "file_name": name, "height": height, "width": width})
    if annotations is not None:
        annotations = [{"id": n, **entry} for n, entry in enumerate(annotations, start=1)]
    content = {"images": images, "categories": CATEGORIES, "annotations": annotations} | replace
    json_path = folder / "instances.json"
    json_path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return json_path, image_dir
