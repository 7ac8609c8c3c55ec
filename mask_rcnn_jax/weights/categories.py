"""Names for the classes of weights that have none."""

import os
from collections.abc import Sequence

from mask_rcnn_jax.annotations.keypoints import PERSON
from mask_rcnn_jax.data.coco import load_categories
from mask_rcnn_jax.data.coco_categories import COCO_CATEGORIES
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.data.source import annotation_file
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.weights.convert import num_classes_in


def guess_categories(data: DataOptions, variables: dict, stated: Sequence[dict] = ()) -> list[dict]:
    """Return categories for weights of a file.

    Takes the names of the "val" set if their number is right, else those `stated` beside the file,
    else COCO's, whose people alone have its keypoints, else numbers.
    """
    count = num_classes_in(variables)
    assert count is not None  # `load_variables` refuses a backbone alone
    annotations = data.val_json and annotation_file(data, "val")
    if annotations and (is_address(annotations) or os.path.isfile(annotations)):
        categories = load_categories(annotations, class_ids=data.class_ids)
        if len(categories) == count:
            return categories
    if len(stated) == count:
        return list(stated)
    if count == 1 and data.keypoints == PERSON:
        return [{"id": 1, "name": "person"}]
    raw = data.class_ids == "raw"
    names = dict(COCO_CATEGORIES)
    if count == (max(names) if raw else len(names)):
        ids = range(1, count + 1) if raw else names
        return [{"id": i, "name": names.get(i, f"unused {i}")} for i in ids]
    return [{"id": k, "name": f"class {k}"} for k in range(1, count + 1)]
