"""A small generated set of figures with keypoints."""

from typing import Any

NAMES = ("nose", "left_hand", "right_hand")


def figure_json() -> dict[str, Any]:
    """Two images of 64 x 96 and 80 x 50 with a figure each; the second hides a hand."""
    shapes = [
        (1, [20, 10, 40, 40], [30, 15, 2, 22, 30, 1, 58, 31.5, 2]),
        (2, [5, 20, 30, 50], [20, 25, 2, 8, 40, 2, 0, 0, 0]),
    ]
    annotations = [
        {
            "id": n,
            "image_id": n,
            "category_id": 4,
            "bbox": [x, y, w, h],
            "area": w * h,
            "iscrowd": 0,
            "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
            "keypoints": points,
            "num_keypoints": sum(v > 0 for v in points[2::3]),
        }
        for n, (x, y, w, h), points in shapes
    ]
    sizes = {1: (64, 96), 2: (80, 50)}
    images = [
        {"id": n, "file_name": f"{n}.png", "height": h, "width": w} for n, (h, w) in sizes.items()
    ]
    skeleton = [[1, 2], [1, 3]]
    category = {"id": 4, "name": "figure", "keypoints": list(NAMES), "skeleton": skeleton}
    return {"images": images, "annotations": annotations, "categories": [category]}
