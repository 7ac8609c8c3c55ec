"""Complete models of other systems, narrow, whose weights follow from their names.

NumPy alone, for the tests and for `tests/goldens/complete/make.py`, which runs the systems.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parents[1] / "goldens/complete"
# Images are resized to this short side, or to this long side. Neither is a multiple of 64, the
# stride of the last map.
SHORT, LONG = 96, 160
SIZES = ((100, 180), (120, 144))  # of the images, which become 89 x 160 and 96 x 115
CLASSES, CHANNELS, HIDDEN, PROPOSALS = 5, 64, 128, 200
# More anchors and RoIs than there are, so that training takes all, and nothing is random.
ANCHORS, ROIS = 8000, 512
# Branches add little to a trunk's sums. Of last layers, so that scores differ and boxes move.
GAINS = {
    "bn3.weight": 0.3,
    "conv3.norm.weight": 0.3,
    "fpn": 1.0,
    "neck": 1.0,
    "rpn.head.cls_logits": 2.0,
    "rpn.head.bbox_pred": 0.25,
    "rpn_head.objectness_logits": 2.0,
    "rpn_head.anchor_deltas": 0.25,
    "rpn_head.rpn_cls": 1.5,
    "rpn_head.rpn_reg": 0.2,
    "cls_score": 2.5,
    "fc_cls": 2.5,
    "bbox_pred": 1.5,
    "fc_reg": 1.2,
    "mask_fcn_logits": 6.0,
    "mask_head.predictor": 8.0,
    "mask_head.conv_logits": 6.0,
    "coarse_head.prediction": 3.0,
    "point_head.predictor": 3.0,
    "kps_score_lowres": 2.0,
}


@dataclass(frozen=True)
class System:
    """A system, the recipe that reproduces it, and what of the model is narrower than usual."""

    recipe: str
    library: str
    widths: dict[str, int]  # entries of the recipe's model
    detections: int = 40
    gains: dict[str, float] = field(default_factory=dict)  # of arrays, by a part of their names


MASKS, POINTS = {"mask_head.channels": CHANNELS}, {"keypoint_head.channels": CHANNELS}
CONVS = {"box_head.conv_channels": CHANNELS}
POINTREND = MASKS | {"mask_head.fc_channels": HIDDEN, "mask_head.point_channels": CHANNELS}
BGR = {"stem.conv1.weight": 0.02}  # images of detectron2 are not divided by a deviation
SYSTEMS = {
    "torchvision": System("coco_torchvision", "torchvision", MASKS),
    "torchvision_v2": System("coco_torchvision:v2", "torchvision", MASKS | CONVS),
    "torchvision_keypoints": System("coco_keypoints", "torchvision", POINTS, detections=15),
    "detectron2": System("coco_detectron2", "detectron2", MASKS, gains=BGR),
    "detectron2_cascade": System("coco_detectron2:cascade_1x", "detectron2", MASKS, gains=BGR),
    "detectron2_pointrend": System(
        "coco_detectron2:pointrend_1x", "detectron2", POINTREND, detections=20, gains=BGR
    ),
    "mmdetection": System("coco_mmdet", "mmdetection", MASKS),
    "mmdetection_swin": System("coco_swin:tiny_1x", "mmdetection", MASKS),
    "mmdetection_swin_cascade": System("coco_swin:cascade_tiny", "mmdetection", MASKS | CONVS),
}
# Whose losses and gradients are stored as well.
TRAINED = ("torchvision", "torchvision_v2", "detectron2", "detectron2_cascade")


def draw(
    shapes: dict[str, tuple[int, ...]], gains: Mapping[str, float] = {}
) -> dict[str, np.ndarray]:
    """Arrays in torch's layout that depend on name and shape alone, on any machine."""
    return {name: _array(name, tuple(shape), {**gains, **GAINS}) for name, shape in shapes.items()}


def _array(name, shape, gains):
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    drawn = rng.random(shape, np.float32) * np.float32(2) - np.float32(1)
    gain = next((gain for part, gain in gains.items() if part in name), None)
    if name.endswith("running_var") or (name.endswith("weight") and len(shape) == 1):
        return (np.float32(0.75) + drawn * np.float32(0.25)) * np.float32(gain or 1)
    if len(shape) == 1:
        return drawn * np.float32(0.1)
    if shape[1] % 2 == 0:  # what channels have in common cancels, so that places differ
        drawn[:, shape[1] // 2 :] = -drawn[:, : shape[1] // 2]
    return drawn * np.float32((gain or 1.5) * (3 / np.prod(shape[1:])) ** 0.5)


def image(number: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """[H, W, 3] uint8, red, green and blue: squares of one color, with noise."""
    rng = np.random.Generator(np.random.PCG64(number))
    height, width = size or SIZES[number]
    squares = rng.integers(0, 200, (height // 10 + 1, width // 10 + 1, 3))
    squares = squares.repeat(10, axis=0).repeat(10, axis=1)[:height, :width]
    return (squares + rng.integers(0, 56, squares.shape)).astype(np.uint8)


def objects(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes [3, 4], classes and polygons [3, 4, 2] of diamonds in an image of SHORT x LONG."""
    x, y = np.float32([[16, 60, 96], [24, 8, 40]]) + 4 * number
    width, height = np.float32([[40, 24, 56], [32, 60, 44]])
    points = [(x, y + height / 2), (x + width / 2, y), (x + width, y + height / 2)]
    points.append((x + width / 2, y + height))
    boxes = np.stack([x, y, x + width, y + height], axis=1)
    return boxes, np.array([1, 2, 5]), np.moveaxis(np.array(points), 2, 0)


def diamonds(boxes: np.ndarray) -> np.ndarray:
    """Masks [N, SHORT, LONG] of the diamonds in boxes."""
    center = (boxes[:, None, None, 2:] + boxes[:, None, None, :2]) / 2
    half = (boxes[:, None, None, 2:] - boxes[:, None, None, :2]) / 2
    at = np.stack(np.meshgrid(np.arange(LONG), np.arange(SHORT)), axis=-1) + 0.5
    return np.abs((at - center) / half).sum(axis=-1) <= 1


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz") as file:
        arrays = dict(file)
    texts = arrays.keys() & {"shapes", "losses", "gradients", "statistics"}
    return arrays | {key: json.loads(str(arrays[key])) for key in texts}
