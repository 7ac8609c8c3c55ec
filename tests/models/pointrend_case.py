"""PointRend's mask head on random features, and what detectron2's project code makes of it.

    PYTHONPATH=.:D2/projects/PointRend python -m tests.models.pointrend_case

writes tests/goldens/pointrend/head.npz, by `point_rend/mask_head.py`, `point_head.py` and
`point_features.py` of github.com/facebookresearch/detectron2 at 02b5c4e2, found in the folder D2.
What they import from detectron2 itself and from fvcore is replaced by what it does.
"""

import importlib
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

GOLDEN = Path(__file__).parents[1] / "goldens/pointrend/head.npz"
CLASSES, CHANNELS, STRIDE = 3, 8, 4
SIZES = dict(fc_channels=16, point_channels=12)
# Points of a subdivision, and how many times 7 x 7 cells are doubled; the second starts at 14 x 14.
CASES = {"few": (60, 3), "many": (200, 3)}
TRAIN_POINTS = 20


def inputs() -> dict[str, np.ndarray]:
    """A map of two images, boxes with classes, one beyond the map, ground truth, and points."""
    rng = np.random.RandomState(5)  # its numbers never change
    corner = rng.uniform(0, 30, (2, 3, 2))
    side = rng.uniform([8, 4], [28, 22], (2, 3, 2))
    boxes = np.concatenate([corner, corner + side], axis=-1).astype(np.float32)
    boxes[1, 2] = (30, 20, 70, 55)
    masks = (rng.random_sample((2, 4, 44, 56)) < 0.5).astype(np.float32)
    return {
        "map": rng.normal(size=(2, 11, 14, CHANNELS)).astype(np.float32),
        "boxes": boxes,
        "classes": np.array([[1, 3, 2], [2, 1, 3]]),
        "masks": masks,
        "matched": np.array([[3, 0, 1], [2, 2, 0]]),
        "points": rng.random_sample((2, 3, TRAIN_POINTS, 2)).astype(np.float32),
    }


class Instances(SimpleNamespace):
    def __len__(self):
        return 3


class Boxes:
    def __init__(self, tensor):
        self.tensor, self.device = tensor, "cpu"

    @staticmethod
    def cat(boxes):
        import torch

        return Boxes(torch.cat([each.tensor for each in boxes]))


def _stand_ins() -> None:
    import torch
    from torch import nn

    class Conv2d(nn.Conv2d):
        def __init__(self, *args, activation, **options):
            super().__init__(*args, **options)
            self.activation = activation

        def forward(self, x):
            return self.activation(super().forward(x))

    def configurable(init):
        def made(self, *args):
            init(self, **type(self).from_config(*args))

        return made

    class Registry(dict):
        def __init__(self, _):
            pass

        def register(self):
            return lambda made: self.setdefault(made.__name__, made)

    def inference(logits, instances):
        for instance, own in zip(instances, logits.split(3), strict=True):
            rows = torch.arange(len(own))
            instance.logits = own[rows, instance.pred_classes]

    shape = namedtuple("ShapeSpec", "channels height width stride", defaults=[None] * 4)
    BitMasks = namedtuple("BitMasks", "tensor image_size")
    contents = {
        "fvcore": {},
        "fvcore.nn": {},
        "fvcore.nn.weight_init": dict(c2_msra_fill=lambda _: None, c2_xavier_fill=lambda _: None),
        "detectron2": {},
        "detectron2.config": dict(configurable=configurable),
        "detectron2.layers": dict(
            Conv2d=Conv2d,
            ShapeSpec=shape,
            cat=torch.cat,
            interpolate=nn.functional.interpolate,
            shapes_to_tensor=lambda x: torch.tensor(x),
        ),
        "detectron2.modeling": dict(ROI_MASK_HEAD_REGISTRY=Registry("")),
        "detectron2.modeling.roi_heads": {},
        "detectron2.modeling.roi_heads.mask_head": dict(
            mask_rcnn_inference=inference, mask_rcnn_loss=None
        ),
        "detectron2.structures": dict(Boxes=Boxes, BitMasks=BitMasks),
        "detectron2.utils": {},
        "detectron2.utils.events": dict(get_event_storage=None),
        "detectron2.utils.registry": dict(Registry=Registry),
    }
    for name, content in contents.items():
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(content)
    # Without the package's own imports.
    sys.modules["point_rend"] = package = ModuleType("point_rend")
    package.__path__ = [f"{folder}/point_rend" for folder in sys.path]


def config(points: int, steps: int) -> SimpleNamespace:
    mask_head = SimpleNamespace(
        POINT_HEAD_ON=True, IN_FEATURES=["p2"], POOLER_RESOLUTION=14, OUTPUT_SIDE_RESOLUTION=7,
        CONV_DIM=CHANNELS, FC_DIM=SIZES["fc_channels"], NUM_FC=2,
    )  # fmt: skip
    point_head = SimpleNamespace(
        NAME="StandardPointHead", NUM_CLASSES=CLASSES, IN_FEATURES=["p2"], TRAIN_NUM_POINTS=1,
        OVERSAMPLE_RATIO=3, IMPORTANCE_SAMPLE_RATIO=0.75, SUBDIVISION_STEPS=steps,
        SUBDIVISION_NUM_POINTS=points, FC_DIM=SIZES["point_channels"], NUM_FC=3,
        CLS_AGNOSTIC_MASK=False, COARSE_PRED_EACH_LAYER=True,
    )  # fmt: skip
    roi_heads = SimpleNamespace(NUM_CLASSES=CLASSES)
    return SimpleNamespace(
        MODEL=SimpleNamespace(ROI_MASK_HEAD=mask_head, POINT_HEAD=point_head, ROI_HEADS=roi_heads)
    )


def main() -> None:
    import torch

    _stand_ins()
    project = importlib.import_module("point_rend.mask_head")
    features = importlib.import_module("point_rend.point_features")
    layers, structures = sys.modules["detectron2.layers"], sys.modules["detectron2.structures"]
    given = {name: torch.from_numpy(array) for name, array in inputs().items()}
    maps = {"p2": given["map"].permute(0, 3, 1, 2)}
    boxes = [Boxes(each) for each in given["boxes"]]
    found, weights = {}, {}
    with torch.no_grad():
        for name, case in CASES.items():
            shape = {"p2": layers.ShapeSpec(channels=CHANNELS, stride=STRIDE)}
            head = project.PointRendMaskHead(config(*case), shape).eval()
            if not weights:
                rng = np.random.RandomState(6)
                weights = {
                    n: torch.from_numpy((0.4 * rng.normal(size=w.shape)).astype(np.float32))
                    for n, w in head.state_dict().items()
                }
            head.load_state_dict(weights)
            instances = [
                Instances(pred_boxes=own, pred_classes=classes - 1)
                for own, classes in zip(boxes, given["classes"], strict=True)
            ]
            head(maps, instances)
            found[name] = torch.stack([instance.logits for instance in instances])
        coarse = head.coarse_head(head._roi_pooler(maps, boxes))
        flat = given["points"].flatten(0, 1)
        fine = head._point_pooler(maps, boxes, flat)
        logits = head._get_point_logits(fine, flat, coarse)
        rows, classes = torch.arange(6), given["classes"].flatten() - 1
        found["coarse"], found["point_logits"] = coarse[rows, classes], logits[rows, classes]
        at = features.get_point_coords_wrt_image(Boxes.cat(boxes).tensor, flat)
        truth = [
            Instances(gt_masks=structures.BitMasks(own[rows], own.shape[1:]))
            for own, rows in zip(given["masks"], given["matched"], strict=True)
        ]
        found["labels"] = features.sample_point_labels(truth, at)
    arrays = {name: array.numpy() for name, array in found.items()}
    arrays |= {f"weights/{name}": array.numpy() for name, array in weights.items()}
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, **arrays)
    print({name: array.shape for name, array in arrays.items()}, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
