"""Where a recipe's images and annotations come from: a json with files, or with records."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mask_rcnn_jax.annotations.keypoints import Keypoints
from mask_rcnn_jax.data.coco import CocoDataset, load_coco
from mask_rcnn_jax.data.merge import merge, with_classes
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.data.records import MAKE_ANEW, Records, annotation_name, records_dir
from mask_rcnn_jax.data.tfrecords import TFRecords


def load_train(data: DataOptions, *, boxes_only: bool = False) -> CocoDataset:
    """The checked training set, of all that `data.more_train` adds; arguments of `load_split`."""
    first = load_split(data, "train", boxes_only=boxes_only)
    if not data.more_train and not data.class_map:
        return first
    checks = _checks(data)
    more = [load_coco(*paths, boxes_only=boxes_only, **checks) for paths in data.more_train]
    class_map = dict(data.class_map)
    others: Sequence[str] = ()
    known = {name for dataset in (first, *more) for name in dataset.class_names}
    if class_map.keys() - known and data.val_json:
        others = load_split(data, "val", boxes_only=boxes_only).class_names
    return merge([first, *more], class_map, class_ids=data.class_ids, other_names=others)


def load_val(
    data: DataOptions, categories: Sequence[Mapping], *, boxes_only: bool = False
) -> CocoDataset:
    """The checked set to evaluate, for a model that was trained on these categories: it has their
    ids and all of their classes if training merged classes."""
    dataset = load_split(data, "val", boxes_only=boxes_only)
    if not data.more_train and not data.class_map:
        return dataset
    return with_classes(dataset, categories, dict(data.class_map))


def load_split(data: DataOptions, split: str, *, boxes_only: bool = False) -> CocoDataset:
    """The checked "train" or "val" set of a `data` section, without further sets.

    boxes_only: objects need no mask, see `Recipe.learns_boxes_only`.

    All sources give the same examples, if the records were made from that json. Raises ValueError
    or FileNotFoundError for a set that is not there or cannot be used.
    """
    checks = _checks(data)
    checks["boxes_only"] = boxes_only
    annotations = annotation_file(data, split)
    if data.source == "json":
        try:
            return load_coco(annotations, getattr(data, f"{split}_images"), **checks)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error} (data.{split}_json)") from error
    if data.source == "tfrecord":
        return _load_tfrecords(annotations, getattr(data, f"{split}_images"), checks)
    directory = records_dir(data.tfds_dir)
    records = Records(directory, split)
    dataset = load_coco(annotations, directory, records=records, **checks)
    if len(records) != len(dataset.images):
        found = f"{len(records)} records of {split!r}, but {len(dataset.images)} images"
        raise ValueError(f"{directory}: {found} in {annotations}; {MAKE_ANEW}")
    return dataset


def _checks(data: DataOptions) -> dict[str, Any]:
    """Arguments of `load_coco` for all sets."""
    given = {name: getattr(data, name) for name in ("bad_annotations", "class_ids", "bands")}
    points = Keypoints(data.keypoints, data.keypoint_offset)
    return given | {"upright": data.apply_exif == "always", "keypoints": points}


def _load_tfrecords(annotations: str, pattern: str, checks: Mapping[str, Any]) -> CocoDataset:
    if not os.path.exists(annotations):
        command = f"`prepare tfrecord --input {pattern!r} --output {annotations!r}`"
        expected = f"expected the json that the records were made from; {command} writes one"
        raise FileNotFoundError(f"no annotation file {annotations!r}, {expected}")
    records = TFRecords(pattern)
    dataset = load_coco(annotations, pattern, records=records, **checks)
    records.select(image_ids(dataset))
    return dataset


def annotation_file(data: DataOptions, split: str) -> str:
    """Path of the COCO json of a split, whether it is there or not.

    Raises ValueError if `data.val_json` is empty, which means that there is no "val" set.
    """
    if split == "val" and not data.val_json:
        raise ValueError("data.val_json is empty: there is nothing to evaluate on")
    if data.source != "tfds":
        return getattr(data, f"{split}_json")
    return str(records_dir(data.tfds_dir) / annotation_name(split))
