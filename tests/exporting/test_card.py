"""What a model card says, and that it says nothing that is not known."""

from dataclasses import replace

import yaml

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.exporting.card import Facts, make_card
from mask_rcnn_jax.formats.shapes import write_shapes
from tests.small_model import CATEGORIES, small_config

FACTS = Facts(
    "hf://me/mine", "Apache-2.0", 20, {"step": 20, "ap/box": 0.25, "ap/mask": 0.125}, "f0"
)


def recipe(folder, **changes):
    write_shapes(folder, train=3, val=2, size=(64, 64))
    names = {"train": folder / "annotations" / "instances_train.json"}
    names["val"] = folder / "annotations" / "instances_val.json"
    data = {f"data__{split}_json": str(path) for split, path in names.items()}
    data |= {f"data__{split}_images": str(folder / split) for split in names}
    return small_config("coco", (64, 64), **data, **changes)


def head(card: str) -> dict:
    """What the hub reads: the YAML at the start."""
    return yaml.safe_load(card.split("---\n")[1])


def test_a_card_of_a_run(tmp_path):
    categories = [{"id": k, "name": name} for k, name in enumerate(("circle", "square"), 1)]
    card = make_card(recipe(tmp_path, model__init_from="/home/me/r50.pth"), categories, FACTS)
    assert head(card)["license"] == "apache-2.0" and head(card)["library_name"] == "mask_rcnn_jax"
    assert 'mrcnn.load("hf://me/mine")' in card and "# mine\n" in card
    assert "resnet-10, trained for 20 steps. It started from `r50.pth`." in card
    assert "| training | instances_train.json | 3 |" in card
    assert "| validation | instances_val.json | 2 |" in card
    assert "| AP, box | 0.2500 |" in card and "| AP, mask | 0.1250 |" in card
    assert "eval.detections_per_image = 12" in card
    assert str(tmp_path) not in card and "/home/me" not in card


def test_a_card_says_what_the_model_finds(tmp_path):
    boxes = make_card(recipe(tmp_path, model__mask_head__name="none"), CATEGORIES, FACTS)
    assert head(boxes)["pipeline_tag"] == "object-detection"
    assert "instance-segmentation" not in head(boxes)["tags"] and "\nR-CNN of" in boxes
    masks = head(make_card(recipe(tmp_path), CATEGORIES, FACTS))
    assert (
        masks["pipeline_tag"] == "image-segmentation" and "instance-segmentation" in masks["tags"]
    )
    evaluated = replace(FACTS, evaluation={"step": 20, "ap/box": 0.25, "ap/keypoints": 0.5})
    points = make_card(load_config("coco_keypoints"), CATEGORIES[:1], evaluated)
    assert head(points)["pipeline_tag"] == "keypoint-detection" and "Keypoint R-CNN of" in points
    assert "instance-segmentation" not in head(points)["tags"]
    assert "| AP, keypoints | 0.5000 |" in points


def test_what_is_not_known_is_not_said(tmp_path):
    unknown = Facts("hf://me/mine", "", None, {}, "f0")
    card = make_card(recipe(tmp_path), CATEGORIES, unknown)
    assert "license" not in head(card) and "None is stated: ask the authors" in card
    assert "instances_train.json" not in card and "steps" not in card.split("## Recipe")[0]
    assert "None are known." in card


def test_data_that_are_gone_and_metrics_of_another_step(tmp_path):
    there = recipe(tmp_path)
    gone = replace(there, data=replace(there.data, train_json=f"{tmp_path}/gone.json"))
    card = make_card(gone, CATEGORIES, replace(FACTS, step=30))
    assert "`gone.json` could not be read when this was written." in card
    assert "from 0 to 1, of step 20; these weights are of step 30" in card


def test_names_cannot_leave_their_cells(tmp_path):
    names = ["a|b", "line\nend", "<script>alert(1)</script>"]
    categories = [{"id": k, "name": name} for k, name in enumerate(names, 1)]
    card = make_card(recipe(tmp_path), categories, FACTS)
    assert "a\\|b" in card and "line end" in card and "<script>" not in card
