"""The sheet of training images."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.dataset import ImageRecord
from mask_rcnn_jax.data.geometry import FixedSizeCrop
from mask_rcnn_jax.data.loader import TrainLoader
from mask_rcnn_jax.report.preview import CELL, preview_sheet
from tests.commands.command import error_line, run_inside
from tests.data.small_set import rectangle, write_coco
from tests.memory_set import ShapeSet


def data_with(recipe="quickstart", **entries):
    return load_config(recipe, {f"data.{name}": value for name, value in entries.items()}).data


@pytest.mark.parametrize("mask_frame", ["box", "image"])
def test_the_sheet_has_every_image_with_its_objects(mask_frame):
    dataset = ShapeSet("train", 6)
    crop = FixedSizeCrop(size=(64, 128), fill=(10, 200, 30))
    data = replace(data_with(augment=("fixed_size_crop",)), fixed_size_crop=crop)
    sheet = preview_sheet(replace(data, mask_frame=mask_frame), dataset, 6)
    assert sheet.dtype == np.uint8 and sheet.shape == (2 * (240 + 8), 4 * (CELL + 8), 3)
    for place in range(6):
        row, column = divmod(place, 4)
        cell = sheet[row * 248 :, column * (CELL + 8) :][:240, :CELL]
        assert (cell[:, 350:] == [10, 200, 30]).all(axis=-1).mean() > 0.9  # what the crop adds
        assert np.ptp(cell[:, :230].reshape(-1, 3), axis=0).min() > 100
    assert (sheet[248:, 2 * (CELL + 8) :] == 255).all()


def test_masks_are_drawn_at_their_place():
    """Those of the whole image like those of boxes."""
    dataset, data = ShapeSet("train", 2), data_with()
    frames = [replace(data, mask_frame=frame) for frame in ("box", "image")]
    sheets = [preview_sheet(framed, dataset, 2) for framed in frames]
    different = np.abs(sheets[0].astype(int) - sheets[1]).max(axis=-1) > 40
    assert different.mean() < 0.03


def test_masks_of_boxes_may_have_the_shape_of_the_canvas():
    dataset, size = ShapeSet("train", 2), {"image_size": (128, 128)}
    sheets = [preview_sheet(data_with(mask_size=side, **size), dataset, 2) for side in (112, 128)]
    different = np.abs(sheets[0].astype(int) - sheets[1]).max(axis=-1) > 40
    assert different.mean() < 0.01


def test_the_order_is_that_of_training(monkeypatch):
    orders, data = [], data_with(repeat_threshold=0.5)

    class Noted(TrainLoader):
        def __init__(self, dataset, options, order, **given):
            orders.append(order)
            super().__init__(dataset, options, order, **given)

    dataset = ShapeSet("train", 3)
    monkeypatch.setattr("mask_rcnn_jax.report.preview.TrainLoader", Noted)
    preview_sheet(data, dataset, 1, left_out=(2,))
    (order,) = orders
    (place,) = order.skip
    assert dataset.images[place].id == 2 and order.repeats.repeat_threshold == 0.5


def test_images_without_objects_and_float_images_are_drawn():
    class Empty:
        class_names = ("none",)
        images = [ImageRecord(1, "a.png", 30, 70, ())]

        def decode(self, index):
            return np.full((30, 70, 3), 77, np.uint8)

    data = data_with("coco_torchvision", image_size=(60, 140), keep_empty=True)
    sheet = preview_sheet(data, Empty(), 1)
    assert (sheet[:200, :CELL] == 77).all()


def test_prepare_preview_writes_the_sheet(tmp_path, capsys):
    objects = [rectangle(5, 5, 30, 20), rectangle(1, 1, 20, 30, image_id=2)]
    json_path, image_dir = write_coco(tmp_path, sizes=[(40, 60)] * 2, annotations=objects)
    entries = ["--config=quickstart", f"--config.data.train_json={json_path}"]
    entries += [f"--config.data.train_images={image_dir}", "--count=3"]
    entries.append("--config.data.augment=('rotation', 'copy_paste')")
    path = tmp_path / "out" / "sheet.png"
    assert run_inside("prepare", "preview", *entries, "--output", path) == 0
    said = capsys.readouterr().out
    assert f"{path}: 3 training images with rotation, copy_paste" in said
    assert cv2.imread(str(path)).shape[1] == 3 * (CELL + 8)


def test_prepare_preview_shows_all_training_sets(tmp_path):
    files = {}
    for name, sizes in (("a", [(64, 64)]), ("b", [(64, 64)] * 3)):
        (tmp_path / name).mkdir()
        objects = [rectangle(5, 5, 9, 9)]
        files[name] = tuple(map(str, write_coco(tmp_path / name, sizes, objects)))
    entries = ["--config=quickstart", f"--config.data.train_json={files['a'][0]}"]
    entries += [f"--config.data.train_images={files['a'][1]}", "--count=4"]
    entries.append(f"--config.data.more_train={(files['b'],)}")
    path = tmp_path / "sheet.png"
    assert run_inside("prepare", "preview", *entries, "--output", path) == 0
    sheet = cv2.imread(str(path))  # image k of a set is of the color k
    assert all((sheet == shade).all(axis=-1).sum() > 10_000 for shade in (1, 2, 3))


def test_what_is_missing_is_said(capsys):
    for given in (
        ["--config=quickstart"],
        ["--output=a.jpg"],
        ["--config=quickstart", "--output=a"],
    ):
        code = run_inside("prepare", "preview", *given)
        message = error_line(code, capsys.readouterr().err)
        assert message == "prepare preview needs --config and --output, a .jpg or .png to write"
