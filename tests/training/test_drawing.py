"""Annotated images of an evaluation, whatever their files are called."""

from dataclasses import replace

import cv2
import numpy as np

from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training.evaluator import draw_pictures
from mask_rcnn_jax.training.step import make_mesh
from tests.memory_set import ShapeSet

NAMES = [
    "/data/my/img1.jpg",
    "data/my_img1.png",
    "d\x1b[2J\ud800.jpg",
    "n" * 300 + ".jpg",
    "../up.jpg",
]


class NamedSet(ShapeSet):
    class_names = ("狗\ud800", "\x1b[2J", "c" * 300) * 3

    def _record(self, index):
        return replace(super()._record(index), file_name=NAMES[index])


def predict(_, batch):
    """One detection of each class a picture."""
    rows, boxes = len(batch.images), np.array([[2, 3, 40, 50]] * 3, np.float32)
    found = [boxes, np.ones(3, np.float32), np.arange(1, 4), np.ones((3, 28, 28)), np.ones(3, bool)]
    return Detections(*(np.broadcast_to(array, (rows, *array.shape)) for array in found))


def test_images_of_any_names_stay_in_their_folder_and_apart(tmp_path):
    dataset = NamedSet("val", len(NAMES))
    options = ExampleOptions((64, 64), resize="shortest_edge", max_instances=4, mask_size=8)
    loader = EvalLoader(dataset, options, batch_size=2, num_workers=0)
    output = tmp_path / "deep" / "pictures"
    drawn = draw_pictures(predict, {}, loader, dataset, make_mesh(), output)
    assert len(drawn) == len(NAMES) and all(name.isprintable() for name in drawn)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in paths} == {output}
    assert sorted(path.name for path in paths) == sorted(
        ["data_my_img1.jpg", "data_my_img1_2.jpg", "d_[2J_.jpg", "n" * 200 + ".jpg", "_up.jpg"]
    )
    by_name = {path.name: cv2.imread(str(path)) for path in paths}
    first, second = by_name["data_my_img1.jpg"], by_name["data_my_img1_2.jpg"]
    assert first.shape == second.shape and (first != second).any()
