"""Two pictures with their objects and detections, of which everything can be worked by hand."""

import numpy as np
from pycocotools import mask as coco_mask

HEIGHT, WIDTH = 100, 120
# image, category, x, y, side
OBJECTS = [(1, 7, 10, 20, 30), (1, 3, 50, 40, 40), (2, 7, 5, 5, 60), (2, 3, 10, 70, 20)]
CROWD = {
    "image_id": 2,
    "category_id": 3,
    "iscrowd": 1,
    "segmentation": {
        "size": [HEIGHT, WIDTH],
        # Columns from 80 on, of each the last 40 rows.
        "counts": [80 * HEIGHT + 60, *([40, 60] * 39), 40],
    },
}
# image, category, x, y, side, score
FOUND = [
    (1, 7, 10, 20, 30, 0.9),  # right
    (1, 7, 50, 40, 40, 0.8),  # a dog found as a cat
    (2, 3, 10, 70, 20, 0.75),  # right
    (2, 7, 5, 5, 60, 0.2),  # right, but hardly seen
    (2, 3, 85, 65, 20, 0.95),  # in the crowd, neither right nor wrong
    (2, 7, 55, 10, 20, 0.85),  # half on a cat
    (2, 5, 30, 30, 20, 0.6),  # a category that is nowhere
    *((1, 7, 80 + n, 0, 20, 0.3) for n in range(3)),
]


def square(x, y, side):
    return [[x, y, x + side, y, x + side, y + side, x, y + side]]


def ground_truth(names=("cat", "dog", "bird"), file_names=("one.jpg", "two.jpg")):
    annotations = [
        {
            "id": i,
            "image_id": image_id,
            "category_id": category_id,
            "bbox": [x, y, side, side],
            "segmentation": square(x, y, side),
        }
        for i, (image_id, category_id, x, y, side) in enumerate(OBJECTS, start=1)
    ]
    return {
        "images": [
            {"id": i, "height": HEIGHT, "width": WIDTH, "file_name": name}
            for i, name in enumerate(file_names, start=1)
        ],
        "categories": [{"id": i, "name": name} for i, name in zip((7, 3, 5), names, strict=True)],
        "annotations": [*annotations, CROWD],
    }


def results_of(kind):
    return square_results(kind, FOUND)


def square_results(kind, found):
    """COCO results, boxes or masks, of squares (image, category, x, y, side, score)."""
    results = []
    for image_id, category_id, x, y, side, score in found:
        entry = {"image_id": image_id, "category_id": category_id, "score": score}
        if kind == "box":
            entry["bbox"] = [x, y, side, side]
        else:
            mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
            mask[int(y) : int(y + side), int(x) : int(x + side)] = 1
            code = coco_mask.encode(mask)
            entry["segmentation"] = {**code, "counts": code["counts"].decode()}
        results.append(entry)
    return results
