"""Defaults for every entry, with COCO 2017 as the data: the base of all recipes."""

from ml_collections import ConfigDict

from mask_rcnn_jax.recipe.recipe import Recipe

COCO = dict(
    tfds_dir="data/coco/tfds",
    train_json="data/coco/annotations/instances_train2017.json",
    train_images="data/coco/train2017",
    val_json="data/coco/annotations/instances_val2017.json",
    val_images="data/coco/val2017",
    image_size=(800, 1333),
    resize="shortest_edge",
    max_instances=100,
    bad_annotations="skip",  # a few boxes have no area
    num_workers=16,
)


def get_config() -> ConfigDict:
    return ConfigDict(Recipe.read({"data": COCO}).to_dict()).lock()
