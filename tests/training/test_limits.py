"""Lines about limits that leave objects out, each with the share."""

import logging
from contextlib import closing

import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.training.checks import crops_larger
from mask_rcnn_jax.training.limits import crowd_line, limit_lines
from mask_rcnn_jax.training.work import Work
from tests.data.small_set import rectangle, write_coco

FITS = {"model.rpn.batch_size_per_image": 4096, "model.sampling.batch_size_per_image": 4096}


def recipe(**changes):
    entries = FITS | {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(
        "coco", {"data.max_instances": 999, "model.sampling.mask_rois_per_image": 0} | entries
    )


def test_nothing_is_said_where_all_fits():
    assert limit_lines(load_config("coco"), np.array([7, 93, 0]), None) == []
    assert limit_lines(recipe(), np.array([500] * 4), None) == []
    assert limit_lines(recipe(), np.zeros(0, int), None) == []


@pytest.mark.parametrize(
    "section, value, expected",
    [
        ("rpn.batch_size", 256, "=256, 50% positive, has room for anchors of 128 objects; 36.0%"),
        ("sampling.batch_size", 512, "=512, 25% positive, has room for RoIs of 128 objects; 36.0%"),
        ("sampling.mask_rois", 100, "=100 has room for masks of 100 objects; 50.0%"),
    ],
)
def test_samples_of_a_step(section, value, expected):
    entry = f"model.{section}_per_image"
    (line,) = limit_lines(recipe(**{entry: value}), np.array([200] * 9), None)
    assert line.replace(" in an image: at each step,", ";").startswith(entry + expected)


def test_a_share_that_hardly_counts_is_not_named():
    change = {"model__rpn__batch_size_per_image": 256}
    assert limit_lines(recipe(**change), np.array([20] * 99 + [130]), None) == []


def test_what_max_instances_leaves_out_does_not_count_again():
    entries = {"model__rpn__batch_size_per_image": 256, "data__max_instances": 128}
    assert limit_lines(recipe(**entries), np.array([200] * 9), None) == []


def test_limits_of_evaluation(tmp_path):
    objects = [rectangle(1, 1, 5, 5) for _ in range(30)]
    dataset = load_coco(*write_coco(tmp_path, sizes=[(40, 60)] * 2, annotations=objects))
    entries = {"eval.detections_per_image": 15, "eval.pre_nms_topk": 24}
    config = load_config("coco", entries | {"model.rpn.post_nms_topk_test": 27})
    lines = limit_lines(config, np.zeros(1, int), dataset)
    text = "and an image holds up to 30 objects:"
    assert [line.split(": ", 1)[1] for line in lines] == [
        f"eval.detections_per_image=15, {text} 50.0% of the objects cannot be found",
        f"eval.pre_nms_topk=24, {text} 20.0% of the objects cannot be found",
        f"model.rpn.post_nms_topk_test=27, {text} 10.0% of the objects cannot be found",
    ]
    assert limit_lines(load_config("coco"), np.zeros(1, int), dataset) == []


def test_crowds_are_counted(tmp_path):
    objects = [rectangle(1, 1, 5, 5), rectangle(2, 2, 9, 9, iscrowd=1)]
    dataset = load_coco(*write_coco(tmp_path, annotations=objects * 2))
    line = crowd_line(load_config("coco"), dataset)
    assert line.endswith("2 of 4 objects (50.0%) are crowds, which are not trained on")
    assert crowd_line(load_config("coco", {"data.skip_crowd": False}), dataset) == ""


def test_a_run_says_so_at_its_start(tmp_path, caplog):
    objects = [rectangle(1, 1, 5, 5) for _ in range(30)] + [rectangle(2, 2, 9, 9, iscrowd=1)]
    dataset = load_coco(*write_coco(tmp_path, annotations=objects))
    entries = {"data.max_instances": 20, "model.rpn.batch_size_per_image": 16}
    limits = {"eval.detections_per_image": 15, "data.num_workers": 0, "train.batch_size": 1}
    config = load_config("coco", entries | limits)
    work = Work(config, (), dataset, dataset, *[None] * 2, 1, None)
    with caplog.at_level(logging.INFO), closing(work.batches(0)):
        pass
    for words in (
        "1 images hold more than data.max_instances=20 objects, up to 30; the 10 smallest",
        "1 of 31 objects (3.2%) are crowds",
        "has room for anchors of 8 objects in an image: at each step, 60.0%",
        "an image holds up to 30 objects: 50.0% of the objects cannot be found",
    ):
        assert caplog.text.count(words) == 1, words


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("coco_dino:vit_s", {"data.image_size": (128, 192)}, "sees crops of 1024 x 1024"),
        ("coco_detectron2:lsj_100ep", {}, ""),  # its evaluation's canvas is about as large
        ("coco_dino:vit_s", {}, ""),
        ("finetune", {"data.image_size": (128, 192)}, ""),
    ],
)
def test_a_lower_image_size_that_training_does_not_see_is_noticed(name, changes, words):
    line = crops_larger(load_config(name, changes).data)
    assert words in line and bool(line) == bool(words)
